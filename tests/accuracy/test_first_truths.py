"""The first three truths, of the reference engine."""

from __future__ import annotations

import functools
from pathlib import Path

import first_truths  # isort: skip  # beside this file, as the others
import pytest

from faults.stops import stop_for  # isort: skip
from first_truths import Run  # isort: skip
from lab import engine  # isort: skip

pytestmark = [pytest.mark.ebpf, pytest.mark.smollm2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory: Path = tmp_path_factory.mktemp("recording")
    with engine("smollm2") as target:
        stop = functools.partial(stop_for, target)
        return first_truths.observe(target, target.pid, directory, stop)


def test_nothing_was_lost_and_all_were_accounted_for(run: Run) -> None:
    first_truths.check_nothing_was_lost(run)


def test_a_stopped_process_is_the_stop_and_its_size_is_right(run: Run) -> None:
    first_truths.check_stops(run)


def test_a_cpu_hog_is_the_run_queue_and_is_named(run: Run) -> None:
    first_truths.check_hogs(run)


def test_a_long_prefill_is_interference_by_that_request(run: Run) -> None:
    first_truths.check_long_prefills(run)


def test_requests_that_nothing_hit_name_no_fault_and_leave_little_over(run: Run) -> None:
    first_truths.check_unhit(run)
