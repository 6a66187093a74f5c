"""The engine says what it has scheduled, the profiler hears the phase, and neither can hurt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from dsagent.engine.config import EngineConfig
from dsagent.engine.loader import load_model
from dsagent.engine.loop import Engine
from dsagent.engine.observe import StepObserver, StepReport
from dsagent.engine.request import SamplingParams
from dsagent.instrumentation.profiled import BadAddress, check_address
from dsagent.instrumentation.reference import ProfiledObserver


class Phases:
    def __init__(self) -> None:
        self.entered: list[str] = []
        self.stopped_after_s: float | None = None
        self.error: Exception | None = None

    def enter(self, phase: str) -> None:
        if self.error is not None:
            raise self.error
        self.entered.append(phase)

    def stop(self, deadline_s: float) -> None:
        self.stopped_after_s = deadline_s


@pytest.fixture
def phases() -> Phases:
    return Phases()


@pytest.fixture
def observer(phases: Phases) -> Iterator[ProfiledObserver]:
    made = ProfiledObserver(phases, engine_id=7)
    yield made
    made.close()


def test_each_step_has_its_phase(observer: ProfiledObserver, phases: Phases) -> None:
    observer.step_scheduled(64, 0)
    observer.step_scheduled(64, 3)
    observer.step_scheduled(0, 3)
    observer.idle()
    assert phases.entered == ["prefill", "mixed", "decode", "idle"]


def test_it_ends_with_the_engine(phases: Phases) -> None:
    ProfiledObserver(phases, engine_id=7).close()
    assert phases.stopped_after_s is not None and phases.stopped_after_s <= 10


def test_a_profiler_that_fails_is_kept_from_the_engine(
    observer: ProfiledObserver, phases: Phases
) -> None:
    phases.error = RuntimeError("no profiler any more")
    for _ in range(20):
        observer.step_scheduled(0, 1)
    observer.idle()
    assert observer.failures == 21


class Scheduled(StepObserver):
    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def step_started(self, step_id: int, start_ns: int) -> None:
        self.told.append(("started", 0, 0))

    def step_scheduled(self, prefill_tokens: int, decode_tokens: int) -> None:
        self.told.append(("scheduled", prefill_tokens, decode_tokens))

    def step_finished(self, step: StepReport) -> None:
        self.told.append(("finished", step.prefill_tokens, step.decode_tokens))


def test_the_loop_says_what_it_has_scheduled_before_it_computes() -> None:
    watching = Scheduled()
    engine = Engine(
        load_model("tiny-llama", device="cpu"),
        EngineConfig(),
        observer=watching,
        on_outputs=lambda _outputs: None,
    )
    engine.submit("r", list(range(3, 23)), SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.step():
        pass
    names = [what for what, _, _ in watching.told]
    assert names == ["started", "scheduled", "finished"] * (len(names) // 3)
    scheduled = [tokens for what, *tokens in watching.told if what == "scheduled"]
    finished = [tokens for what, *tokens in watching.told if what == "finished"]
    assert scheduled == finished
    assert scheduled[0] == [20, 0]
    assert scheduled[1] == [0, 1]


@pytest.mark.parametrize("url", ["http://127.0.0.1:4040", "https://p.example/path"])
def test_addresses(url: str) -> None:
    check_address(url)


@pytest.mark.parametrize("url", ["", "127.0.0.1:4040", "ftp://x", "http://[", "http://a:b", "a b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(BadAddress, match="--pyroscope"):
        check_address(url)


def test_a_password_in_what_is_no_address_is_not_repeated() -> None:
    with pytest.raises(BadAddress) as told:
        check_address("ftp://user:canary@p.example")
    assert "canary" not in str(told.value)


@pytest.mark.parametrize(
    ("before", "url", "expected"),
    [
        (
            "sys.modules['pyroscope'] = None; ",
            "http://127.0.0.1:1",
            "pip install 'dsagent[profile]'",
        ),
        ("", "nonsense", "takes a URL such as"),
    ],
)
def test_why_it_is_not_profiled_is_one_line(before: str, url: str, expected: str) -> None:
    script = (
        f"import sys; {before}from dsagent.instrumentation.reference import main; "
        f"sys.exit(main(['--model', 'tiny-llama', '--port', '0', '--pyroscope', {url!r}]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 2
    assert expected in ran.stderr
    assert ran.stderr.count("\n") == 1
