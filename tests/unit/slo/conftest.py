"""Makes the helpers beside the tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from slo_watch import Watch


@pytest.fixture
def watch() -> Watch:
    return Watch()
