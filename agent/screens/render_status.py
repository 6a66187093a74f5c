"""The document of `status` as a screen for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dsagent.agent.host.procfs import escape
from dsagent.agent.screens.render import sinks, sources
from dsagent.agent.screens.wording import counted, percent

Document = Mapping[str, Any]

_WAYS = {"rings": "through its step rings", "outside": "seen from outside"}
_STYLE = {"watching": "bold green", "attaching": "yellow", "ending": "yellow", "failed": "bold red"}


def status(document: Document) -> RenderableType:
    """The agent first, then each engine, then what is in the way."""
    pieces: list[RenderableType] = [_headline(document)]
    if document["mode"] == "sidecar":
        pieces.append(_own(document))
    for engine in document["engines"]:
        pieces += [Text(), *_engine(engine)]
    if not document["engines"]:
        pieces += [Text(), Text("No engine is watched.", style="yellow")]
    if document.get("waiting"):
        pieces += [Text(), _waiting(document["waiting"])]
    other = [each for each in document.get("reasons", ()) if not _is_of_waiting(each, document)]
    if other:
        pieces += [Text(), *(Text(f"! {escape(each, 1000)}", style="yellow") for each in other)]
    return Group(*pieces)


def _is_of_waiting(reason: str, document: Document) -> bool:
    return any(reason == each["reason"] for each in document["waiting"])


def _headline(document: Document) -> Text:
    text = Text()
    text.append(f"dsagent {document['mode']}", style="bold")
    text.append(f" (pid {document['pid']})", style="dim")
    since_s = max(0.0, (document["now_unix_ns"] - document["since_unix_ns"]) / 1e9)
    cpu = document["cpu_ns"] / 1e9 / max(1.0, since_s)
    text.append(f"  up {span(since_s)}, {percent(cpu)} of one core, {mb(document['rss_bytes'])}")
    if "ready" in document:
        text.append("  ")
        is_ready = document["ready"]
        text.append("ready" if is_ready else "not ready", "green" if is_ready else "yellow")
    return text


def _own(document: Document) -> Table:
    table = _plain_table()
    table.add_row("listens", _listens(document["listener"]))
    if document["receiver"]["state"] != "off":
        table.add_row("receives", _receives(document["receiver"]))
    table.add_row("settings", _settings(document["settings"]))
    memory = document["memory"]
    if memory["limit_bytes"] is not None:
        text = f"{mb(memory['used_bytes'])} of {mb(memory['limit_bytes'])} ({memory['limit_from']})"
        relief = f": {memory['relief']}" if memory["level"] else ""
        table.add_row("memory", text + relief)
    recent = document["recent"]
    table.add_row(
        "recent",
        f"{recent['accounts']} requests in {mb(recent['bytes'])} of {mb(recent['max_bytes'])}",
    )
    scan = document["scan"]
    barred = scan["not_permitted"]
    more = f", {barred} of them may not be looked into" if barred else ""
    table.add_row("processes", f"{scan['processes']} seen{more}")
    return table


def _listens(listener: Document) -> Text:
    if listener["state"] == "off":
        return Text("nowhere")
    text = Text(f"{listener['address']}, {listener['answered']} answered")
    if listener["refused"]:
        text.append(f", {listener['refused']} refused")
    if listener["reason"]:
        text.append(f"\n{escape(listener['reason'], 1000)}", style="yellow")
    return text


def _receives(receiver: Document) -> Text:
    places = (("", receiver["http"]), (" (gRPC)", receiver["grpc"]))
    text = Text(", ".join(f"{place}{how}" for how, place in places if place))
    spans = receiver["spans"]
    text.append(f": {counted(spans.get('request', 0), 'span')} of requests")
    if unmatched := receiver["outcomes"].get("unmatched"):
        text.append(f", {unmatched} of them of none that is known")
    if sent := receiver["passed_on"]:
        text.append(f"; {sent['acknowledged']} of {sum(spans.values())} passed on")
        if sent["reason"]:
            text.append(f"\n{escape(sent['reason'], 1000)}", style="yellow")
    if receiver["reason"]:
        text.append(f"\n{escape(receiver['reason'], 1000)}", style="yellow")
    return text


def _settings(settings: Document) -> Text:
    text = Text(escape(settings["file"] or "flags and variables only", 1000))
    if settings["reloads"]:
        text.append(f", read again {settings['reloads']} times")
    if settings["refused"]:
        text.append(f", refused {settings['refused']} times")
    if settings["reason"]:
        text.append(f"\n{escape(settings['reason'], 1000)}", style="yellow")
    if settings["needs_restart"]:
        text.append(f"\nneeds a restart: {', '.join(settings['needs_restart'])}", style="yellow")
    return text


def _engine(engine: Document) -> list[RenderableType]:
    head = Text("● ", style=_STYLE.get(engine["state"], ""))
    name = f"engine {engine['engine']}  " if "engine" in engine else ""
    head.append(f"{name}{escape(engine['command'])}", style="bold default")
    head.append(f" (pid {engine['pid']})  ", style="dim default")
    head.append(engine["state"])
    about = [f"{engine['kind']}, {_WAYS.get(engine['way_in'], engine['way_in'])}"]
    if engine.get("model"):
        about.append(f"model {escape(engine['model'])}")
    if engine.get("restarts"):
        about.append(f"restarted {engine['restarts']} times")
    below: list[RenderableType] = [Text(", ".join(about))]
    if engine["reason"]:
        below.append(Text(escape(engine["reason"], 1000), style="yellow"))
    if engine.get("sources"):
        below += [_figures(engine), sources(engine)]
        if engine["sinks"]:
            below.append(sinks(engine["sinks"]))
    return [head, Padding(Group(*below), (0, 0, 0, 2))]


def _figures(engine: Document) -> Text:
    figures = [counted(engine["requests"], "request"), counted(engine["steps"], "step")]
    if engine["overhead_ratio"] is not None:
        figures.append(f"cost to it {percent(engine['overhead_ratio'])}")
    losses, failures = engine["uncounted_losses"], engine["accounting_failures"]
    text = Text(", ".join(figures))
    if losses:
        text.append(f", {losses} records lost and not counted", style="bold red")
    if failures:
        text.append(f", accounting failed {failures} times", style="bold red")
    return text


def _waiting(waiting: Sequence[Document]) -> Table:
    table = _plain_table()
    for each in waiting:
        again = f"again in {each['again_in_ns'] / 1e9:.0f} s"
        text = Text(escape(each["reason"], 1000))
        text.append(f" ({again}, tried {each['failures']} times)", style="dim")
        table.add_row(f"pid {each['pid']}", text)
    return table


def _plain_table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def mb(size_bytes: int | None) -> str:
    return "?" if size_bytes is None else f"{size_bytes / 1e6:.0f} MB"


def span(seconds: float) -> str:
    """Its two largest units: 3 d 4 h, 5 m 6 s."""
    left = int(seconds)
    found: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        many, left = divmod(left, length)
        if many or (unit == "s" and not found):
            found.append(f"{many} {unit}")
    return " ".join(found[:2])
