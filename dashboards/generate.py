"""Every board as the text of its file in generated/, which is committed."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dsagent.dashboards import (
    cache,
    causes,
    engine,
    experts,
    gpu,
    kernel,
    latency,
    overview,
    own,
    queue,
    trace,
)

GENERATED = Path(__file__).resolve().parent / "generated"
BOARDS = {
    "overview": overview,
    "latency": latency,
    "causes": causes,
    "engine": engine,
    "cache": cache,
    "queue": queue,
    "kernel": kernel,
    "gpu": gpu,
    "agent": own,
    "experts": experts,
    "trace": trace,
}


def generated() -> dict[str, str]:
    """The text of each file by its name."""
    return {
        f"dsagent-{name}.json": _text(module.board().build()) for name, module in BOARDS.items()
    }


def _text(board: Dashboard) -> str:
    for number, panel in enumerate(board.panels or (), 1):
        panel.id_val = number
    for variable in (board.templating and board.templating.list_val) or ():
        variable.auto = variable.auto_min = variable.auto_count = (
            None  # of intervals only: Grafana's own types refuse it elsewhere
        )
    return json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def write(folder: Path = GENERATED) -> list[Path]:
    """Writes what differs; returns every file."""
    folder.mkdir(exist_ok=True)
    paths = []
    for name, text in generated().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    write()
