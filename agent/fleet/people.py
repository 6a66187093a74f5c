"""The load under which a pod is measured: `python -m dsagent.agent.fleet.people URL`.

The demo's people (six chat, one wants long texts summed up), but without trace context: so the
agent decides by itself what to keep, as it does by default. Prints {requests, failed, elapsed_s}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from urllib.parse import urlsplit

from dsagent.agent.load import CHATTERS, LONG_EVERY_S, Server, Tally, chat, long_text, send

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


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsagent.agent.fleet.people")
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    address = urlsplit(arguments.url)
    if address.hostname is None or address.port is None:
        parser.error("URL needs a host and a port")
    server = Server(address.hostname, address.port, arguments.model)
    tally = asyncio.run(_run(server, arguments.duration, arguments.seed))
    json.dump(asdict(tally), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
