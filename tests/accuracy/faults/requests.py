"""Requests harm requests: prefills, full queues, full memory, a cache that no longer helps."""

from __future__ import annotations

import random
import time

from bench import Bench, Injector
from load import Sent, send, text
from truth import Fault, Injection, Timeline, decoding, life, until_first_token


def long_prefills(bench: Bench, dice: random.Random) -> Injection:
    """From one prompt of middling length to four long ones, into whatever is decoding."""
    burst = bench.burst()
    start_ns = time.monotonic_ns()
    for _ in range(dice.randint(1, 4)):
        burst.send(bench.load, text(dice, dice.randint(120, 400)), 2, dice)
    return _by("long_prefill", start_ns, _first_ns(burst.wait()), burst.sent)


def short_behind_long(bench: Bench, dice: random.Random) -> Injection:
    """One prompt that takes the whole budget of several steps; short ones come meanwhile."""
    long, short = bench.burst(), bench.burst()
    start_ns = time.monotonic_ns()
    long.send(bench.load, text(dice, dice.randint(700, 1300)), 2, dice)
    time.sleep(dice.uniform(0.05, 0.3))
    for _ in range(3):
        short.send(bench.load, f"What is a {text(dice, 2)}?", dice.randint(4, 10), dice)
    victims = frozenset(sent.trace_id for sent in short.wait())
    end_ns = _first_ns(long.wait())
    return _by("short_behind_long", start_ns, end_ns, long.sent, victims)


def overload(bench: Bench, dice: random.Random) -> Injection:
    """More requests at once than have a place. Those that wait are the victims; all that came
    with them are to blame."""
    burst = bench.burst()
    start_ns = time.monotonic_ns()
    for _ in range(dice.randint(14, 32)):
        burst.send(bench.load, f"Say {text(dice, 3)}.", dice.randint(30, 60), dice)
    burst.wait()
    return _by("queue_overload", start_ns, time.monotonic_ns(), burst.sent)


def kv_exhaustion(bench: Bench, dice: random.Random) -> Injection:
    """Requests that fit as they come, and outgrow the cache together."""
    burst = bench.burst()
    start_ns = time.monotonic_ns()
    for _ in range(dice.randint(5, 6)):
        burst.send(bench.load, text(dice, dice.randint(50, 70)), dice.randint(250, 350), dice)
    burst.wait()
    return _by("kv_exhaustion", start_ns, time.monotonic_ns(), burst.sent)


def prefix_miss(bench: Bench, dice: random.Random) -> Injection:
    """The same long prefix three times: unknown, then cached, then with its first word changed.
    What the third took beyond the second until its first token is the deed."""
    rest = text(dice, dice.randint(100, 350))
    sent = []
    for first in ("Once", "Once", "Then"):
        question = f"{first} {rest} {text(dice, 4)}?"
        sent.append(send(bench.target, question, 4, dice, clients=bench.load.clients))
    _, cached, missed = sent
    start_ns, end_ns = missed.sent_ns, _first_ns([missed])
    extra_ns = max(0, end_ns - start_ns - (_first_ns([cached]) - cached.sent_ns))
    return Injection(
        "prefix_miss",
        start_ns,
        end_ns,
        Timeline([(start_ns, 0.0), (end_ns, float(extra_ns))]),
        senders=frozenset(one.trace_id for one in sent[:2]),
        victims=frozenset({missed.trace_id}),
    )


def _first_ns(sent: list[Sent]) -> int:
    """By when all had their first token; one whose first tokens have no text tells at its end."""
    return max(one.first_ns or one.end_ns or one.sent_ns for one in sent)


def _by(
    fault: str,
    start_ns: int,
    end_ns: int,
    sent: list[Sent],
    victims: frozenset[str] | None = None,
) -> Injection:
    doers = frozenset(one.trace_id for one in sent)
    return Injection(fault, start_ns, end_ns, None, doers, doers, victims)


LONG_PREFILL = Injector(
    Fault("long_prefill", frozenset({"batch.prefill_interference"}), "counterfactual", decoding),
    "smollm2",
    long_prefills,
)
SHORT_BEHIND_LONG = Injector(
    Fault(
        "short_behind_long",
        frozenset({"batch.not_scheduled", "queue.wait"}),
        "counterfactual",
        until_first_token,
    ),
    "smollm2",
    short_behind_long,
)
QUEUE_OVERLOAD = Injector(
    Fault("queue_overload", frozenset({"queue.wait"}), "counterfactual", until_first_token),
    "tiny-llama",
    overload,
)
KV_EXHAUSTION = Injector(
    Fault(
        "kv_exhaustion",
        frozenset({"queue.kv_blocks", "preempted"}),
        "counterfactual",
        life,
        least_gap=50.0,
    ),
    "tiny-llama",
    kv_exhaustion,
)
PREFIX_MISS = Injector(
    Fault("prefix_miss", frozenset({"prefill.compute"}), "counterfactual", until_first_token),
    "smollm2",
    prefix_miss,
)
