"""Limits: what a file may say, and who violates them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from made import MS, account

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.slo import Limit, Limits, load_limits

GOOD = """
slo:
  - model: "tiny-*"
    ttft_ms: 250
    tpot_ms: 99.5
  - model: "*"
    e2e_ms: 900
"""


def test_a_good_file(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(GOOD)
    limits = load_limits(tmp_path / "slo.yaml")
    assert limits == Limits(
        (Limit("tiny-*", ttft_ns=250 * MS, tpot_ns=99_500_000), Limit("*", e2e_ns=900 * MS))
    )
    assert limits.bounds_s("ttft") == (0.25,)
    assert limits.bounds_s("e2e") == (0.9,)


def test_who_violates_what() -> None:
    limits = Limits((Limit("tiny-*", ttft_ns=250 * MS, tpot_ns=100 * MS), Limit("*", e2e_ns=1)))
    # TTFT 300 ms; TPOT (1000 - 300) / 7 = 100 ms, which is not above the limit.
    assert limits.violated(account()) == ["ttft"]
    assert limits.violated(account(model="other")) == ["e2e"]
    assert limits.violated(account(partial=True)) == []
    # What is absent is not judged.
    assert limits.violated(account(first_sent_ns=None)) == []
    assert Limits().violated(account()) == []
    assert Limits((Limit("another", e2e_ns=1),)).violated(account()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping"),
        ("- 1", "must be a mapping"),
        ("slo: [", "not YAML"),
        ("slo: []", "at least one"),
        ("slo: [3]", r"slo\[0\] must be a mapping"),
        ("slos: []", r"unknown key 'slos' \(known: slo, tenant_header"),
        ("slo: [{model: '*', ttft: 3}]", r"slo\[0\]: unknown key 'ttft'"),
        ("slo: [{ttft_ms: 3}]", "model must be"),
        ("slo: [{model: '*'}]", "needs at least one of"),
        ("slo: [{model: '*', ttft_ms: 0}]", "milliseconds above 0"),
        ("slo: [{model: '*', ttft_ms: .nan}]", "milliseconds above 0"),
        ("slo: [{model: '*', ttft_ms: true}]", "milliseconds above 0"),
        ("slo: [{model: '*', ttft_ms: '5'}]", "milliseconds above 0"),
        ("slo: !!python/object/apply:os.system [ls]", "not YAML"),
        ("slo: \x00", "not YAML"),
        ("[" * 100_000, "nested too deeply"),
        ("slo: [{model: '*', ttft_ms: 1" + "0" * 400 + "}]", "milliseconds above 0"),
        ("slo: [{model: '*', ttft_ms: 1" + "0" * 5000 + "}]", "not YAML"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(text)
    with pytest.raises(DsagentError, match=message) as raised:
        load_limits(path)
    assert raised.value.exit_code == USAGE
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DsagentError, match="No such file"):
        load_limits(tmp_path / "none.yaml")


def test_a_fifo_does_not_keep_us_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slo.yaml")
    with pytest.raises(DsagentError, match="not a regular file") as raised:
        load_limits(tmp_path / "slo.yaml")
    assert raised.value.exit_code == USAGE
