"""docs/schemas.md names every key that the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import made_status
import shell_accounts

from dsagent.agent.session.ledger import Ledger

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "schemas.md").read_text()


def documented(title: str) -> set[str]:
    """The words in the section's table and between its backquotes."""
    section = PAGE.split(f"## {title}", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"[a-z_0-9]+", section))


def test_explain_and_why() -> None:
    ledger = Ledger()
    account = shell_accounts.interfered()
    ledger.add(account)
    ended_ns = account.record.sent_ns
    explained = ledger.explain(None, now_ns=ended_ns, last_ns=10**12, by="e2e", unfinished=list)
    assert not set(explained) - documented("The document of `explain --json`")
    why = ledger.why(now_ns=ended_ns, last_ns=10**12)
    assert not set(why) - documented("The documents of `why --json` and `doctor --json`")


def test_status() -> None:
    words = documented("The document of `status --json`") | documented("The documents of `attach")
    for document in (made_status.SIDECAR, *made_status.SIDECAR["engines"]):
        assert not set(document) - words
    for part in ("settings", "listener", "receiver", "memory", "recent", "scan"):
        assert not set(made_status.SIDECAR[part]) - words
