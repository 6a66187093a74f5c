"""The laboratory's first faults on real vLLM, judged as on the reference engine: the kernel's
causes reach the request through front end, engine core and worker."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from vllm_lab import SERVED_AS
from watched import Watched

from dsagent.instrumentation.ring import Role

import first_truths  # isort: skip
from first_truths import Run  # isort: skip
from lab import Engine  # isort: skip

pytestmark = pytest.mark.ebpf


@pytest.fixture(scope="module")
def run(served: Watched, tmp_path_factory: pytest.TempPathFactory) -> Run:
    # Then every process has its ring.
    served.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 2})
    served.until(lambda: Role.RANK in served.pids, "a ring of the worker")
    group = os.getpgid(served.server.pid)

    def stop(seconds: float) -> tuple[int, int]:
        """The whole server, as a frozen container."""
        start_ns = time.monotonic_ns()
        os.killpg(group, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(group, signal.SIGCONT)
        return start_ns, time.monotonic_ns()

    target = Engine(served.server.process, "127.0.0.1", served.server.port, SERVED_AS)
    directory: Path = tmp_path_factory.mktemp("recording")
    return first_truths.observe(target, served.pids[Role.RANK], directory, stop)


def test_nothing_was_lost_and_all_were_accounted_for(run: Run) -> None:
    first_truths.check_nothing_was_lost(run)


def test_a_stopped_server_is_the_stop_and_its_size_is_right(run: Run) -> None:
    first_truths.check_stops(run)


def test_a_cpu_hog_is_the_run_queue_and_is_named(run: Run) -> None:
    first_truths.check_hogs(run)


def test_a_long_prefill_is_interference_by_that_request(run: Run) -> None:
    first_truths.check_long_prefills(run)


def test_requests_that_nothing_hit_name_no_fault_and_leave_little_over(run: Run) -> None:
    first_truths.check_unhit(run)
