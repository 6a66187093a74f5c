"""The load under which a pod is measured: `python -m dsagent.agent.fleet.people URL`.

The demo's people (six chat, one wants long texts summed up), but without trace context: so the
agent decides by itself what to keep, as it does by default. Prints {requests, failed, elapsed_s}.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

from dsagent.agent.load import CHATTERS, LONG_EVERY_S, Server, Tally, chat, long_text, main, send

NO_CONTEXT = ""  # an empty header is none


async def _chatter(server: Server, rng: random.Random, until_s: float, tally: Tally) -> None:
    await asyncio.sleep(rng.uniform(0, 0.5))
    while time.monotonic() < until_s:
        await send(server, chat(rng), NO_CONTEXT, tally)
        await asyncio.sleep(rng.uniform(0.05, 0.4))


async def _summariser(server: Server, rng: random.Random, until_s: float, tally: Tally) -> None:
    while time.monotonic() < until_s:
        begun_s = time.monotonic()
        await send(server, long_text(rng), NO_CONTEXT, tally)
        await asyncio.sleep(max(0.0, begun_s + LONG_EVERY_S - time.monotonic()))


async def _run(server: Server, duration_s: float, seed: int) -> Tally:
    tally = Tally()
    begun_s = time.monotonic()
    until_s = begun_s + duration_s
    people = [_chatter(server, random.Random(seed + i), until_s, tally) for i in range(CHATTERS)]
    people.append(_summariser(server, random.Random(seed + CHATTERS), until_s, tally))
    await asyncio.gather(*people)
    tally.elapsed_s = time.monotonic() - begun_s
    return tally


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "dsagent.agent.fleet.people", _run, 60.0))
