"""`dsagent fleet`: what many pods send, what takes it, and questions to their store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsagent.agent.fleet.s3_options import S3CaFile, S3Endpoint
from dsagent.agent.settings import named_path, option, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

Action = Literal["size", "measure", "sql"]


def fleet(
    action: Annotated[
        Action,
        typer.Argument(metavar="size|measure|sql", show_default=False, help="What to do."),
    ],
    store: Annotated[
        str | None,
        typer.Argument(metavar="STORE", help="sql: a folder, or s3://bucket/prefix."),
    ] = None,
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="SQL",
            help="sql: a statement, or slowest, causes, culprits, latency.",
        ),
    ] = None,
    pods: Annotated[
        int, option(metavar="N", min=1, max=10_000_000, help="size: how many.")
    ] = 10_000,
    requests_per_second: Annotated[
        float | None,
        option(metavar="N", min=0.001, max=1e6, help="size: of a pod; without it as measured."),
    ] = None,
    kept: Annotated[
        str | None,
        option(metavar="PERCENT", help="size: requests whose traces are kept; else as measured."),
    ] = None,
    measured: Annotated[
        Path | None,
        option(
            metavar="FILE",
            parser=named_path,
            help="size: what `fleet measure --json` printed; else what comes with dsagent.",
        ),
    ] = None,
    duration: Annotated[
        float,
        option(metavar="SECONDS", min=5, max=3600, callback=seconds, help="measure: under load."),
    ] = 60.0,
    model: Annotated[
        str, option(metavar="NAME|DIR", help="measure: the model to serve.")
    ] = "smollm2",
    last: Annotated[
        str | None, option(metavar="SPAN", help="sql: only the hours of this span: 24h.")
    ] = None,
    s3_endpoint: S3Endpoint = None,
    s3_ca_file: S3CaFile = None,
    json: Annotated[bool, option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Size back ends for many pods, measure one, or ask a store.

    size: what so many pods send, and what Collector, Prometheus, Tempo, ClickHouse and the store
    need for it, each with its rule and where that stands. measure: serves the bundled engine under
    a load and weighs all that its agent sends. sql: DuckDB on what `roll` and `retain` have made.

    \b
    Examples:
      dsagent fleet size --pods 10000 --requests-per-second 5
      dsagent fleet measure --duration 60 --json
      dsagent fleet sql /srv/fleet slowest --last 24h
    """
    from dsagent.agent.errors import USAGE, DsagentError
    from dsagent.agent.screens import terminal

    if action != "sql" and store is not None:
        raise DsagentError(f"{action} takes no STORE", exit_code=USAGE)
    if action == "sql":
        if store is None or question is None or not question.strip():
            raise DsagentError(
                "sql needs STORE and SQL, such as: dsagent fleet sql /srv/fleet slowest",
                exit_code=USAGE,
            )
        document, text = _sql(store, question, last, s3_endpoint, s3_ca_file)
    elif action == "measure":
        document, text = _measure(model, duration)
    else:
        document, text = _size(pods, requests_per_second, kept, measured)
    if json:
        terminal.put_json(document)
    else:
        terminal.put_text(text)


_Result = tuple[dict[str, Any], "RenderableType"]


def _size(
    pods: int, requests_per_s: float | None, kept: str | None, measured: Path | None
) -> _Result:
    from rich.table import Table

    from dsagent.agent.fleet.measured import load_measured
    from dsagent.agent.fleet.size import Fleet, figure, size
    from dsagent.agent.settings import parse_percent

    one = load_measured(measured)
    ratio = None if kept is None else parse_percent(kept, least=0.0)
    lines = size(one, Fleet(pods, requests_per_s, ratio))
    table = Table(box=None, pad_edge=False, title=f"{pods:,} pods", title_justify="left")
    for column in ("who", "what", "value", "by"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for line in lines:
        table.add_row(line.who, line.what, f"{figure(line.value)} {line.unit}".strip(), line.rule)
    return {"pods": pods, "measured": one.json(), "lines": [line.json() for line in lines]}, table


def _measure(model: str, duration_s: float) -> _Result:
    from dsagent.agent.fleet.measure import measure
    from dsagent.agent.screens import terminal

    progress = terminal.Progress()
    with progress:
        document = measure(model, duration_s, tell=progress.say).json()
    width = max(map(len, document))
    shown = (f"{v:,.4g}" if isinstance(v, float) else str(v) for v in document.values())
    text = "\n".join(f"{k:<{width}}  {v}" for k, v in zip(document, shown, strict=True))
    return document, text


def _sql(
    name: str, question: str, last: str | None, endpoint: str | None, ca_file: Path | None
) -> _Result:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from dsagent.agent.fleet.query import MAX_ROWS, ask
    from dsagent.agent.fleet.store import open_store
    from dsagent.agent.host.procfs import escape
    from dsagent.agent.session.ledger import parse_duration_ns

    last_ns = None if last is None else parse_duration_ns(last)
    store = open_store(name, endpoint, ca_file, must_exist=True)
    answer = ask(store, question, last_ns)
    table = Table(box=None, pad_edge=False)
    for column in answer.columns:
        table.add_column(escape(column), overflow="fold")  # an id that is cut is of no use
    for row in answer.rows:
        table.add_row(*(_cell(value) for value in row))
    if not answer.rows:
        return answer.json(), Group(
            table, Text("no rows; the tables hourly_… are filled by `dsagent retain`")
        )
    if answer.is_cut:
        table.caption = f"cut after {MAX_ROWS:,} rows"
    return answer.json(), table


def _cell(value: object) -> str:
    from dsagent.agent.host.procfs import escape

    if value is None:
        return ""
    return f"{value:,.1f}" if isinstance(value, float) else escape(str(value), limit=200)
