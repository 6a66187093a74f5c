"""Serves tiny-llama and tells on stdout, one JSON document a line, what an observer sees.

Run by test_server_http.py: `serve_and_tell.py '{"limits": {...}, "config": {...}}'`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from typing import Any

from torch import Tensor

from dsagent.engine import frontend, server
from dsagent.engine.config import EngineConfig
from dsagent.engine.connection import HttpLimits
from dsagent.engine.loop import Engine
from dsagent.engine.model import Batch
from dsagent.engine.observe import RequestLife, StepObserver, StepReport


def tell(event: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


class Teller(StepObserver):
    engine: Engine

    def request_opened(self, life: RequestLife) -> None:
        tell("opened", **dataclasses.asdict(life))

    def request_closed(self, life: RequestLife) -> None:
        tell("closed", **dataclasses.asdict(life))

    def step_finished(self, step: StepReport) -> None:
        tell("step", start_ns=step.start_ns, served=[share.request_id for share in step.shares])

    def idle(self) -> None:
        tell("idle", **self.engine.stats()._asdict())


def main(settings: dict[str, Any]) -> int:
    teller = Teller()

    class WatchedEngine(Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            teller.engine = self
            if settings.get("broken"):
                self._model.forward = broken_forward  # type: ignore[method-assign]

    def broken_forward(batch: Batch) -> Tensor:
        raise RuntimeError("out of memory, say")

    def bind(host: str, port: int) -> socket.socket:
        # Accepted sockets inherit it: a client that does not read is felt after a
        # few tokens, not after the megabytes that the kernel would take.
        listener = take_port(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    take_port = server._bind
    vars(frontend).update(Engine=WatchedEngine)
    vars(server).update(_bind=bind)
    return server.serve(
        "tiny-llama",
        host="127.0.0.1",
        port=0,
        config=EngineConfig(**settings.get("config", {})),
        observer=teller,
        announce=lambda url: tell("listening", url=url),
        limits=HttpLimits(**settings.get("limits", {})),
    )


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
