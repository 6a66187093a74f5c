"""What all tests share: a skipped eBPF test fails where it could have run; what hypothesis tries is
the same each time, and judged by no clock."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

# Chance is for `make fuzz-nightly`: a commit fails for what it changed, never for its luck.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """DSAGENT_REQUIRE_EBPF=1 says that this machine can run the tests marked ebpf."""
    outcome = yield
    report = outcome.get_result()
    expected = hasattr(report, "wasxfail")
    if report.skipped and not expected and item.get_closest_marker("ebpf"):
        if os.environ.get("DSAGENT_REQUIRE_EBPF") != "1":
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"DSAGENT_REQUIRE_EBPF=1 forbids to skip this: {reason}"
