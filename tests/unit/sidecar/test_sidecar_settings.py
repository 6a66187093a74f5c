"""Settings are read by the command's own parser, again and again; what cannot change is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from dsagent.agent import app
from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.admission import ListenOptions
from dsagent.agent.settings import File
from dsagent.agent.sidecar.options import SidecarOptions, needing_restart
from dsagent.agent.sidecar.reader import SettingsReader, parser_of

SLO = "slo:\n  - name: chat\n    model: '*'\n    e2e_ms: 2000\n    objective: 99\n"


class Lab:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.path = base / "dsagent.toml"

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def reader(self, *arguments: str) -> SettingsReader:
        built, _, file = app.build(["--config", str(self.path), "sidecar", *arguments])
        assert file is not None
        command = get_command(built).commands["sidecar"]  # type: ignore[attr-defined]
        return SettingsReader(
            file, parser_of(typer.Context(command, info_name="sidecar"), arguments)
        )


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_flags_before_variables_before_the_file(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.write('tier = "full"\nmax_overhead = "3%"\nmax_engines = 2\nrecord = "rec"\n')
    monkeypatch.setenv("DSAGENT_MAX_OVERHEAD", "2%")
    options = lab.reader("--max-engines", "5").read()
    assert options.max_engines == 5
    assert options.attach.max_overhead_ratio == pytest.approx(0.02)
    assert options.attach.tier == "full"
    assert options.attach.outlets.record == Path("rec")
    assert options.listen == "127.0.0.1:9464"


def test_what_is_new_in_the_file_comes_with_the_next_reading(lab: Lab) -> None:
    lab.write('tier = "core"\n')
    reader = lab.reader()
    before = reader.read()
    assert reader.read() == before  # nothing has changed: nothing is attached to anew
    lab.write('tier = "full"\nmatch = "vllm"\nlisten = "no"\n')
    after = reader.read()
    assert (after.attach.tier, after.listen) == ("full", None)
    assert after.match is not None
    assert after.match.search("x vllm y")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tier = ", "is not TOML"),
        ('teir = "core"', "did you mean tier?"),
        ('tier = "fast"', "'fast' is not one of"),
        ('max_overhead = "none"', "is no percentage"),
        ("max_engines = 0", "Invalid value for '--max-engines'"),
        ('match = "("', "is no regular expression"),
        ('otlp_receive = "nowhere"', "is not HOST:PORT"),
        ("otlp_receive = [1]", "otlp_receive"),
        ("otlp_receive_grpc = 4317", "'4317' is not HOST:PORT"),
        (
            'listen = "127.0.0.1:9464"\notlp_receive = "localhost:9464"',
            "--otlp-receive and --listen are both to listen on port 9464",
        ),
        (
            'otlp_receive = "[::]:1"\notlp_receive_grpc = "[::1]:1"\nlisten_open = true',
            "--otlp-receive-grpc and --otlp-receive are both to listen on port 1",
        ),
        (
            'otlp_receive = "yes"\notlp_endpoint = "http://localhost:4318"',
            "would send its spans to itself",
        ),
        ('slo = "missing.yaml"', "cannot read missing.yaml"),
        ("[sidecar]\nallow_injekt = true", "unknown setting 'allow_injekt' in [sidecar]"),
        ("[sidecar]\nallow_inject = 1", "must be true or false"),
        ("[other]\nx = 1", "unknown setting 'other'"),
    ],
)
def test_each_wrong_file_has_one_clear_line(lab: Lab, text: str, why: str) -> None:
    lab.write(text)
    with pytest.raises(DsagentError) as raised:
        lab.reader().read()
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_gone_is_an_error_if_it_was_named(lab: Lab) -> None:
    with pytest.raises(DsagentError, match="cannot read"):
        lab.reader().read()


def test_without_a_file_there_are_flags_and_variables(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsagent.agent.settings.DEFAULT_FILE", lab.base / "none.toml")
    assert File(None).path is None
    assert File(None).load() == {}
    (lab.base / "none.toml").write_text('tier = "core"\n')  # it may come later
    assert File(None, frozenset({"tier"})).load() == {"tier": "core"}


def test_only_the_file_can_allow_to_inject(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.write("")
    monkeypatch.setenv("DSAGENT_ALLOW_INJECT", "1")
    assert lab.reader().read().allow_inject is False
    with pytest.raises(DsagentError, match="No such option"):
        lab.reader("--allow-inject").read()
    lab.write("[sidecar]\nallow_inject = true\n")
    assert lab.reader().read().allow_inject is True


def test_an_slo_file_is_read_with_the_settings_and_compared_by_what_it_says(lab: Lab) -> None:
    slo = lab.base / "slo.yaml"
    slo.write_text(SLO)
    lab.write(f'slo = "{slo}"\n')
    reader = lab.reader()
    before = reader.read()
    assert before.attach.slo is not None
    assert reader.read().attach == before.attach
    slo.write_text(SLO.replace("2000", "1000"))
    assert reader.read().attach != before.attach
    slo.write_text("slo: 7\n")
    with pytest.raises(DsagentError):
        reader.read()


def test_what_needs_a_restart_is_named() -> None:
    old = SidecarOptions(listen="127.0.0.1:1")
    assert needing_restart(old, old) == ()
    new = replace(old, listen="127.0.0.1:2", guarded_by=ListenOptions(is_open=True), as_json=True)
    assert needing_restart(old, new) == (
        "listen",
        "listen_token_file, listen_tls_cert, listen_tls_key, listen_open",
        "json",
    )
    assert needing_restart(old, replace(old, max_memory_bytes=3, allow_inject=True)) == ()
