"""Serves one model over HTTP in one process: asyncio here, the engine's loop beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from .api import build_app
from .checkpoint import ModelNotLoadable
from .config import EngineConfig
from .connection import HttpLimits, connection_class
from .frontend import Frontend
from .loader import LoadedModel, load_model
from .observe import StepObserver

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    model: str,
    *,
    host: str,
    port: int,
    config: EngineConfig,
    observer: StepObserver,
    announce: Callable[[str], None],
    limits: HttpLimits | None = None,
) -> int:
    """Serve `model` (a name or a folder) until told to stop; returns the exit code.

    `announce` gets the URL once requests are answered. The first SIGTERM or
    SIGINT drains (0, or 1 if some requests did not end in time), a second one
    stops at once (128 + its number). What cannot be served ends with 1 and a
    line on stderr, a model that is none with 2.
    """
    try:
        with _bind(host, port) as listener:
            loaded = load_model(model)
            _quieten()
            return asyncio.run(
                _serve(listener, loaded, config, observer, announce, limits or HttpLimits())
            )
    except (_ServeError, ModelNotLoadable) as error:
        print(f"error: cannot serve {model}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ModelNotLoadable) else 1
    except KeyboardInterrupt:  # while loading
        return 128 + signal.SIGINT
    finally:
        observer.close()


async def _serve(
    listener: socket.socket,
    loaded: LoadedModel,
    config: EngineConfig,
    observer: StepObserver,
    announce: Callable[[str], None],
    limits: HttpLimits,
) -> int:
    try:
        frontend = Frontend(loaded, config, observer, limits)
    except (RuntimeError, MemoryError) as error:  # torch says the former for the latter
        reason = str(error).partition("\n")[0] or "out of memory"
        raise _ServeError(f"no room for the KV cache: {reason}") from error
    server = _Server(frontend, started=partial(announce, _url(listener)))
    frontend.engine.start()
    await server.serve(sockets=[listener])
    # Off this thread: the last step's outputs still have to come in here.
    await asyncio.to_thread(frontend.engine.stop, drain=False, deadline_s=10.0)
    return server.exit_code


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it listens; the first signal drains it, a second one
    stops it at once."""

    def __init__(self, frontend: Frontend, *, started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(frontend),
                http=connection_class(frontend.limits),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=75,
            )
        )
        self.exit_code = 0
        self._frontend = frontend
        self._on_started = started
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._signal, number)
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _signal(self, number: int) -> None:
        if self._draining is None:
            # The listening socket stays open meanwhile: newcomers get a 503
            # that says why, not a refused connection.
            self._frontend.draining = True
            self._draining = asyncio.create_task(self._drain())
        else:
            self._end(128 + number)

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._frontend.emptied(), self._frontend.limits.drain_s)
        except TimeoutError:
            self._end(1)
        self.should_exit = True

    def _end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._frontend.end_all()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.should_exit = self.force_exit = True


class _ServeError(Exception):
    """Why it cannot begin, in one line."""


def _bind(host: str, port: int) -> socket.socket:
    """Takes the port before the model is loaded, so that a clash shows at once.

    Nobody is accepted before uvicorn listens. Raises _ServeError.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: a token must not wait for the ACK of the last one.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:  # the latter for a port beyond 65535
        if listener is not None:
            listener.close()
        raise _ServeError(f"{host}:{port}: {error}") from error
    return listener


def _quieten() -> None:
    """Left to itself uvicorn writes to stderr about malformed requests and gone clients:
    strangers must not fill a log. What the application did wrong still shows."""
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.ERROR)
    logger.addFilter(lambda record: not record.getMessage().startswith("ASGI callable returned"))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
