"""What several live tests need before they begin."""

from __future__ import annotations

import pytest
from sidecar_lab import until

from dsagent.agent.listening import control


@pytest.fixture
def the_only_sidecar() -> None:
    """There is one control socket of a sidecar for each network namespace."""
    until(lambda: control.owner(control.SIDECAR) is None, "another sidecar to end")
