"""Lets the tests of this folder import the helpers beside them; agents and engines as fixtures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from shell_lab import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine
