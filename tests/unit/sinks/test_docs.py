"""What docs/ says of tables and metrics is what the code has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dsagent.agent.metrics.catalog import CATALOGUE

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "docs.py"


def test_the_documents_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("docs_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for path, text in script.generated().items():
        assert path.read_text() == text, "run scripts/docs.py"
    listed = [metric for group in script.GROUPS.values() for metric in group]
    assert listed == list(CATALOGUE)
