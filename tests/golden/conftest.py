"""Golden files, and the accounts that pages are made of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """golden(name, text): the text is what the file says; DSAGENT_UPDATE_GOLDEN=1 writes it."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "shell" / name
        if os.environ.get("DSAGENT_UPDATE_GOLDEN") == "1":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text()

    return check
