"""A small, realistic load on an OpenAI-compatible server: `python -m dsagent.agent.load URL`.

Six people chat in turns, sharing a system prompt and pausing between turns; one
pastes a long text every few seconds and wants a summary. All of it streams, all
of it is drawn from a seed. A process of its own, so that its CPU time is not
taken for the agent's. Prints one JSON object: {requests, failed, elapsed_s}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

CHATTERS = 6
LONG_EVERY_S = 4.0
PATIENCE_S = 60.0  # for one reply

_SYSTEM = (
    "You are the assistant of a small public library. Be friendly and brief, answer in one or "
    "two sentences, never invent opening hours, and when a question is not about books, say so "
    "and suggest whom to ask instead. The library has three floors: children's books and "
    "comics on the ground floor, novels and poetry on the first, science, history and maps on "
    "the second. Lending is free, for four weeks, and can be prolonged twice."
)
_QUESTIONS = (
    "Where do I find a novel about the sea?",
    "How long may I keep a book?",
    "My daughter likes dinosaurs. Where should we look?",
    "Which floor has maps of the Alps?",
    "Can I prolong a loan a third time?",
    "What is the capital of France?",
    "Recommend a short poem for a rainy day.",
    "Who wrote Pride and Prejudice?",
    "Do you have comics in French?",
    "I lost a book. What now?",
)
_SENTENCES = (
    "The river rose in the night and took the lower bridge with it.",
    "Nobody in the village could remember a spring as wet as this one.",
    "By morning the mill stood in a lake, its wheel turning slowly the wrong way.",
    "The teacher rowed to the school and found the globe floating in the hall.",
    "They carried the archive up the tower stairs, box after box, until noon.",
    "A letter from the ministry arrived by boat and asked for three copies of the damage.",
    "In the evening the baker gave away what was left, and somebody played the accordion.",
    "When the water fell, the fields were grey and full of fish.",
)


@dataclass(slots=True)
class Tally:
    requests: int = 0
    failed: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Server:
    host: str
    port: int
    model: str


def chat(rng: random.Random) -> dict[str, Any]:
    """A turn of a chat: the system prompt that all share, a question of its own."""
    return {
        "messages": [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": rng.choice(_QUESTIONS)},
        ],
        "max_tokens": rng.randint(6, 12),
        "temperature": 0.7,
        "seed": rng.randrange(1 << 30),
    }


def long_text(rng: random.Random, sentences: int = 24) -> dict[str, Any]:
    """A text to be summed up, of about 17 tokens a sentence; no two alike, so no cache helps."""
    text = " ".join(rng.choice(_SENTENCES) for _ in range(sentences))
    return {
        "messages": [{"role": "user", "content": f"Sum up in one sentence: {text}"}],
        "max_tokens": rng.randint(6, 10),
        "temperature": 0,
    }


async def send(server: Server, body: dict[str, Any], traceparent: str, tally: Tally) -> None:
    """One streamed request; counts it, done or failed."""
    payload = json.dumps({"model": server.model, "stream": True, **body}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.host}:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        f"traceparent: {traceparent}\r\nConnection: close\r\n\r\n"
    ).encode()
    done = False
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            try:
                writer.write(head + payload)
                await writer.drain()
                async for line in reader:
                    done = done or line.startswith(b"data: [DONE]")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ValueError):
        done = False
    if done:
        tally.requests += 1
    else:
        tally.failed += 1


def traceparent(rng: random.Random) -> str:
    """A sampled W3C trace context."""
    return f"00-{rng.getrandbits(128) | 1:032x}-{rng.getrandbits(64) | 1:016x}-01"


async def chatter(server: Server, rng: random.Random, until_s: float, tally: Tally) -> None:
    await asyncio.sleep(rng.uniform(0, 0.5))
    while time.monotonic() < until_s:
        await send(server, chat(rng), traceparent(rng), tally)
        await asyncio.sleep(rng.uniform(0.05, 0.4))


async def summariser(server: Server, rng: random.Random, until_s: float, tally: Tally) -> None:
    await asyncio.sleep(1.0)
    while time.monotonic() < until_s:
        begun_s = time.monotonic()
        await send(server, long_text(rng), traceparent(rng), tally)
        await asyncio.sleep(max(0.0, begun_s + LONG_EVERY_S - time.monotonic()))


async def run(server: Server, duration_s: float, seed: int) -> Tally:
    """Sends for `duration_s`, then waits for the replies that are still coming."""
    tally = Tally()
    begun_s = time.monotonic()
    until_s = begun_s + duration_s
    people = [chatter(server, random.Random(seed + i), until_s, tally) for i in range(CHATTERS)]
    people.append(summariser(server, random.Random(seed + CHATTERS), until_s, tally))
    await asyncio.gather(*people)
    tally.elapsed_s = time.monotonic() - begun_s
    return tally


Load = Callable[[Server, float, int], Coroutine[Any, Any, Tally]]  # server, duration_s, seed


def main(argv: Sequence[str], module: str, load: Load, duration_s: float) -> int:
    """`python -m module`: sends that load, and prints its tally."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--duration", type=float, default=duration_s)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    address = urlsplit(arguments.url)
    if address.hostname is None or address.port is None:
        parser.error("URL needs a host and a port")
    server = Server(address.hostname, address.port, arguments.model)
    tally = asyncio.run(load(server, arguments.duration, arguments.seed))
    json.dump(asdict(tally), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "dsagent.agent.load", run, 20.0))
