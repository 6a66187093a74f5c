"""What the tests of objectives share."""

from __future__ import annotations

import pytest
from slo_watch import Watch


@pytest.fixture
def watch() -> Watch:
    return Watch()
