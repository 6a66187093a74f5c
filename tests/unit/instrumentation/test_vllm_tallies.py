"""Experts and drafts, counted in the engine and shown by the agent: real tensors, real rings.

tests/vllm does the same with a real DeepSeek-V2.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dsagent.agent.facts import Sample
from dsagent.agent.sources.tallies import WINDOW_NS, TallySource
from dsagent.instrumentation import vllm_drafts, vllm_experts
from dsagent.instrumentation.layout import Role
from dsagent.instrumentation.ring import RingReader, find_rings
from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.ring_writer import FAILURES_IN_A_ROW, RingWriter
from dsagent.instrumentation.tally import MAX_COUNTS, Tally, What
from dsagent.instrumentation.vllm_drafts import DraftWatch
from dsagent.instrumentation.vllm_experts import EVERY_STEPS, ExpertWatch
from dsagent.instrumentation.wire import Malformed, Origin, decode, encode

torch = pytest.importorskip("torch")

ENGINE_ID, RANK = 77, 1
EXPERTS = 8
Read = Callable[[], list[Tally]]


@pytest.fixture
def ring() -> Iterator[tuple[LazyRing, Read]]:
    """A ring in this process, and what has been written into it."""
    before = {ring.inode for ring in find_rings(os.getpid())}
    lazy = LazyRing(lambda: RingWriter(role=Role.RANK, engine_id=ENGINE_ID, vllm=True))
    assert lazy.get() is not None
    found = next(ring for ring in find_rings(os.getpid()) if ring.inode not in before)
    reader = RingReader.open(found)

    def read() -> list[Tally]:
        return [record for record in reader.read(1000) if isinstance(record, Tally)]

    yield lazy, read
    reader.close()
    lazy.close()


class Router:
    """As vLLM's: the ids of the experts chosen for each token."""

    global_num_experts = EXPERTS

    def __init__(self) -> None:
        self.ids: Any = None

    def select_experts(self, hidden: Any, logits: Any) -> tuple[Any, Any]:
        return logits, self.ids


class Runner:
    """A layer, which calls its router."""

    def __init__(self, number: int) -> None:
        self.layer_name = f"model.layers.{number}.mlp.experts"
        self.router = Router()

    def forward(self, ids: Any) -> tuple[Any, Any]:
        self.router.ids = ids
        return self.router.select_experts(None, "logits")


class Model:
    """Three layers whose routers are watched. `executes` is what the worker says of itself."""

    def __init__(self, ring: LazyRing, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executes = True
        self.watch = ExpertWatch(ring, lambda: (ENGINE_ID, RANK) if self.executes else (0, 0))
        stand_in = self.watch.wrap_select(Router.__dict__["select_experts"])
        monkeypatch.setattr(Router, "select_experts", stand_in)
        self.layers = [Runner(number) for number in (1, 2, 3)]

    def step(self, *ids: Any) -> None:
        for layer, chosen in zip(self.layers, ids, strict=True):
            assert layer.forward(chosen)[1] is chosen

    def written(self, monkeypatch: pytest.MonkeyPatch, *ids: Any) -> None:
        """Steps until each layer's turn has come, which it begins with writing what it has."""
        monkeypatch.setattr(vllm_experts, "WRITE_NS", 0)
        for _ in range(EVERY_STEPS):
            self.step(*ids)


def test_the_choices_of_some_steps_are_counted_layer_by_layer(
    ring: tuple[LazyRing, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy, read = ring
    model = Model(lazy, monkeypatch)
    generator = torch.Generator().manual_seed(23)
    counted = [torch.zeros(EXPERTS, dtype=torch.int64) for _ in model.layers]
    for step in range(2 * EVERY_STEPS):
        chosen = [
            torch.randint(0, EXPERTS, (5, 2), generator=generator, dtype=torch.int32)
            for _ in model.layers
        ]
        if (place := step % EVERY_STEPS) < len(counted):  # one layer after the other
            for expert in chosen[place].flatten().tolist():
                counted[place][expert] += 1
        model.step(*chosen)
    assert read() == []  # not yet time
    model.written(monkeypatch, *chosen)
    tallies = read()
    assert [tally.counts for tally in tallies] == [tuple(each.tolist()) for each in counted]
    assert sum(tallies[0].counts) == 2 * 5 * 2
    assert [(tally.index, tally.label) for tally in tallies] == [
        (0, "model.layers.1.mlp.experts"),
        (1, "model.layers.2.mlp.experts"),
        (2, "model.layers.3.mlp.experts"),
    ]
    assert {(tally.engine_id, tally.rank, tally.what) for tally in tallies} == {
        (ENGINE_ID, RANK, What.EXPERT_TOKENS)
    }
    assert lazy.failures == 0


def test_padding_is_no_expert_and_what_no_step_asked_for_is_not_counted(
    ring: tuple[LazyRing, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy, read = ring
    model = Model(lazy, monkeypatch)
    ids = torch.tensor([[0, 1], [-1, -1], [EXPERTS, 1]], dtype=torch.int64)
    model.executes = False  # finding out how much memory there is
    model.step(ids, ids, ids)
    model.executes = True
    for _ in range(EVERY_STEPS):
        model.step(ids, ids, ids)
    model.written(monkeypatch, ids, ids, ids)
    assert [tally.counts for tally in read()] == [(1, 2, 0, 0, 0, 0, 0, 0)] * 3


def test_a_long_prompts_choices_are_not_kept(
    ring: tuple[LazyRing, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy, read = ring
    model = Model(lazy, monkeypatch)
    ids = torch.zeros((40_000, 2), dtype=torch.int32)
    for _ in range(2 * EVERY_STEPS):
        model.step(ids, ids, ids)
        kept = [each.numel() for layer in model.watch._layers.values() for each in layer.kept]
        assert kept == []
    model.written(monkeypatch, ids, ids, ids)
    assert [tally.counts[0] for tally in read()] == [2 * 80_000] * 3


def test_what_fails_in_the_watch_never_reaches_the_engine(
    ring: tuple[LazyRing, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy, read = ring
    model = Model(lazy, monkeypatch)
    for _ in range(50):
        model.step("no tensor", None, 7)
    assert 0 < lazy.failures < FAILURES_IN_A_ROW  # it gave up, and its ring goes on
    model.written(monkeypatch, "no", "tensor", "at all")
    assert read() == []

    def refuses(router: Any, *args: Any) -> Any:
        raise KeyError("vLLM's own")

    with pytest.raises(KeyError, match="own"):
        model.watch.wrap_select(refuses)(model.layers[0].router)


def test_a_router_that_cannot_be_known_is_not_tried_for_ever(
    ring: tuple[LazyRing, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy, _ = ring
    model = Model(lazy, monkeypatch)
    asked = []

    class Unknown(Router):
        @property
        def global_num_experts(self) -> None:  # type: ignore[override]
            asked.append(self)

    monkeypatch.setattr(model.layers[0], "router", Unknown.__new__(Unknown))
    ids = torch.zeros((4, 2), dtype=torch.int32)
    for _ in range(100):
        assert model.layers[0].forward(ids)[1] is ids
    assert len(asked) == lazy.failures < FAILURES_IN_A_ROW


def test_nothing_of_it_is_in_what_is_compiled(
    ring: tuple[LazyRing, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy, _ = ring
    model = Model(lazy, monkeypatch)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    stand_in = ExpertWatch(lazy, lambda: (ENGINE_ID, RANK)).wrap_select(
        lambda router: ("logits", "ids")
    )
    assert stand_in(model.layers[0].router) == ("logits", "ids")
    assert lazy.failures == 0


class Scheduler:
    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Any = None,
        request_id: str = "",
    ) -> Any:
        return SimpleNamespace(drafted=num_draft_tokens)


def test_drafts_are_counted_by_position(
    ring: tuple[LazyRing, Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy, read = ring
    watch = DraftWatch(lazy, lambda: ENGINE_ID)
    stand_in = watch.wrap_stats(Scheduler.make_spec_decoding_stats)
    scheduler = Scheduler()
    for accepted in (3, 1, 0, 2):
        made = stand_in(
            scheduler, None, num_draft_tokens=3, num_accepted_tokens=accepted, request_id="r"
        )
        assert made.drafted == 3
    stand_in(scheduler, None, 0, 0)  # no drafts: nothing to count
    stand_in(scheduler, None, 2, 0, {"r": 2}, "r")  # none that the grammar allowed
    assert stand_in(scheduler, None, num_draft_tokens="?", num_accepted_tokens=0).drafted == "?"
    assert lazy.failures == 1
    monkeypatch.setattr(vllm_drafts, "WRITE_NS", 0)
    stand_in(scheduler, None, 3, 3)
    [tally] = read()
    assert tally.what is What.DRAFTS_ACCEPTED
    assert tally.counts == (5, 4, 3, 2)


def tally(what: What, *counts: int, end_ns: int, index: int = 0, label: str = "") -> Tally:
    return Tally(ENGINE_ID, 1, what, index, 0, end_ns - 1000, end_ns, label, counts)


def test_a_tally_comes_back_as_it_was_and_bad_ones_are_refused() -> None:
    origin = Origin(ENGINE_ID, 1, 1, False)
    whole = tally(What.EXPERT_TOKENS, *range(MAX_COUNTS), end_ns=5000, index=3, label="läyer")
    kind, payload = encode(whole)
    assert decode(kind, payload, origin) == whole
    longest = tally(What.EXPERT_TOKENS, 1, end_ns=5000, label="ä" * 100)
    back = decode(*encode(longest), origin)
    assert isinstance(back, Tally)
    assert back.label == "ä" * 64
    for bad in (payload[:-1], payload + b"x", b"", b"\x09" + payload[1:], payload[:-1] + b"\xff"):
        with pytest.raises(Malformed):
            decode(kind, bad, origin)
    with pytest.raises(ValueError, match="counts"):
        encode(tally(What.EXPERT_TOKENS, *range(MAX_COUNTS + 1), end_ns=5000))


def shown(samples: list[Sample]) -> dict[tuple[str, ...], float]:
    return {(s.name.removeprefix("dsagent."), *s.attributes.values()): s.value for s in samples}


def test_the_agent_names_the_worst_layer_and_the_dead() -> None:
    now_ns = time.monotonic_ns()
    coming = [
        tally(What.EXPERT_TOKENS, 100, 100, 100, 100, end_ns=now_ns, label="even"),
        tally(What.EXPERT_TOKENS, 100, 0, 60, 0, end_ns=now_ns, index=1, label="odd"),
        tally(What.EXPERT_TOKENS, 100, 0, 140, 0, end_ns=now_ns, index=1, label="odd"),
        tally(What.EXPERT_TOKENS, 3, 0, 0, 0, end_ns=now_ns, index=2, label="few"),
        tally(What.EXPERT_TOKENS, 0, 0, 0, 0, end_ns=now_ns, index=3, label="none"),
    ]
    source = TallySource(lambda: [coming.pop(0) for _ in range(len(coming))])
    assert source.status().state == "unavailable"
    found = shown(source.poll(now_ns).samples)
    assert found == {
        ("moe.expert_load.max_ratio", "even"): 1.0,
        ("moe.experts.dead", "even"): 0,
        ("moe.expert_load.max_ratio", "odd"): 2.0,
        ("moe.experts.dead", "odd"): 2,
        # Three tokens say nothing of who is dead, and none say nothing at all.
        ("moe.expert_load.max_ratio", "few"): 4.0,
        ("moe.expert_load.worst_ratio",): 4.0,
    }
    assert source.status().state == "ok"
    assert "few: 4.00 × the mean" in source.status().reason
    assert shown(source.poll(now_ns + WINDOW_NS + 1).samples) == {}  # absent, not 0


def test_the_agent_shows_acceptance_by_position() -> None:
    now_ns = time.monotonic_ns()
    coming = [
        tally(What.DRAFTS_ACCEPTED, 10, 8, 4, end_ns=now_ns),
        tally(What.DRAFTS_ACCEPTED, 10, 6, 2, 1, end_ns=now_ns),
    ]
    source = TallySource(lambda: [coming.pop(0) for _ in range(len(coming))])
    assert shown(source.poll(now_ns).samples) == pytest.approx(
        {
            ("spec_decode.acceptance_length",): 1 + 21 / 20,
            ("spec_decode.acceptance_ratio", "0"): 0.7,
            ("spec_decode.acceptance_ratio", "1"): 0.3,
            ("spec_decode.acceptance_ratio", "2"): 0.05,
        }
    )
    assert source.status().state == "ok"
