"""Writes every board into generated/ (committed): `python -m dsagent.dashboards.generate`."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dsagent.dashboards import requests

GENERATED = Path(__file__).resolve().parent / "generated"


def generated() -> dict[str, str]:
    """The text of each file by its name."""
    return {"dsagent-requests.json": _text(requests.board().build())}


def _text(board: Dashboard) -> str:
    for number, panel in enumerate(board.panels or (), 1):
        panel.id_val = number
    return json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    GENERATED.mkdir(exist_ok=True)
    for name, text in generated().items():
        (GENERATED / name).write_text(text, encoding="utf-8")
