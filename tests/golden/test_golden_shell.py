"""Text in, text out, through the real command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from shell_accounts import MS, account, interfered, record

from dsagent.agent.attribution.account import Part
from dsagent.agent.facts import ClockAnchor, Target
from dsagent.agent.sinks.base import Explained
from dsagent.agent.sinks.recording import RecordingSink

Golden = Callable[[str, str], None]

COMMAND = str(Path(sys.executable).with_name("dsagent"))
COMMANDS = (
    "serve",
    "sidecar",
    "status",
    "attach",
    "detach",
    "explain",
    "why",
    "doctor",
    "probes",
    "demo",
    "slo",
    "roll",
    "retain",
    "fleet",
)


def dsagent(*argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSAGENT_", "COLUMNS"))}
    return subprocess.run(
        [COMMAND, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        env={**kept, **(env or {})},
        check=False,
    )


def test_help(golden: Golden) -> None:
    ran = dsagent()
    assert ran.returncode == 0
    assert ran.stdout == dsagent("--help").stdout
    golden("help.txt", ran.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(command: str, golden: Golden) -> None:
    ran = dsagent(command, "--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"\n    dsagent {command}" in ran.stdout
    golden(f"help-{command}.txt", ran.stdout)


# The same of the engines that attach names.
SEEN_HERE = re.compile(r"(?<=; )(engines here: \d|no engine is seen here).*")

ERRORS = {
    "no-such-command": ("attatch 12", 2),
    "no-such-option": ("why --since 10m", 2),
    "missing-argument": ("attach", 2),
    "not-a-pid": ("attach server", 2),
    "pid-zero": ("attach 0", 2),
    "no-such-process": ("attach 3999999999", 3),
    "not-a-duration": ("why --last soon", 2),
    "not-a-choice": ("explain --by speed", 2),
    "not-an-overhead": ("attach 1 --max-overhead none", 2),
    "not-a-source": ("attach 1 --without kernel,steps", 2),
    "config-missing": ("why --config /nonexistent/dsagent.toml", 2),
    "no-recording": ("explain --recording /nonexistent/recording", 2),
    "no-regex": ("sidecar --match (", 2),
    "no-agent": ("why --pid 3999999999", 2),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_and_an_exit_code(name: str, golden: Golden) -> None:
    line, code = ERRORS[name]
    ran = dsagent(*line.split())
    assert (ran.returncode, ran.stdout) == (code, ""), ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("dsagent: ")
    if name != "no-agent":  # what it lists depends on what runs on this machine
        golden(f"error-{name}.txt", SEEN_HERE.sub("…", ran.stderr))


NO_SUCH = "3999999999"
INFINITE = "inf is no number of seconds up to 1e+09."
BY_FILE = "the settings file says so"


@pytest.mark.parametrize(
    ("argv", "env", "config", "message"),
    [
        (["--duration", "inf"], {}, "", f"Invalid value for '--duration': {INFINITE}"),
        (["--duration", "1e309"], {}, "", f"Invalid value for '--duration': {INFINITE}"),
        (
            [],
            {"DSAGENT_DURATION": "inf"},
            "",
            f"Invalid value for '--duration': {INFINITE} (DSAGENT_DURATION says so)",
        ),
        ([], {}, "duration = inf", f"Invalid value for '--duration': {INFINITE} ({BY_FILE})"),
        (
            ["--duration", "nan"],
            {},
            "",
            "Invalid value for '--duration': it must be greater than or equal to 0.1",
        ),
        (["--record", ""], {}, "", "Invalid value for '--record': it needs a name."),
        ([], {}, "record = ''", f"Invalid value for '--record': it needs a name. ({BY_FILE})"),
        ([], {}, "slo = 5", f"Invalid value for '--slo': it needs a name. ({BY_FILE})"),
        (["--prometheus", "[::1:9"], {}, "", "'[::1:9' is not HOST:PORT or [IPV6]:PORT"),
        (
            ["--prometheus", "0.0.0.0:0"],
            {},
            "",
            "--prometheus 0.0.0.0:0 would answer everybody who reaches this machine: give "
            "--listen-token-file FILE, or --listen-open where something else guards it",
        ),
        (
            ["--listen-tls-cert", "cert.pem"],
            {},
            "",
            "--listen-tls-cert and --listen-tls-key need each other: give both",
        ),
        ([], {"DSAGENT_PROMETHEUS": "2"}, "", "'2' is not HOST:PORT or [IPV6]:PORT"),
        (
            ["--record-max-bytes", str(1 << 61)],
            {},
            "",
            "Invalid value for '--record-max-bytes': 2305843009213693952 is more than "
            "1152921504606846976.",
        ),
    ],
)
def test_values_out_of_this_world(
    argv: list[str], env: dict[str, str], config: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "dsagent.toml"
    file.write_text(config)
    ran = dsagent("attach", NO_SUCH, *argv, env={"DSAGENT_CONFIG": str(file), **env})
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"dsagent: {message}\n")


@pytest.mark.parametrize("how", ["1", "true", "prometheus = true", "prometheus = '[::1]:0'"])
def test_prometheus_switched_on_without_an_address(how: str, tmp_path: Path) -> None:
    """Taken: what is complained of is the process."""
    file = tmp_path / "dsagent.toml"
    file.write_text(how if "=" in how else "")
    env = {"DSAGENT_CONFIG": str(file), **({} if "=" in how else {"DSAGENT_PROMETHEUS": how})}
    assert dsagent("attach", NO_SUCH, env=env).returncode == 3


def test_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "dsagent.toml"
    config.write_text("max_overhaed = 2\n")
    ran = dsagent("why", env={"DSAGENT_CONFIG": str(config)})
    assert ran.returncode == 2
    assert ran.stderr == (
        f"dsagent: unknown setting 'max_overhaed' in {config}; did you mean max_overhead?\n"
    )


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_bug_is_one_line_too(debug: str, tmp_path: Path) -> None:
    """A control character in a file's name passes through every layer on its way to stderr."""
    program = (
        "import sys\nfrom dsagent.agent import app, settings\n"
        "def broken(*_): raise RuntimeError('bad\\x1b[31m luck\\nindeed')\n"
        "settings.take_config_flag = broken\nsys.exit(app.run(['why']))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "DSAGENT_DEBUG": debug},
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "dsagent: internal error: RuntimeError: bad\\x1b[31m luck indeed "
        "(DSAGENT_DEBUG=1 shows where)"
    )
    assert ("Traceback" in ran.stderr) is bool(debug)


def test_an_older_python_is_refused_in_one_line() -> None:
    """The plug-in beside an engine runs on 3.10, and `dsagent` is installed along with it."""
    program = (
        "import sys\nsys.version_info = (3, 10, 14)\nsys.modules['tomllib'] = None\n"
        "import dsagent.agent.cli\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("dsagent: the commands need Python 3.11 or later; this is 3.")
    assert ran.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording") / "run"
    sink = RecordingSink(folder)
    target = Target(10, 1, 1, "python", (), "reference")
    sink.start()
    sink.take(
        Explained(
            target,
            ClockAnchor(0, 1_700_000_000_000_000_000, 50),
            2000 * MS,
            accounts=(
                interfered(),
                account(
                    record("chatcmpl-own", trace_id=2, e2e_ms=80, ttft_ms=70),
                    Part("prefill.compute", 64 * MS, "modelled"),
                    Part("decode.compute", 16 * MS, "modelled"),
                ),
                account(
                    record("chatcmpl-odd", trace_id=3, e2e_ms=60, ttft_ms=None, output_tokens=0),
                    Part("decode.compute", 20 * MS, "assumed"),
                    partial=True,
                ),
            ),
        )
    )
    sink.stop(30.0)
    return folder


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("explain-interfered", ["explain"]),
        ("explain-own", ["explain", "chatcmpl-own"]),
        ("explain-unexplained", ["explain", "0" * 31 + "3"]),
        ("why", ["why", "--last", "1h"]),
    ],
)
def test_pages(name: str, argv: list[str], recording: Path, golden: Golden) -> None:
    ran = dsagent(*argv, "--recording", str(recording))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80
    golden(f"{name}.txt", ran.stdout)


def test_json_is_one_document_and_nothing_else(recording: Path, golden: Golden) -> None:
    ran = dsagent("explain", "ticket-7", "--json", "--recording", str(recording))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == {**interfered().to_json(), "others": []}
    golden("explain.json", ran.stdout)
    document = json.loads(dsagent("why", "--json", "--recording", str(recording)).stdout)
    assert set(document) == {"requests", "causes", "culprits", "worst"}


def test_wider_where_columns_says_so(recording: Path) -> None:
    ran = dsagent("explain", "--recording", str(recording), env={"COLUMNS": "120"})
    assert max(map(len, ran.stdout.splitlines())) > 80
