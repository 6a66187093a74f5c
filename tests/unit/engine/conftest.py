from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dsagent.engine.config import EngineConfig
from dsagent.engine.loader import LoadedModel, load_model
from dsagent.engine.loop import Engine
from dsagent.engine.observe import StepObserver, StepReport
from dsagent.engine.request import TokenOutput


class Watcher(StepObserver):
    """Keeps what the engine reports and hands out."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.steps: list[StepReport] = []
        self.idles = 0
        self.outputs: dict[str, list[TokenOutput]] = defaultdict(list)

    def step_started(self, step_id: int, start_ns: int) -> None:
        self.started.append((step_id, start_ns))

    def step_finished(self, step: StepReport) -> None:
        self.steps.append(step)

    def idle(self) -> None:
        self.idles += 1

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            self.outputs[output.request_id].append(output)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def reason(self, request_id: str) -> str | None:
        return self.outputs[request_id][-1].finish_reason


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    return load_model("tiny-llama", device="cpu")


NewEngine = Callable[..., tuple[Engine, Watcher]]


@pytest.fixture
def new_engine(tiny: LoadedModel) -> Iterator[NewEngine]:
    """Builds engines on tiny-llama; checks at the end that none has lost a block."""
    built: list[Engine] = []

    def build(**settings: Any) -> tuple[Engine, Watcher]:
        watcher = Watcher()
        engine = Engine(tiny, EngineConfig(**settings), observer=watcher, on_outputs=watcher.take)
        built.append(engine)
        return engine, watcher

    yield build
    for engine in built:
        engine._kv.check()
