"""The kernel tags what it counts by the step that the engine says is running."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from kernel_lab import Child, Watch, measured, require_kernel_source

from dsagent.agent.facts import Kind
from dsagent.instrumentation.ring import find_rings, step_word_address

pytestmark = pytest.mark.ebpf

STEPS, NAPS = 101, 3
ENGINE = f"""
from dsagent.instrumentation.ring import RingWriter, Role
writer = RingWriter(role=Role.SCHEDULER, engine_id=7)
say(ready=True); hear()
for step in range(1, {STEPS} + 1):
    writer.step_started(step, now())
    for _ in range({NAPS}):
        nap(500)
writer.idle(now())
nap(500)
say(end=now()); hear()
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def _step_words(pid: int) -> dict[int, int]:
    words = {}
    for candidate in find_rings(pid):
        address = step_word_address(pid, candidate.inode)
        assert address is not None
        words[pid] = address
    assert words
    return words


@pytest.mark.parametrize("exact_ns", [1, 1 << 60], ids=["sent alone", "summed"])
def test_each_step_has_its_own_naps(exact_ns: int) -> None:
    watch, told = measured(ENGINE, installed=True, step_words=_step_words, exact_ns=exact_ns)
    naps: Counter[int] = Counter()
    for step_id, count in watch.of(Kind.OFF_OTHER, tid=told["pid"])[["step_id", "count"]].tolist():
        naps[step_id] += count
    assert {step: naps[step] for step in range(1, STEPS + 1)} == dict.fromkeys(
        range(1, STEPS + 1), NAPS
    )
    assert naps[0] >= 1  # the nap after the last step, while idle
    assert set(naps) == set(range(STEPS + 1))
    ran = watch.of(Kind.ONCPU, tid=told["pid"])
    assert set(ran["step_id"].tolist()) >= set(range(1, STEPS + 1))


def test_a_ring_made_later_is_tagged_from_then_on() -> None:
    def ring_comes(child: Child, watch: Watch) -> dict[str, Any]:
        child.hear()
        for pid, address in _step_words(child.pid).items():
            watch.source.set_step_word(pid, address)
        child.say()
        return {}

    body = "say(early=True); hear()\n" + ENGINE
    watch, told = measured(body, installed=True, during=ring_comes)
    tagged = watch.of(Kind.OFF_OTHER, tid=told["pid"])
    assert set(tagged["step_id"].tolist()) == set(range(STEPS + 1))


def test_an_address_that_is_not_mapped_tags_nothing_and_harms_nobody() -> None:
    with Child(ENGINE, installed=True) as child:
        child.hear()
        with Watch(child.pid, {child.pid: 0xDEAD0000}) as watch:
            child.say()
            watch.until(child.hear()["end"])
            assert watch.source.status().state == "ok"
    assert not watch.facts["step_id"].any()


def test_exec_forgets_the_address() -> None:
    """The new image may have anything there; the step that was running is over."""
    body = ENGINE.replace(
        "writer.idle(now())",
        """say(last=now())
os.execv(sys.executable, [sys.executable, '-S', '-c',
    'import time; time.sleep(0.02); print(time.monotonic_ns(), flush=True); input()'])""",
    )
    with Child(body, installed=True) as child:
        child.hear()
        with Watch(child.pid, _step_words(child.pid)) as watch:
            child.say()
            last = child.hear()["last"]
            assert child.process.stdout is not None
            watch.until(int(child.process.stdout.readline()))
    naps = watch.of(Kind.OFF_OTHER, tid=child.pid, least_ns=10_000_000)
    assert naps[naps["start_ns"] > last]["step_id"].tolist() == [0]
    assert watch.facts[watch.facts["start_ns"] < last]["step_id"].any()
