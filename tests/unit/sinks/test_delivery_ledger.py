"""The ledger: each item in one place, at any moment and after the end; and how people see it."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from made import batch
from rich.console import Console

from dsagent.agent.metrics.aggregate import Aggregate
from dsagent.agent.screens import render
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.session.statuses import sink_json
from dsagent.agent.sinks.base import SinkStatus
from dsagent.agent.sinks.delivery_ledger import DeliveryLedger, summed
from dsagent.agent.slo import Limits


def adds_up(status: SinkStatus) -> bool:
    assert status.made is not None
    return (
        status.made + status.recovered == status.queued + status.sent + status.dropped
        and status.sent == status.acknowledged + status.failed
        and sum(status.lost.values()) == status.failed + status.dropped
        and status.queued >= 0
    )


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))),
    st.integers(0, 50),
    st.booleans(),
)
def test_every_item_is_in_one_place(
    steps: list[tuple[int, int, int]], recovered: int, is_kept: bool
) -> None:
    ledger = DeliveryLedger("traces")
    ledger.recovered(recovered)
    for acknowledged, failed, dropped in steps:
        ledger.made(acknowledged + failed + dropped + 1)
        ledger.answered(acknowledged, failed, "rejected", "")
        ledger.dropped(dropped, "queue_full", "full")
        assert adds_up(ledger.status())
    queued = ledger.status().queued
    on_its_way = min(3, queued)
    ledger.close(on_its_way, is_kept=is_kept)
    ledger.answered(on_its_way, 0, "refused", "")  # too late: it has been counted
    ledger.close(on_its_way, is_kept=is_kept)
    status = ledger.status()
    assert adds_up(status)
    assert status.queued == (queued if is_kept else 0)
    assert adds_up(summed("otlp", [status, status]))


def test_it_is_in_the_summary_and_in_the_metrics() -> None:
    traces, logs = DeliveryLedger("traces"), DeliveryLedger("logs")
    traces.recovered(2)
    traces.made(10)
    traces.answered(4, 3, "refused", "http://there: answered 400")
    traces.dropped(1, "queue_full")
    logs.made(5)
    status = summed("otlp", [traces.status(), logs.status()])
    document = sink_json(status)
    assert document["lost"] == {"refused": 3, "queue_full": 1}
    assert [(part["name"], part["queued"]) for part in document["parts"]] == [
        ("traces", 4),
        ("logs", 5),
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(render.sinks([document]))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "refused 3, queue_full 1, 9 wait: http://there: answered 400" in shown
    aggregate = Aggregate(Limits(), Sampler(), {})
    aggregate.add(batch(sinks=(status, SinkStatus("prometheus", 1, 1))))
    found = {
        (family.metric.name, *(value for _, value in point.labels)): point.value
        for family in aggregate.collect()
        for point in family.numbers
    }
    assert found["dsagent.sink.made", "otlp", "traces"] == 12
    assert found["dsagent.sink.queued", "otlp", "logs"] == 5
    assert found["dsagent.sink.lost", "otlp", "traces", "refused"] == 3
    assert ("dsagent.sink.made", "prometheus", "prometheus") not in found
