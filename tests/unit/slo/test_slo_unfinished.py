"""A request that hangs violates its limits now, once, and says why when it has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made import MS, S, account, batch, record, step
from slo_watch import SEES, Watch, request

from dsagent.agent.facts import Readings
from dsagent.agent.sinks.slo import SloSink
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limit, Limits
from dsagent.agent.slo.unfinished import GRACE_NS
from dsagent.agent.slo.verdicts import OTHER
from dsagent.instrumentation.records import RequestOpen, Share, request_key

ATTACHED_NS = 1000 * S
LIMIT = Limit("*", ttft_ns=500 * MS, e2e_ns=5 * S, goodput_objective_ratio=0.99)
EVIDENT = 12


class Hanging(Watch):
    """Requests that are opened, and of which some never get any further."""

    def __init__(self, *limits: Limit) -> None:
        super().__init__(SloFile(Limits(limits or (LIMIT,), (1024,))))

    def open(self, name: str, **changes: object) -> RequestOpen:
        made = record(name)
        opened = RequestOpen(
            made.request_key,
            name,
            made.trace_id,
            made.span_id,
            None,
            None,
            self.now_ns,
            pid=1,
            tid=1,
        )
        opened = replace(opened, **changes)  # type: ignore[arg-type]
        self.evaluator.see((opened,), (), ())
        return opened

    def later(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.2)):
            self.now_ns += S // 5
            self.evaluator.judge_unfinished(ATTACHED_NS, self.now_ns)
            self.tick()

    def output(self, name: str) -> None:
        share = Share(request_key(name), "decode", 1, 0, 10, output_tokens=1, recompute=False)
        self.evaluator.see((), (), (replace(step(), shares=(share,)),))

    def end(self, opened: RequestOpen, **changes: object) -> None:
        """It ends now: its account follows. `changes`: of its record."""
        self.evaluator.see((), (opened.request_key,), ())
        made = account(opened.request_id, start_ns=opened.received_ns)
        e2e_ns = self.now_ns - opened.received_ns
        changed = replace(made.record, first_sent_ns=self.now_ns, sent_ns=self.now_ns)
        changed = replace(changed, **changes)  # type: ignore[arg-type]
        self.tick(replace(made, record=changed, e2e_ns=e2e_ns))

    def counted(self, objective: str = "e2e") -> tuple[int, int]:
        """Events and bad ones."""
        return next(
            (
                (series.events, series.bad)
                for key, series in self.evaluator.series.items()
                if key.objective == objective
            ),
            (0, 0),
        )

    def served(self, n: int = 1) -> None:
        """Until one has been served, nobody knows the model."""
        self.tick(*[request()] * n)


def test_it_violates_while_it_hangs_and_only_once() -> None:
    watch = Hanging()
    watch.served()
    before = {name: watch.counted(name) for name in ("ttft", "e2e", "goodput")}
    opened = watch.open("hangs")
    watch.later(1.2)
    assert watch.counted("ttft") == before["ttft"]  # beyond the limit, and within the grace
    watch.later(0.4)
    events, bad = before["ttft"]
    assert watch.counted("ttft") == (events + 1, bad + 1)
    assert watch.counted("e2e") == before["e2e"]
    watch.later(60)
    after = {name: watch.counted(name) for name in before}
    assert after == {name: (events + 1, bad + 1) for name, (events, bad) in before.items()}
    watch.end(opened)
    assert {name: watch.counted(name) for name in before} == after


def test_a_server_that_hangs_pages_though_no_request_ends() -> None:
    watch = Hanging()
    watch.served()
    for number in range(EVIDENT):
        watch.open(f"hangs-{number}")
    watch.later(6)
    alert = watch.alerts[0]
    assert (alert.status, alert.state, alert.labels["severity"]) == ("firing", "burning", "page")
    assert alert.explanation.causes == (("unfinished", 1.0),)
    assert f"{record('hangs-0').trace_id:032x}" in alert.explanation.exemplars
    assert "100 % unfinished" in alert.summary


def test_when_it_has_ended_it_is_known_why() -> None:
    watch = Hanging()
    watch.served()
    opened = [watch.open(f"hangs-{number}") for number in range(EVIDENT)]
    watch.later(10)
    for each in opened:
        watch.end(each)
    (series,) = (s for key, s in watch.evaluator.series.items() if key.objective == "e2e")
    causes = dict(series.violators.explain(0).causes)
    assert causes
    assert "unfinished" not in causes
    assert series.violators.explain(0).violators == EVIDENT
    assert sum(series.burnt_s.values()) > 0


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({"model": "another"}, "another"),
        ({"model": "unheard-of", "first_scheduled_ns": None}, OTHER),
    ],
    ids=["the second model served", "never served"],
)
def test_one_that_turns_out_to_be_of_another_model_counts_there_too(
    changes: dict[str, object], model: str
) -> None:
    """Who has not ended is held to be of the only model served so far."""
    watch = Hanging()
    watch.served()
    opened = watch.open("hangs")
    watch.later(10)
    watch.end(opened, **changes)
    models = {k.model: s.bad for k, s in watch.evaluator.series.items() if k.objective == "e2e"}
    assert models == {record("a").model: 1, model: 1}


def test_one_with_an_output_has_met_its_ttft() -> None:
    watch = Hanging()
    watch.served()
    watch.open("slow")
    watch.later(0.4)
    watch.output("slow")
    watch.later(4)
    assert watch.counted("ttft") == (1, 0)
    watch.later(4)
    assert watch.counted("e2e") == (2, 1)


def test_one_that_ended_in_time_violates_nothing_while_its_account_is_due() -> None:
    watch = Hanging()
    watch.served()
    opened = watch.open("quick")
    watch.evaluator.see((), (opened.request_key,), ())
    watch.later(20)
    assert watch.counted() == (1, 0)


@pytest.mark.parametrize(
    "changes", [{"inferred": True}, {"received_ns": ATTACHED_NS - 1}], ids=["inferred", "partial"]
)
def test_who_is_not_judged(changes: dict[str, object]) -> None:
    watch = Hanging()
    watch.served()
    watch.open("hangs", **changes)
    watch.later(60)
    assert watch.counted() == (1, 0)


@pytest.mark.parametrize(
    "limits",
    [
        (replace(LIMIT, tenant="acme"), replace(LIMIT, name="rest")),
        (replace(LIMIT, prompt_class="le_1024"), replace(LIMIT, name="rest")),
        (replace(LIMIT, by=("tenant",)),),
        (replace(LIMIT, model="another"),),
    ],
    ids=["tenant", "class", "by", "model"],
)
def test_where_its_limit_is_not_certain_it_waits_for_the_end(limits: tuple[Limit, ...]) -> None:
    watch = Hanging(*limits)
    watch.served()
    before = sum(series.events for series in watch.evaluator.series.values())
    watch.open("hangs")
    watch.later(60)
    assert sum(series.events for series in watch.evaluator.series.values()) == before


def test_before_a_model_is_known_it_waits_too_and_is_judged_once_it_is() -> None:
    watch = Hanging()
    watch.open("hangs")
    watch.later(60)
    assert watch.counted() == (0, 0)
    watch.served()
    watch.later(0.2)
    assert watch.counted() == (2, 1)


def test_while_steps_lie_unread_nobody_is_judged() -> None:
    watch = Hanging()
    sink = SloSink(SloFile(Limits((LIMIT,))), watch.evaluator)
    watch.served()
    opened = watch.open("hangs")
    at_ns = opened.received_ns + LIMIT.e2e_ns + GRACE_NS if LIMIT.e2e_ns else 0
    fields = {"sources": SEES, "attached_ns": ATTACHED_NS}
    sink.take(batch(at_ns, due_ns=at_ns - 1, **fields))
    assert watch.counted() == (1, 0)
    sink.take(batch(at_ns, due_ns=at_ns, **fields))
    assert watch.counted() == (2, 1)


def test_what_has_ended_or_is_lost_is_told_as_ended() -> None:
    readings = Readings(closed=[record("a")], forgotten=[7])
    assert readings.ended == [record("a").request_key, 7]
