"""Flags over variables over the file; nothing silently ignored."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from dsagent.agent import app, settings
from dsagent.agent.errors import USAGE, DsagentError


def test_config_is_taken_out_wherever_it_stands() -> None:
    take = settings.take_config_flag
    assert take(["attach", "1", "--config", "f", "--json"]) == (["attach", "1", "--json"], "f")
    assert take(["--config=f", "why"]) == (["why"], "f")
    assert take(["explain", "--", "--config", "f"]) == (["explain", "--", "--config", "f"], None)
    for nameless in (["why", "--config"], ["why", "--config", ""], ["why", "--config="]):
        with pytest.raises(DsagentError, match="--config needs a file"):
            take(nameless)


def test_a_bare_prometheus_does_not_swallow_the_pid() -> None:
    complete = settings.complete_addresses
    default = settings.PROMETHEUS_DEFAULT
    assert complete(["attach", "--prometheus", "12"]) == ["attach", "--prometheus", default, "12"]
    assert complete(["attach", "12", "--prometheus"]) == ["attach", "12", "--prometheus", default]
    assert complete(["--prometheus", "[::1]:1"]) == ["--prometheus", "[::1]:1"]
    assert complete(["--prometheus", "--slo=a:b"]) == ["--prometheus", default, "--slo=a:b"]


def test_the_file_must_be_right(tmp_path: Path) -> None:
    file = tmp_path / "dsagent.toml"
    known = {"duration", "max_overhead"}
    file.write_text('duration = 5\nmax_overhead = "0.5%"\n')
    assert settings.load(str(file), known) == {"duration": 5, "max_overhead": "0.5%"}
    for text, message in (
        ("max_overheat = 1", "unknown setting 'max_overheat' in .*; did you mean max_overhead"),
        ("zzz = 1", "unknown setting 'zzz' .*; known are duration, max_overhead"),
        ("duration = [1]", "must be one value"),
        ("[attach]\nduration = 1", "unknown setting 'attach'"),
        ("duration = ", "is not TOML"),
        ("duration = 1" + "0" * 5000, "is not TOML"),
        ("\xff", "is not TOML"),
        ("#" * (2 << 20), "larger than 1 MiB"),
        ("duration = " + "[" * 100_000, "nested too deeply"),
    ):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(DsagentError, match=message) as raised:
            settings.load(str(file), known)
        assert raised.value.exit_code == USAGE
    with pytest.raises(DsagentError, match="No such file"):
        settings.load(str(tmp_path / "nowhere"), known)
    os.mkfifo(tmp_path / "fifo")
    for irregular, message in (
        (str(tmp_path / "fifo"), "not a regular file"),
        (str(tmp_path), "Is a directory"),
        (os.devnull, "not a regular file"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(DsagentError, match=message) as raised:
            settings.load(irregular, known)
        assert raised.value.exit_code == USAGE


def test_every_flag_is_a_setting_of_the_same_name() -> None:
    """--json is DSAGENT_JSON and json, not as_json: so the parameter's name is the flag's."""
    for command in app.COMMANDS:
        function = app._function(command)
        for name, option in settings._options(function).items():
            flags = option.param_decls or ()
            assert all(flag == "--" + name.replace("_", "-") for flag in flags)
        assert inspect.getdoc(function)


def test_values() -> None:
    assert settings.parse_percent("1") == settings.parse_percent(" 1 % ") == 0.01
    assert settings.parse_address("[::1]:9464") == ("::1", 9464)
    assert settings.parse_address("0.0.0.0:0") == ("0.0.0.0", 0)
    for text in ("", "nan", "0", "101%", "1/2"):
        with pytest.raises(DsagentError, match="no percentage"):
            settings.parse_percent(text)
    assert settings.parse_address("[fe80::1%eth0]:1") == ("fe80::1%eth0", 1)
    for text in (
        *("", "9464", ":9464", "host:", "host:x", "host:65536", "host:٣", "host:1\n", "[]:1"),
        *("[::1:9", "::1]:9", "::1:9", "[host]:9", "a b:9", "[[::1]]:9"),
    ):
        with pytest.raises(DsagentError, match="not HOST:PORT"):
            settings.parse_address(text)


def test_names_by_commas() -> None:
    known = ("kernel", "nvml")
    for text in (None, "", " , "):
        assert settings.parse_names(text, known) == frozenset()
    assert settings.parse_names("nvml", known) == {"nvml"}
    assert settings.parse_names(" kernel,nvml,", known) == {"kernel", "nvml"}
    with pytest.raises(DsagentError, match="'steps' is none of kernel, nvml") as raised:
        settings.parse_names("kernel,steps", known)
    assert raised.value.exit_code == USAGE


def test_prometheus_may_be_a_plain_yes_or_no() -> None:
    of = settings.listen_address
    default = settings.PROMETHEUS_DEFAULT
    assert [of(text) for text in ("1", "true", "True", "on")] == [default] * 4
    assert [of(text) for text in (None, "0", "False", "off")] == [None] * 4
    assert of("host:1") == "host:1"
    with pytest.raises(DsagentError, match="not HOST:PORT"):
        of("2")
