"""What children have cost counts as the agent's own cost."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from dsagent.agent.session.overhead import WINDOW_NS, OverheadMeter

CPU_S = 0.3
BURN = f"import time\nwhile time.process_time() < {CPU_S}: pass"


@pytest.mark.parametrize("sees_displacement", [True, False])
def test_a_child_that_has_ended_counts(sees_displacement: bool) -> None:
    now_ns = time.monotonic_ns()
    meter = OverheadMeter(os.getpid(), now_ns, sees_displacement=sees_displacement)
    subprocess.run([sys.executable, "-c", BURN], check=True, timeout=120)
    assert meter.update(now_ns + WINDOW_NS, 0, 0)
    assert meter.window is not None
    cpus = len(os.sched_getaffinity(0))
    assert meter.window.agent_ratio >= CPU_S / (WINDOW_NS / 1e9) / cpus
    assert meter.agent_cpu_ratio >= CPU_S / (WINDOW_NS / 1e9)
    meter.update(now_ns + 2 * WINDOW_NS, 0, 0)
    assert meter.window.agent_ratio < CPU_S / (WINDOW_NS / 1e9) / cpus  # once
