"""Whatever is asked for that is not there, or is not what it should be: exit code 2 and one line,
through the real command. One table for all commands, so that none is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsagent.agent.app import COMMANDS

COMMAND = str(Path(sys.executable).with_name("dsagent"))
# {gone}: not there. {dir}: an empty folder. {text}, {bytes}: files that hold a word, and no text.
# {fifo}: would keep a reader waiting. No process has the pid.
PID = "3999999999"
ATTACH = f"attach {PID} "
NO_URL = "is not a URL such as"

WRONG = [
    ("demo --model nosuch", "no model 'nosuch': it is neither a folder nor smollm2 nor tiny-llama"),
    ("serve --model {dir}", "{dir}/config.json: No such file or directory"),
    ("serve --model tiny-llama --port 99999", "--port"),
    ("demo --duration 0", "--duration"),
    (ATTACH + "--slo {gone}", "cannot read {gone}: No such file or directory"),
    (ATTACH + "--slo {dir}", "cannot read {dir}: Is a directory"),
    (ATTACH + "--slo {fifo}", "{fifo}: not a regular file"),
    (ATTACH + "--slo {text}", "{text}: must be a mapping with the key slo"),
    (ATTACH + "--otlp-endpoint nonsense", f"--otlp-endpoint: 'nonsense' {NO_URL}"),
    (ATTACH + "--remote-write nonsense", f"--remote-write: 'nonsense' {NO_URL}"),
    (ATTACH + "--pyroscope nonsense", f"--pyroscope: 'nonsense' {NO_URL}"),
    (ATTACH + "--instrument inject --yes --slo {gone}", "cannot read {gone}"),
    (ATTACH + "--sample-rate lots", "'lots' is no percentage"),
    (ATTACH + "--listen-token-file {gone}", "--listen-token-file: cannot read {gone}"),
    ("detach server", "not a whole number"),
    ("explain --recording {gone}", "{gone}: no recording there"),
    ("explain --recording {text}", "{text}: Not a directory"),
    ("explain nosuch --recording {dir}", "{dir}: no recording there"),
    ("why --recording {dir}", "{dir}: no recording there"),
    ("why --config {gone}", "cannot read {gone}"),
    ("why --config {bytes}", "{bytes} is not TOML"),
    ("why --last 0s", "'0s' is no duration"),
    ("status --pid 0", "--pid"),
    ("doctor --pid 0", "--pid"),
    ("probes everything", "unexpected extra argument"),
    ("sidecar --max-engines 0", "--max-engines"),
    ("sidecar --listen nonsense", "'nonsense' is not HOST:PORT"),
    ("slo check {gone}", "cannot read {gone}: No such file or directory"),
    ("slo check {dir}", "cannot read {dir}: Is a directory"),
    ("slo check {fifo} --json", "{fifo}: not a regular file"),
    ("slo generate {gone}", "cannot read {gone}"),
    ("slo generate --out {text}", "--out {text}: not a folder"),
    ("slo generate --divide-windows-by nan", "--divide-windows-by"),
    ("dashboards check {gone}", "{gone}: there is no such file"),
    ("dashboards check {text} {gone}", "{gone}: there is no such file"),
    ("dashboards check {dir}", "{dir}: no .json, .yaml or .yml file there"),
    ("dashboards check --metrics {dir}", "{dir} cannot be read: Is a directory"),
    ("dashboards generate {text}", "{text}: not a folder"),
    ("roll {gone} {dir}", "{gone}: no recording there"),
    ("roll {dir} {text}", "{text}: not a folder"),
    ("roll {dir} s3://", "'s3://' is not s3://bucket/prefix"),
    ("roll {dir} s3://bucket --s3-ca-file {gone}", "cannot read {gone}"),
    ("retain {dir} --policy {gone}", "cannot read {gone}"),
    ("retain {dir} --policy {text}", "{text} is not TOML"),
    ("fleet nothing", "'nothing' is not one of"),
    ("fleet size --measured {gone}", "cannot read {gone}"),
    ("fleet size --pods 0", "--pods"),
    ("fleet measure --duration inf", "--duration"),
    ("fleet sql {gone} slowest", "{gone}: no store there"),
    ("fleet sql {text} slowest", "{text}: not a folder"),
    ("fleet sql {dir} ", "sql needs STORE and SQL"),
    ("fleet sql s3://bucket slowest --s3-ca-file {gone}", "cannot read {gone}"),
    ("fleet sql s3://bucket slowest --s3-ca-file {text}", "{text}: no certificate in it (PEM)"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "dir").mkdir()
    (folder / "text").write_text("word")
    (folder / "bytes").write_bytes(b"\xff\xfe\0")
    os.mkfifo(folder / "fifo")
    return {name: str(folder / name) for name in ("gone", "dir", "text", "bytes", "fifo")}


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line for line, _ in WRONG])
def test_bad_input_ends_with_2_and_one_line(
    line: str, said: str, places: dict[str, str], tmp_path: Path
) -> None:
    argv = [word.format(**places) for word in line.split(" ")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSAGENT_", "OTEL_", "AWS_"))}
    ran = subprocess.run(
        [COMMAND, *argv],
        cwd=tmp_path,
        env=kept,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert said.format(**places) in last
    assert last.startswith(("dsagent: ", "error: "))  # the latter: what serve becomes
    assert "Traceback" not in ran.stderr


def test_every_command_has_its_bad_input() -> None:
    assert {line.split(" ")[0] for line, _ in WRONG} == set(COMMANDS)
