"""Puts real output into the README, each between its two markers: the last account of
`dsagent demo`, that of a request to an unmodified `vllm serve` that was already running, and what
`make demo-stack` tells of a violation.

`demo`, `stack` or `vllm` as an argument renews one of them. Nothing in those blocks is
written by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DSAGENT = str(ROOT / ".venv" / "bin" / "dsagent")
COLUMNS = "100"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
ENOUGH = 60  # completions, of 12 steps each
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"

sys.path.insert(0, str(ROOT / "tests" / "vllm"))


def printed(*command: str) -> str:
    ran = subprocess.run(
        [DSAGENT, *command],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1", "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ESCAPES.sub("", ran.stdout)


def explained(output: str) -> str:
    """The last account in the output, from its title on."""
    lines = [line.rstrip() for line in output.splitlines()]
    traces = [n for n, line in enumerate(lines) if re.match(r"trace +[0-9a-f]{32}$", line)]
    if not traces:
        raise SystemExit("readme_explain: the output explains no request")
    return "\n".join(lines[traces[-1] - 1 :]).strip()


def of_demo() -> str:
    return f"$ dsagent demo\n...\n{explained(printed('demo'))}"


@contextlib.contextmanager
def attached(pid: int) -> Iterator[str]:
    """The agent, its hooks put in; what it said of that, less what this machine has not."""
    agent = subprocess.Popen(
        [DSAGENT, "attach", str(pid), "--instrument", "inject", "--yes"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert agent.stderr is not None
    said = []
    for line in agent.stderr:
        said.append(line)
        if line.startswith("attached to"):
            break
    else:
        raise SystemExit(f"readme_explain: the agent did not attach: {''.join(said)}")
    drain = threading.Thread(target=agent.stderr.read)
    drain.start()
    try:
        yield "".join(line for line in said if not line.startswith("without ")).strip()
    finally:
        agent.send_signal(signal.SIGINT)
        agent.wait(60)
        drain.join()


def of_vllm() -> str:
    """Three clients at work, and a request in whose life somebody sends a long prompt."""
    from vllm_lab import SERVED_AS, VLLM, Server, one_server_at_a_time  # of the tests

    with tempfile.TemporaryDirectory() as folder, one_server_at_a_time():
        flags = ("--dtype", "float32", "--max-num-batched-tokens", "512")
        server = Server(VLLM, "smollm2", Path(folder), *flags)
        stop = threading.Event()

        done = threading.Semaphore(0)

        def complete(prompt: str, tokens: int) -> None:
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
            server.post("/v1/completions", body)
            done.release()

        def stream(prompt: str, tokens: int) -> None:
            body = {"model": SERVED_AS, "prompt": prompt, "max_tokens": tokens, "stream": True}
            headers = {"Content-Type": "application/json", "traceparent": TRACEPARENT}
            connection = server.connect()
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            connection.getresponse().read()
            connection.close()

        def client(topic: str) -> None:
            while not stop.is_set():
                complete(f"Once upon a time in {topic}", 12)

        try:
            server.wait_until_up()
            with attached(server.pid) as said:
                threads = [threading.Thread(target=client, args=(t,)) for t in ("Rome", "Oslo")]
                for thread in threads:
                    thread.start()
                for words in (40, 90, 150, 300):  # for the model to know prompts of each size
                    complete("river stone " * words, 2)
                for _ in range(ENOUGH):  # and enough steps of decodes
                    done.acquire()
                long = threading.Timer(0.5, complete, ("and then he said that " * 150, 2))
                long.start()
                stream("Tell me about the sea.", 24)
                stop.set()
                for thread in (*threads, long):
                    thread.join()
                account = explained(printed("explain", TRACE_ID))
            printed("detach", str(server.pid))
        finally:
            stop.set()
            server.stop()
    command = f"dsagent attach {server.pid} --instrument inject --yes"
    return f"$ {command}\n{said}\n\n$ dsagent explain {TRACE_ID}\n{account}"


def of_stack() -> str:
    """What the web hook was told, from the first violation on, and the table. The tickets are left
    out: they tell of the same by longer windows."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo_stack")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    story, _, summary = ran.stdout.partition("\n\n")
    entries = re.split(r"\n(?= *[0-9.]+ s  )", story)
    first = next(n for n, entry in enumerate(entries) if "(a)" in entry)
    told = [each for each in entries[first:] if "ticket firing DsagentSloBurn" not in each]
    return "\n".join(["$ make demo-stack", "...", *told, "", summary.strip()])


BLOCKS: dict[str, Callable[[], str]] = {"demo": of_demo, "stack": of_stack, "vllm": of_vllm}


def main() -> int:
    for name in sys.argv[1:] or BLOCKS:
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin not in README.read_text() or end not in README.read_text():
            raise SystemExit(f"readme_explain: README.md has no {begin} and {end}")
        block = BLOCKS[name]()
        before, _, rest = README.read_text().partition(begin)
        _, _, after = rest.partition(end)
        README.write_text(f"{before}{begin}\n```console\n{block}\n```\n{end}{after}")
        print(f"readme_explain: README.md shows what was printed just now ({name})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
