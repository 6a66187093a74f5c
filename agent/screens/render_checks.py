"""What `doctor` and `probes` found, as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dsagent.agent.host.procfs import escape
from dsagent.agent.screens.render import STATE_STYLE

Document = Mapping[str, Any]

_CHECK_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red", "not_applicable": "dim"}


def checks(document: Document) -> Table:
    """What `doctor` found."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in document["checks"]:
        text = Text(escape(check["found"]))
        for key, lead in (("consequence", ""), ("fix", "fix: ")):
            if check[key] and check["state"] in ("warn", "fail"):
                text.append(f"\n{lead}{escape(check[key])}", style="dim" if not lead else "")
        state = check["state"].replace("not_applicable", "n/a")
        table.add_row(Text(state, style=_CHECK_STYLE[check["state"]]), check["name"], text)
    return table


def probes(document: Document) -> RenderableType:
    """What `probes` found; a reason that several share is said once, below."""
    reasons = Counter(probe["reason"] for probe in document["probes"] if probe["reason"])
    shared = [reason for reason, count in reasons.items() if count > 1]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("state", no_wrap=True)
    table.add_column("probe", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    table.add_column("a run", no_wrap=True, justify="right")
    table.add_column("measures", overflow="fold")
    for probe in document["probes"]:
        text = Text(probe["measures"])
        if probe["reason"] and probe["reason"] not in shared:
            text.append(f"\n{escape(probe['reason'])}", style="bold")
        cost_ns = probe["cost_ns"]
        cost = "" if cost_ns is None else f"{cost_ns} ns"
        state = Text(probe["state"], style=STATE_STYLE[probe["state"]])
        table.add_row(state, probe["name"], probe["tier"], cost, text)
    notes = [
        Text(f"\n{reasons[reason]} of them: {escape(reason)}", style="bold") for reason in shared
    ]
    return Group(table, *notes)
