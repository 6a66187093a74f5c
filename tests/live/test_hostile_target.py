"""A target that lies in its rings and in its names: what people and back ends see of it is tame."""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from otlp_back_ends import free_port, grpc_back_end
from prometheus_client.parser import text_string_to_metric_families
from shell_lab import PATIENCE_S, Agent, Child, asked, dsagent

SCRIPT = str(Path(__file__).with_name("hostile_engine.py"))
# What a terminal or a log would obey: controls but for the line's end, and those that reorder text.
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


@contextmanager
def hostile(how: str) -> Iterator[Child]:
    with Child([sys.executable, SCRIPT, how]) as engine:
        engine.wait_line(lambda line: line.startswith("ready"))
        yield engine


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def value(text: str, name: str, **labels: str) -> float:
    """The sum of the samples of that name that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def wait_for(port: int, name: str, least: float, **labels: str) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while value(text := scraped(port), name, **labels) < least:
        assert time.monotonic() < deadline, f"{name} {labels} stayed below {least}"
        time.sleep(0.2)
    return text


def test_escape_codes_and_line_breaks_in_names_reach_no_terminal_log_or_label(
    tmp_path: Path,
) -> None:
    port = free_port()
    with (
        hostile("names") as engine,
        grpc_back_end() as back_end,
        Agent(
            engine.pid,
            *("--prometheus", f"127.0.0.1:{port}", "--record", str(tmp_path / "rec")),
            *("--otlp-endpoint", f"http://127.0.0.1:{back_end.port}", "--otlp-protocol", "grpc"),
            *("--without", "kernel", "--sample-rate", "100%"),
        ) as agent,
    ):
        agent.attached()
        metrics = wait_for(port, "dsagent_requests_total", 5)
        told = [
            dsagent("explain", "--pid", str(engine.pid)).stdout,
            dsagent("why", "--pid", str(engine.pid)).stdout,
            dsagent("explain", "--recording", str(tmp_path / "rec"), check=False).stdout,
            dsagent("explain", "--pid", str(engine.pid), "--json").stdout,
        ]
        document = asked("explain", "--pid", str(engine.pid))
        agent.process.terminate()
        assert agent.wait() == 0
    told += ["\n".join(agent.out), "\n".join(agent.err), metrics]
    for text in told:
        assert not OBEYED.search(text), ascii(text)
    assert "forged" in metrics, "the name itself is shown"
    assert not [line for line in metrics.splitlines() if line.startswith("forged")]
    assert not [line for line in agent.out + agent.err if line.startswith("forged")]
    assert document["request_id"].endswith("31m"), "JSON carries what was said, escaped by itself"
    assert back_end.spans, "they went out"
    bodies = [record.body.string_value for record in back_end.logs]
    assert bodies, "an error is a log line"
    assert not [body for body in bodies if OBEYED.search(body)]


def test_counts_that_cannot_be_are_rejected_and_counted() -> None:
    port = free_port()
    with (
        hostile("counts") as engine,
        Agent(
            engine.pid, "--json", "--prometheus", f"127.0.0.1:{port}", "--without", "kernel"
        ) as agent,
    ):
        agent.attached()
        text = wait_for(port, "dsagent_requests_total", 5)
        agent.process.terminate()
        assert agent.wait() == 0
        summary = agent.document()
    assert 0 < value(text, "gen_ai_client_token_usage_sum") <= 1000
    (steps,) = [source for source in summary["sources"] if source["name"] == "steps"]
    assert steps["dropped"] >= 8, "half of what it wrote"
    assert summary["uncounted_losses"] == 0


@pytest.mark.parametrize("name", ["root", "cwd"])
def test_nothing_below_a_targets_root_is_opened(name: str) -> None:
    """A link in there could lead the agent anywhere. So no path of ours goes through /proc/PID/root
    or /proc/PID/cwd; a mapped file is reached through map_files, which no link can redirect, or by
    mapped.py, whose walk is held inside that root (tests/unit/outside/test_mapped.py)."""
    agent = Path(__file__).resolve().parents[2] / "agent"
    through = re.compile(rf"""["'/]{name}["'/]""")
    found = [
        f"{path.relative_to(agent)}:{number}"
        for path in sorted(agent.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if through.search(line) and ("proc" in line or "folder" in line)
    ]
    if name == "root":
        assert [place.split(":")[0] for place in found] == ["sources/outside/mapped.py"]
        return
    assert not found
