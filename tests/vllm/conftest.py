"""One environment and one server for all tests of the plug-in: a start takes a minute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_lab import MODELS, VLLM, Overlay, Server, one_server_at_a_time, wheel_of_dsagent
from watched import Watched


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM's environment there is nothing to test; `make test-vllm` insists on it."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.timeout(900))  # a start takes minutes on a busy machine
    if (VLLM / "bin" / "vllm").exists() and MODELS.exists():
        return
    if os.environ.get("DSAGENT_REQUIRE_VLLM") == "1":
        raise pytest.UsageError(f"no vLLM in {VLLM}, or no models in {MODELS}: make setup-vllm")
    for item in ours:
        item.add_marker(pytest.mark.skip(reason="needs vLLM's environment: make setup-vllm"))


@dataclass(frozen=True, slots=True)
class Plugged:
    """vLLM's environment with dsagent installed into it; what pip said before and after."""

    overlay: Overlay
    before: set[str]
    after: set[str]


@pytest.fixture(scope="session")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Plugged:
    folder = tmp_path_factory.mktemp("plugged")
    overlay = Overlay.make(folder / "env")
    before = set(overlay.pip("freeze").splitlines())
    overlay.pip("install", "--quiet", str(wheel_of_dsagent(folder / "wheel")))
    return Plugged(overlay, before, set(overlay.pip("freeze").splitlines()))


@pytest.fixture(scope="session")
def served(plugged: Plugged, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """SmolLM2, with a budget that cuts long prompts and few KV blocks, so that some requests have
    to be preempted; and all that the rings have told since the start."""
    folder = tmp_path_factory.mktemp("served")
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "256")
    with one_server_at_a_time():
        server = Server(
            plugged.overlay.path, "smollm2", folder, *flags, "--num-gpu-blocks-override", "10"
        )
        try:
            server.wait_until_up()
            watched = Watched(server)
            yield watched
            watched.close()
        finally:
            server.stop()
