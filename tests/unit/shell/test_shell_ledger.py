"""What is kept, found and summed up."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from shell_accounts import MS, account, interfered, record

from dsagent.agent.attribution.account import Account, Part
from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.session import ledger as ledgers
from dsagent.agent.session.ledger import By, Ledger, parse_duration_ns

WINDOW = {"now_ns": 1500 * MS, "last_ns": 10_000 * MS}


def filled(*accounts: Account) -> Ledger:
    ledger = Ledger()
    for each in accounts:
        ledger.add(each)
    return ledger


def explain(ledger: Ledger, wanted: str | None = None, by: By = "e2e") -> dict[str, Any]:
    return ledger.explain(wanted, by=by, **WINDOW)


def test_found_by_every_id_and_by_an_unambiguous_beginning() -> None:
    trace_id = 0x4BF92F3577B34DA6A3CE929D0E0E4736
    ledger = filled(
        account(record("req-alpha", trace_id=trace_id, external_id="ticket-7")),
        account(record("req-beta", trace_id=2, external_id="ticket-88")),
    )
    hex_id = f"{trace_id:032x}"
    traceparent = f"00-{hex_id}-00f067aa0ba902b7-01"
    for wanted in ("req-alpha", hex_id, hex_id.upper(), "ticket-7", "req-a", "4bf9", traceparent):
        assert explain(ledger, wanted)["request_id"] == "req-alpha", wanted
    for wanted, message in (
        ("req-", "2 requests have an id that begins with 'req-', among them req-alpha, req-beta"),
        ("nobody", "no request 'nobody'"),
        ("4b", "no request '4b'"),  # too short to be meant
        ("", "no request ''"),
    ):
        with pytest.raises(DsagentError, match=message) as raised:
            explain(ledger, wanted)
        assert raised.value.exit_code == USAGE


def test_of_several_in_one_trace_the_slowest_and_the_others() -> None:
    ledger = filled(
        account(record("one", trace_id=9, e2e_ms=50)),
        account(record("two", trace_id=9, e2e_ms=80)),
        account(record("three", trace_id=10, e2e_ms=90)),
    )
    document = explain(ledger, f"{9:032x}")
    assert document["request_id"] == "two"
    assert document["others"] == [{"request_id": "one", "e2e_ns": 50 * MS}]


def test_the_slowest_by_each_figure() -> None:
    ledger = filled(
        account(record("slow", e2e_ms=300, ttft_ms=20, output_tokens=101)),
        account(record("late", e2e_ms=200, ttft_ms=150, output_tokens=101)),
        account(record("drip", e2e_ms=250, ttft_ms=20, output_tokens=3)),
        account(record("failed", e2e_ms=10, ttft_ms=None, output_tokens=0)),
        account(record("partial", e2e_ms=900), partial=True),
    )
    assert explain(ledger)["request_id"] == "slow"
    assert explain(ledger, by="ttft")["request_id"] == "late"
    assert explain(ledger, by="tpot")["request_id"] == "drip"
    assert [each["request_id"] for each in explain(ledger)["others"]] == ["drip", "late", "failed"]
    assert explain(ledger, "partial")["partial"] is True
    with pytest.raises(
        DsagentError, match="no request with a known ttft in the last 10s of what the agent keeps"
    ):
        explain(filled(account(record("failed", ttft_ms=None))), by="ttft")


def test_by_id_only_that_unfinished_request_is_made_and_only_where_none_ended() -> None:
    ledger = Ledger()
    ledger.add(account(record("req-done", sent_ms=1000)))
    asked: list[str] = []

    def find(wanted: str) -> Account | None:
        asked.append(wanted)
        return account(record(wanted), finished=False) if wanted == "req-open" else None

    def all_of_them() -> list[Account]:
        raise AssertionError("each open account is work")

    lazily: dict[str, Any] = {"unfinished": all_of_them, "find": find, **WINDOW}
    assert ledger.explain("req-done", **lazily)["finished"] is True
    assert asked == []
    assert ledger.explain("req-open", **lazily)["finished"] is False
    assert ledger.explain("req-d", **lazily)["request_id"] == "req-done"
    with pytest.raises(DsagentError, match="no request 'req-x'"):
        ledger.explain("req-x", **lazily)


def test_unfinished_requests_count() -> None:
    ledger = filled(account(record("ended", e2e_ms=100)))
    running = account(record("running", e2e_ms=400), finished=False)
    document = ledger.explain(None, unfinished=lambda: [running], **WINDOW)
    assert (document["request_id"], document["finished"]) == ("running", False)


def test_a_document_keeps_every_nanosecond() -> None:
    one = interfered()
    document = explain(filled(one))
    assert document == {**one.to_json(), "others": []}
    parts_ns = sum(part["ns"] for part in document["parts"])
    assert parts_ns + document["unattributed_ns"] == document["e2e_ns"]


def test_why_adds_up_and_leaves_partial_ones_out() -> None:
    ledger = filled(
        interfered("a"), interfered("b"), account(record("p", e2e_ms=900), partial=True)
    )
    document = ledger.why(**WINDOW)
    assert document["requests"] == 2
    assert sum(cause["ns"] for cause in document["causes"]) == 200 * MS
    assert sum(cause["ratio"] for cause in document["causes"]) == pytest.approx(1.0)
    first = document["causes"][0]
    assert first == {"cause": "batch.prefill_interference", "ns": 124 * MS, "ratio": 0.62}
    assert document["culprits"][0]["ns"] == 120 * MS
    assert document["culprits"][0]["cause"] == "batch.prefill_interference"
    assert len(document["worst"]) == 2
    nothing = Ledger().why(**WINDOW)
    assert nothing == {"requests": 0, "causes": [], "culprits": [], "worst": []}


def test_only_what_ended_in_the_span() -> None:
    ledger = filled(
        account(record("old", sent_ms=1000, e2e_ms=500)), account(record("new", sent_ms=9000))
    )
    document = ledger.explain(None, now_ns=9000 * MS, last_ns=5000 * MS)
    assert (document["request_id"], document["others"]) == ("new", [])
    assert ledger.why(now_ns=9000 * MS, last_ns=5000 * MS)["requests"] == 1
    ledger.expire(1000 * MS + ledgers.KEEP_NS + 1)
    assert len(ledger) == 1
    assert ledger.evicted == 0


def test_showpieces_are_the_slowest_and_the_one_most_delayed_by_others() -> None:
    own = account(record("long", e2e_ms=500), Part("prefill.compute", 499 * MS, "modelled"))
    documents = filled(own, interfered("victim")).showpieces()
    assert [each["request_id"] for each in documents] == ["long", "victim"]
    assert [each["request_id"] for each in filled(interfered("victim")).showpieces()] == ["victim"]
    assert Ledger().showpieces() == []


def test_median_unattributed() -> None:
    assert Ledger().unattributed_ratio_p50() is None
    ledger = filled(
        account(record("a"), Part("decode.compute", 99 * MS, "modelled")),
        account(record("b"), Part("decode.compute", 96 * MS, "modelled")),
        account(record("c"), Part("decode.compute", 10 * MS, "modelled")),
    )
    assert ledger.unattributed_ratio_p50() == pytest.approx(0.04)


def test_memory_is_bounded_by_what_it_really_takes() -> None:
    limit_bytes = 1 << 20
    ledger = Ledger(max_bytes=limit_bytes)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1000):
            ledger.add(interfered(f"chatcmpl-{number:032x}"))
        gc.collect()
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ledger) + ledger.evicted == ledger.total == 1000
    assert ledger.evicted > 0
    assert limit_bytes / 4 < taken_bytes <= limit_bytes


@pytest.mark.parametrize(
    ("text", "ns"),
    [("10m", 600_000 * MS), ("90s", 90_000 * MS), ("1.5h", 5_400_000 * MS), ("500ms", 500 * MS)],
)
def test_durations(text: str, ns: int) -> None:
    assert parse_duration_ns(text) == ns


@pytest.mark.parametrize("text", ["", "m", "-1s", "0", "10 years", "1e9h", "99999999999h"])
def test_no_durations(text: str) -> None:
    with pytest.raises(DsagentError, match="is no duration"):
        parse_duration_ns(text)
