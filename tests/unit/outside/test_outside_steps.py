"""Steps and records made of marks and of what was sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.facts import Readings
from dsagent.agent.sources.outside.exchanges import Exchange, Heard
from dsagent.agent.sources.outside.lives import Lives, MarkedBy
from dsagent.agent.sources.outside.reply import Reply
from dsagent.agent.sources.outside.steps import Mark
from dsagent.instrumentation.records import Phase, RequestRecord, Step

MS = 1_000_000
STEP_NS = 10 * MS


@dataclass
class Engine:
    """A time line of what can be seen of an engine from outside; `lag_ns` passes between the end
    of a step and the sending of its text."""

    lag_ns: int
    marked_by: MarkedBy = "function"
    now_ns: int = 1000 * MS
    step: int = 0
    steps: list[Step] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lives = Lives(9)
        self.lives.marked_by = self.marked_by
        self.count = 0
        self.pending: list[tuple[int, Exchange, bool]] = []  # text, and whether it is the last

    def request(self, body_bytes: int = 40, **headers: str) -> Exchange:
        self.count += 1
        exchange = Exchange(self.count, "chat", 7, 8, self.now_ns, headers, body_bytes)
        exchange.status, exchange.reply = 200, Reply(events=True)
        self._hear(Heard(begun=[exchange]))
        return exchange

    def compute(
        self, *outputs: Exchange, ends: tuple[Exchange, ...] = (), ns: int = STEP_NS
    ) -> None:
        """One step, which makes text for each of these."""
        self.step += 1
        mark = Mark(self.step, self.now_ns, 70, 71)
        self._flush(mark.start_ns)
        self._hear(Heard(), mark)
        self.now_ns += ns
        if self.marked_by == "sends":  # in two parts
            parts = [Mark(0, self.now_ns + part, 70, 72) for part in (0, 100_000)]
            self.lives.hear(Heard(), (), Readings(), parts)
        self.pending += [(self.now_ns + self.lag_ns, each, each in ends) for each in outputs]
        self._flush(self.now_ns)

    def _flush(self, until_ns: int) -> None:
        heard = Heard()
        for at_ns, exchange, last in [p for p in self.pending if p[0] <= until_ns]:
            exchange.tokens_ns.append(at_ns)
            heard.tokens.append((at_ns, exchange))
            if last:
                exchange.ended_ns, exchange.outcome = at_ns, "complete"
                heard.ended.append(exchange)
        self.pending = [p for p in self.pending if p[0] > until_ns]
        self._hear(heard)

    def rest(self, ns: int = 3000 * MS) -> None:
        self.now_ns += ns
        self._flush(self.now_ns)
        self._tell()

    def _hear(self, heard: Heard, *marks: Mark) -> None:
        readings = Readings()
        self.lives.hear(heard, marks, readings)
        self._tell(readings)

    def _tell(self, readings: Readings | None = None) -> None:
        readings = readings or Readings()
        self.lives.tell(self.now_ns, readings)
        self.steps += readings.steps
        self.records += readings.closed


def shares(engine: Engine, record: RequestRecord) -> list[tuple[int, Phase, int]]:
    return [
        (step.step_id, share.phase, share.output_tokens)
        for step in engine.steps
        for share in step.shares
        if share.request_key == record.request_key
    ]


# Text sent at once; by an overloaded front end; and after the next step has begun.
@pytest.mark.parametrize("lag_ns", [0, 1 * MS, 4 * MS])
def test_each_token_belongs_to_the_step_that_made_it(lag_ns: int) -> None:
    engine = Engine(lag_ns)
    one = engine.request()
    engine.now_ns += 2 * MS
    for _ in range(5):
        engine.compute(one)
    engine.compute(one, ends=(one,))
    engine.rest()
    (record,) = engine.records
    assert [step.step_id for step in engine.steps] == [1, 2, 3, 4, 5, 6]
    assert shares(engine, record) == [
        (1, Phase.PREFILL, 1),
        *((n, Phase.DECODE, 1) for n in range(2, 7)),
    ]
    assert record.output_tokens == 6
    assert record.queued_ns == record.first_scheduled_ns == record.received_ns + 2 * MS
    assert record.inferred and all(step.inferred for step in engine.steps)
    for step in engine.steps[:-1]:
        assert step.end_ns - step.start_ns == pytest.approx(STEP_NS, abs=lag_ns + 1)


def test_who_waits_is_in_no_step_and_a_long_one_holds_its_prompt() -> None:
    engine = Engine(0)
    one = engine.request()
    for _ in range(8):
        engine.compute(one)
    engine.now_ns += 1
    two = engine.request(body_bytes=4000)
    for _ in range(3):  # no place for it yet
        engine.compute(one)
    engine.compute(one, ns=10 * STEP_NS)  # the first half of its prompt
    engine.compute(one, two, ns=10 * STEP_NS)
    engine.compute(one, two, ends=(one, two))
    engine.rest()
    first, second = engine.records
    assert [step_id for step_id, _, _ in shares(engine, first)] == list(range(1, 15))
    assert shares(engine, second) == [
        (12, Phase.PREFILL, 0),
        (13, Phase.PREFILL, 1),
        (14, Phase.DECODE, 1),
    ]
    prefills = [s for step in engine.steps[11:13] for s in step.shares if s.phase is Phase.PREFILL]
    assert [share.scheduled_tokens for share in prefills] == [500, 500]
    assert [step.waiting for step in engine.steps[8:12]] == [1, 1, 1, 0]


def test_a_step_of_two_is_not_long_for_being_one_of_two() -> None:
    engine = Engine(0)
    one = engine.request()
    for _ in range(8):
        engine.compute(one)
    engine.now_ns += 1
    two = engine.request()
    engine.compute(one, two, ns=2 * STEP_NS)
    three = engine.request()
    for _ in range(6):  # there is no place for the third
        engine.compute(one, two, ns=17 * MS)
    engine.compute(one, two, ends=(one, two), ns=17 * MS)
    engine.compute(three, ends=(three,))
    engine.rest()
    last = engine.records[-1]
    assert shares(engine, last) == [(17, Phase.PREFILL, 1)]
    assert last.first_scheduled_ns is not None
    assert last.first_scheduled_ns - last.received_ns >= 7 * 17 * MS


def test_without_marks_the_text_tells_the_steps() -> None:
    engine = Engine(1 * MS, marked_by="text")
    one, two = engine.request(), engine.request()
    for _ in range(9):
        engine.compute(one, two)
    engine.compute(one, two, ends=(one, two))
    engine.rest()
    assert len(engine.steps) == pytest.approx(10, abs=1)
    assert len(engine.records) == 2


def test_what_a_core_sends_ends_its_steps() -> None:
    engine = Engine(1 * MS, marked_by="sends")
    for _ in range(2):
        one, two = engine.request(), engine.request()
        for _ in range(9):
            engine.compute(one, two)
        engine.compute(one, two, ends=(one, two))
        engine.rest()
    assert [len(step.shares) for step in engine.steps] == [2] * 20
    assert [record.output_tokens for record in engine.records] == [10] * 4


def test_the_trace_is_the_callers_and_the_id_the_replys() -> None:
    engine = Engine(0)
    one = engine.request(traceparent=f"00-{'a' * 32}-{'b' * 16}-01", **{"x-request-id": "q\x1b[2J"})
    line = b'data: {"id":"chatcmpl-9","model":"m","choices":[{"delta":{"content":"x"}}]}\n\n'
    assert one.reply is not None
    one.reply.feed(line, len(line))
    engine.compute(one, ends=(one,))
    engine.rest()
    (record,) = engine.records
    assert record.trace_id == int("a" * 32, 16) and record.parent_span_id == int("b" * 16, 16)
    assert record.sampled is True
    assert (record.request_id, record.model, record.external_id) == ("chatcmpl-9", "m", "q\\x1b[2J")


def test_what_ended_badly() -> None:
    engine = Engine(0)
    left, failed = engine.request(), engine.request()
    engine.compute(left)
    left.outcome, left.ended_ns = "left by the client", engine.now_ns
    failed.outcome, failed.ended_ns, failed.status = "complete", engine.now_ns, 503
    engine.rest()
    by_key = {record.finish_reason or record.error: record for record in engine.records}
    assert set(by_key) == {"abort", "503"}
    assert by_key["503"].first_sent_ns is None
    assert (engine.lives.totals.left, engine.lives.totals.failed) == (1, 1)
    assert engine.lives.at_rest


def test_an_unfinished_one_is_labelled_too() -> None:
    engine = Engine(0)
    readings = Readings()
    exchange = Exchange(1, "chat", 7, 8, engine.now_ns, {})
    engine.lives.hear(Heard(begun=[exchange]), (), readings)
    accountant = Accountant(0)
    accountant.add(readings)
    (account,) = accountant.open_accounts(engine.now_ns + 50 * MS)
    assert account.to_json()["inferred"] is True
    assert "measured" not in {part.how for part in account.parts}
