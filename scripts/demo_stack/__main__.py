"""`make demo-stack`: the bundled engine under load, the agent with an SLO, and Debian's Prometheus
and Alertmanager with the rules that follow from that SLO. Four things happen to them, and a web
hook prints and checks what it is told of each.

Exit code 0 only if all four were told as they must be. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from alert_hook import Notice, NotToldError, WebHook
from alert_servers import Service, ServiceError, alert_servers, free_port, require_servers
from crowd import LoadError
from story import Act, Story, measure, slo_file

from dsagent.agent.host.procfs import escape
from dsagent.agent.load import Server

DSAGENT = str(Path(sys.executable).with_name("dsagent"))
WIDTH, INDENT = 100, 12
SIMULATED = """\
Real: the engine, the agent, Prometheus, Alertmanager, every request.
Simulated: who sends the requests; the windows, a sixtieth of a service's (an hour is a minute); the
objective, which is set between what this machine does alone and beside long prompts."""
TITLES = ("act", "seconds", "held", "what the web hook was told")


class Told:
    """Says what happens, with the time since the beginning."""

    def __init__(self, *, quiet: bool) -> None:
        self._begun_s = time.monotonic()
        self._quiet = quiet
        self._lock = threading.Lock()
        self._last: dict[object, object] = {}  # by alert, what was told of it

    def say(self, text: str) -> None:
        self._put(time.monotonic(), text)

    def alert(self, notice: Notice) -> None:
        """As it comes in at the web hook, one at a time."""
        news = (notice.status, notice.causes, notice.annotations.get("state"))
        if self._last.get(notice.identity) == news:
            return  # Alertmanager repeats itself
        self._last[notice.identity] = news
        labels = notice.labels
        what = " ".join(filter(None, (labels.get("severity"), notice.status, notice.name)))
        window = f" ({labels['window']})" if "window" in labels else ""
        said = f"► {notice.route}: {what}{window}"
        if notice.status == "firing":
            said += f": {escape(notice.annotations.get('summary', ''), limit=400)}"
        self._put(notice.at_s, textwrap.fill(said, WIDTH - INDENT, subsequent_indent="  "))

    def _put(self, at_s: float, text: str) -> None:
        with self._lock:
            stream = sys.stderr if self._quiet else sys.stdout
            lines = text.replace("\n", "\n" + " " * (INDENT - 2))
            print(f"{at_s - self._begun_s:6.1f} s  {lines}", file=stream, flush=True)


def play(model: str, told: Told, folder: Path) -> tuple[list[Act], dict[str, Any]]:
    require_servers()
    with contextlib.ExitStack() as stack:
        hook = stack.enter_context(WebHook(told.alert))
        told.say(SIMULATED)
        told.say(f"starting the bundled engine with {model}")
        engine = Service(
            "engine",
            [DSAGENT, "serve", "--model", model, "--host", "127.0.0.1", "--port", "0"],
            folder,
        )
        stack.callback(engine.stop)
        address = urlsplit(engine.wait_for(r"listening on (http://\S+)", 120.0).group(1))
        server = Server(address.hostname or "", address.port or 0, model)
        told.say("how quick it is here: chats alone, then beside long prompts")
        found = measure(server)
        told.say(
            f"{found.usual_ms:.1f} ms a token alone, {found.beside_ms:.1f} ms beside them: "
            f"the objective is {found.limit_ms:.1f} ms for 99 % of the chats"
        )
        path = slo_file(found.limit_ms, hook, folder)
        generate = [DSAGENT, "slo", "generate", str(path), "--out", str(folder)]
        subprocess.run(generate, check=True, stdout=subprocess.DEVNULL)
        told.say("attaching the agent, starting Prometheus and Alertmanager (windows: 1/60)")
        scraped = f"127.0.0.1:{free_port()}"
        flags = ["--slo", str(path), "--prometheus", scraped, "--max-overhead", "5%"]
        agent = Service("agent", [DSAGENT, "attach", str(engine.pid), *flags], folder)
        stack.callback(agent.stop)
        agent.wait_for("attached to")
        servers = stack.enter_context(
            alert_servers(
                folder,
                rules=folder / "rules" / "dsagent-slo.yaml",
                scraped=scraped,
                hook_url=hook.url("alertmanager"),
            )
        )
        story = Story(server, found.culprits, hook, servers, agent, told.say)
        acts = []
        for act in story.run():
            told.say(f"{'HELD  ' if act.held else 'FAILED'} {act.name}: {act.seen}")
            acts.append(act)
        figures = {
            "limit_ms": round(found.limit_ms, 1),
            "usual_ms": round(found.usual_ms, 1),
            "beside_ms": round(found.beside_ms, 1),
            "alert_after_s": {route: round(s, 1) for route, s in story.alert_s.items()},
            "calm_chats": story.judged,
            "calm_pages": story.false_pages,
        }
        return acts, figures


def table(acts: Sequence[Act]) -> str:
    rows = [TITLES]
    rows += [(a.name, f"{a.seconds:.0f}", "yes" if a.held else "NO", a.seen) for a in acts]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}"
        for row in rows
    )


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: what was started is stopped."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="demo_stack", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2", help="the model to serve (smollm2)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args(argv)
    told = Told(quiet=arguments.json)
    try:
        with ending_in_order(), tempfile.TemporaryDirectory(prefix="dsagent-demo-") as folder:
            acts, figures = play(arguments.model, told, Path(folder))
    except (ServiceError, LoadError, NotToldError) as error:
        print(f"demo_stack: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    held = len(acts) == 4 and all(act.held for act in acts)
    if arguments.json:
        print(json.dumps({"held": held, "acts": [act.to_json() for act in acts], **figures}))
    else:
        print(f"\n{table(acts)}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
