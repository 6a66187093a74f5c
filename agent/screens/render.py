"""Documents as text for people: 80 columns or more, colour only on a terminal.

Everything shown that came from a request or another process is escaped first.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dsagent.agent.host.procfs import escape
from dsagent.agent.screens.wording import (
    CAUSE_TEXT,
    because,
    blame,
    counted,
    how_text,
    ms,
    percent,
    remedy,
    remedy_of_all,
    short,
    who,
)

Document = Mapping[str, Any]

MIN_COLUMNS = 20
MAX_COLUMNS = 1000
_UNUSED_HEIGHT = 24  # given, so that rich does not look for one: it trips over some LINES

_BAR = 14
_BLOCKS = " ▏▎▍▌▋▊▉█"
STATE_STYLE = {"ok": "green", "unavailable": "yellow", "lagging": "yellow", "failed": "bold red"}
_SMALL_RATIO = 0.005  # parts below half a percent share one line


def page_of(text: RenderableType) -> str:
    """As it is to be printed on stdout: as wide as the terminal, where there is none as COLUMNS
    says, else 80 columns; with colours where there is a terminal."""
    page = io.StringIO()
    console = Console(
        file=page,
        width=_columns(),
        height=_UNUSED_HEIGHT,
        force_terminal=sys.stdout.isatty(),
        highlight=False,
        emoji=False,
        markup=False,
    )
    console.print(text)
    return page.getvalue()


def _columns() -> int:
    """A width that is no width (0 of a pseudo-terminal nobody has sized) is none at all."""
    columns = os.environ.get("COLUMNS", "")
    wide = int(columns) if re.fullmatch("[0-9]{1,9}", columns) else 0
    if sys.stdout.isatty():
        wide = os.get_terminal_size(sys.stdout.fileno()).columns
    return min(wide, MAX_COLUMNS) if wide >= MIN_COLUMNS else 80


def bar(ratio: float, width: int = _BAR) -> str:
    """A bar of `ratio` of the width, in eighths of a cell; something is never shown as nothing."""
    eighths = round(min(1.0, max(0.0, ratio)) * width * 8)
    if ratio > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest] if rest else "")


def rule(title: str) -> Text:
    return Text(f"\n── {title} " + "─" * (76 - len(title)) + "\n", style="dim")


def explain(document: Document) -> RenderableType:
    """The account of one request."""
    pieces: list[RenderableType] = [
        _headline(document),
        Text(because(document), style="bold"),
        Text(),
    ]
    pieces.append(_parts(document["parts"], document["unattributed_ns"], document["e2e_ns"]))
    if document["ttft_ns"] and document["ttft_parts"]:
        pieces += [Text(), _ttft(document)]
    if document["delayed_by"]:
        pieces += [Text(), _delayed_by(document)]
    if document.get("engine_span"):
        pieces += [Text(), _engine_span(document["engine_span"])]
    if document["others"]:
        pieces += [Text(), _others(document["others"])]
    pieces += _remedy(remedy(document))
    return Group(*pieces)


def _headline(document: Document) -> Text:
    text = Text()
    text.append("request ", style="dim")
    text.append(escape(document["request_id"]), style="bold")
    if document.get("external_id"):
        text.append(f" ({escape(document['external_id'])})")
    text.append("\ntrace   ", style="dim")
    text.append(document["trace_id"])
    text.append("\n")
    figures = [f"{ms(document['e2e_ns'])} in all"]
    if document["ttft_ns"] is not None:
        whole = document["ttft_ns"] == document["e2e_ns"]
        first = f"first token after {ms(document['ttft_ns'])}"
        figures.append("sent in one piece" if whole else first)
    if document["tpot_ns"] is not None:
        figures.append(f"{ms(document['tpot_ns'])} a token")
    text.append(", ".join(figures), style="bold")
    text.append("\n")
    tokens = [f"{document['output_tokens']} tokens out"]
    if document["prompt_tokens"] is not None:
        tokens.insert(0, f"{document['prompt_tokens']} tokens in")
    tokens.append(f"{document['steps']} steps")
    if document.get("model"):
        tokens.append(escape(document["model"]))
    text.append(", ".join(tokens), style="dim")
    for note in _notes(document):
        text.append(f"\n{note}", style="yellow")
    text.append("\n")
    return text


def _engine_span(span: Document) -> Text:
    """Whether the engine's own figures agree with ours."""
    name = escape(span["name"])
    figures = span["figures"]
    differing = [each for each in figures if not each["agrees"]]
    text = Text(f"the engine's own span, {name}: ", style="dim")
    if not figures:
        text.append("it says no figure that we have, too")
    elif not differing:
        text.append(f"its figures agree with ours ({len(figures)} compared)")
    for each in differing:
        is_time = each["unit"] == "ns"
        theirs, ours = (
            ms(each[side]) if is_time else f"{each[side]} {each['unit']}"
            for side in ("engine", "ours")
        )
        text.append(f"\n  {escape(each['figure'])} is {theirs} there, {ours} here", style="yellow")
    return text


def _notes(document: Document) -> list[str]:
    notes = []
    if document.get("inferred"):
        notes.append("assumed: seen from outside, its steps are inferred")
    elif any(part["how"] == "assumed" for part in document["parts"]):
        notes.append("assumed: the model knows too few clean steps yet, or none of this size")
    if not document.get("finished", True):
        notes.append("not finished: this is its account so far")
    if document.get("not_looked_at"):
        names = ", ".join(document["not_looked_at"])
        notes.append(f"not looked at meanwhile, to save cost, so unattributed: {names}")
    if document.get("error"):
        notes.append(f"ended with an error: {escape(document['error'])}")
    if document["partial"]:
        notes.append("partial: it began before the agent attached")
    return notes


def _parts(parts: Sequence[Document], unattributed_ns: int, total_ns: int) -> Table:
    table = _bars()
    total_ns = max(1, total_ns)
    small = [part for part in parts if part["ns"] / total_ns < _SMALL_RATIO]
    shown = parts if len(small) == 1 else [part for part in parts if part not in small]
    for part in sorted(shown, key=lambda part: -part["ns"]):
        style = "red" if part["culprits"] else "cyan"
        _bar_row(table, part["ns"], part["ns"] / total_ns, style, part["cause"], how_text(part))
    small_ns = sum(part["ns"] for part in parts) - sum(part["ns"] for part in shown)
    if small_ns:
        name = f"{len(parts) - len(shown)} smaller parts"
        _bar_row(table, small_ns, small_ns / total_ns, "cyan", name, "")
    note = "the rest" if unattributed_ns else ""
    _bar_row(table, unattributed_ns, unattributed_ns / total_ns, "dim", "unattributed", note)
    table.add_row(Text(ms(total_ns), style="bold"), "100%", "", "", "")
    return table


def _ttft(document: Document) -> Text:
    total_ns = max(1, document["ttft_ns"])
    parts = sorted(document["ttft_parts"], key=lambda part: -part["ns"])[:4]
    listed = ", ".join(
        f"{part['cause']} {percent(part['ns'] / total_ns)}"
        for part in parts
        if part["ns"] / total_ns >= _SMALL_RATIO
    )
    return Text(f"Up to the first token: {listed}.")


def _delayed_by(document: Document) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)
    ranked = sorted(document["delayed_by"], key=lambda each: -each["ns"])
    for each in ranked[:5]:
        table.add_row(ms(each["ns"]), escape(each["request_id"]), each["cause"])
    left = ranked[5:]
    if left:
        table.add_row(ms(sum(each["ns"] for each in left)), f"{len(left)} more", "")
    return Group(Text("Delayed by these requests"), table)


def _remedy(text: str) -> list[RenderableType]:
    return [Text(), Text.assemble(("What to do: ", "bold"), text)] if text else []


def _others(others: Sequence[Document]) -> Text:
    listed = ", ".join(f"{short(each['request_id'])} ({ms(each['e2e_ns'])})" for each in others[:5])
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return Text(f"Others: {listed}{more}", style="dim")


def why(document: Document, span: str) -> RenderableType:
    """Where the time of many requests went."""
    count = document["requests"]
    if not count:
        return Text(f"No request has ended in the last {span}.")
    causes = [cause for cause in document["causes"] if cause["ratio"] >= _SMALL_RATIO]
    total_ns = sum(cause["ns"] for cause in document["causes"])
    pieces: list[RenderableType] = [
        Text(
            f"{counted(count, 'request')} in the last {span}, {ms(total_ns)} in all", style="bold"
        ),
        Text("; ".join(f"{percent(c['ratio'])} {CAUSE_TEXT[c['cause']]}" for c in causes[:3])),
        Text(),
    ]
    table = _bars()
    for cause in causes:
        culprits = [each for each in document["culprits"] if each["cause"] == cause["cause"]]
        style = "red" if culprits else "cyan"
        _bar_row(table, cause["ns"], cause["ratio"], style, cause["cause"], blame(culprits))
    pieces.append(table)
    if document["culprits"]:
        pieces += [Text(), Text("To blame"), _culprits(document["culprits"])]
    pieces += _remedy(remedy_of_all(document["causes"]))
    if document["worst"]:
        pieces += [Text(), Text(f"Slowest: dsagent explain {document['worst'][0]}", style="dim")]
    return Group(*pieces, *_anomalies(document))


def _bars() -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False, pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(width=_BAR, no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    return table


def _bar_row(table: Table, ns: int, ratio: float, style: str, name: str, note: str) -> None:
    table.add_row(ms(ns), percent(ratio), Text(bar(ratio), style=style), name, note)


def _culprits(culprits: Sequence[Document]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)
    for each in culprits[:8]:
        table.add_row(ms(each["ns"]), culprit(each), each["cause"])
    return table


def culprit(each: Document) -> str:
    if each["kind"] == "request":
        return who(each)
    pid = f" (pid {each['pid']})" if each["pid"] is not None else ""
    return f"{each['kind']} {who(each)}{pid}"


def sources(document: Document) -> Table:
    """The states of the sources, of an `attach` or `demo` document."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for source in document["sources"]:
        notes = [source["reason"]] if source["reason"] else []
        if source["dropped"]:
            notes.append(f"{source['dropped']} lost")
        table.add_row(
            source["name"],
            Text(source["state"], style=STATE_STYLE[source["state"]]),
            escape("; ".join(notes)),
        )
    return table


def summary(document: Document) -> RenderableType:
    """What an attachment came to."""
    target = document["target"]
    seconds = document["duration_ns"] / 1e9
    overhead = document["overhead"]
    pieces: list[RenderableType] = [
        Text(
            f"{seconds:.1f} s attached to {escape(target['comm'])} (pid {target['pid']}): "
            f"{counted(document['requests'], 'request')}, {counted(document['steps'], 'step')}",
            style="bold",
        ),
        Text(cost_line(overhead), style="dim"),
        Text(f"uncounted losses {document['uncounted_losses']}", style="dim"),
    ]
    if failures := document["accounting_failures"]:
        pieces.append(Text(f"accounting failed {failures} times: requests are missing", "bold red"))
    pieces += [
        Text(),
        sources(document),
    ]
    if document["sinks"]:
        pieces += [Text(), sinks(document["sinks"])]
    return Group(*pieces, *_anomalies(document))


def _anomalies(document: Document) -> list[RenderableType]:
    """Of an `attach` or `why` document; nothing where they were not watched for."""
    if "anomalies" not in document:
        return []
    found = document["anomalies"]
    if not found:
        return [Text(), Text("No anomaly was found.", style="dim")]
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for each in found:
        lasted = ms(each["lasted_ns"])
        traces = f", most in trace {each['trace_ids'][0]}" if each["trace_ids"] else ""
        table.add_row(
            f"{each['feature']} of {each['kind']}s",
            f"{ms(each['value'])}, usually {ms(each['usual'])}",
            f"over after {lasted}" if each["state"] == "ended" else f"since {lasted}",
            f"{each['seen']} {each['kind']}s{traces}",
        )
    return [Text(), Text("Took longer than usual"), table]


def cost_line(overhead: Document) -> str:
    pss = overhead["agent_pss_bytes"]
    memory = "" if pss is None else f", {pss / 1e6:.0f} MB"
    return (
        f"cost to the target {percent(overhead['ratio'])}; the agent itself "
        f"{percent(overhead['agent_cpu_ratio'])} of one core{memory}"
    )


def sinks(statuses: Sequence[Document]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, pad_edge=False)
    table.add_column("sink", no_wrap=True)
    for figure in ("sent", "acknowledged", "failed", "dropped"):
        table.add_column(figure, justify="right")
    table.add_column("reason", overflow="fold")
    for status in statuses:
        figures = [str(status[key]) for key in ("sent", "acknowledged", "failed", "dropped")]
        table.add_row(status["name"], *figures, escape(_why(status)))
    return table


def _why(status: Document) -> str:
    """What was lost for which reason, what still waits, and the last failure in words."""
    pieces = [f"{why} {items}" for why, items in status.get("lost", {}).items()]
    if status.get("queued"):
        pieces.append(f"{status['queued']} wait")
    return ": ".join(filter(None, (", ".join(pieces), str(status["reason"]))))
