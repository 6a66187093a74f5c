"""The HTTP interface: OpenAI's two ways to generate, models, health and metrics.

The generating endpoints are plain ASGI applications: each of their moments is
stamped where it happens, and a token is one `send`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from time import monotonic_ns, time

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .call import Call, end_life, stopping
from .chat_template import ChatTemplateError
from .connection import EXTENSION, ClientGone, Connection, read_body
from .frontend import Frontend
from .observe import RequestLife
from .protocol import ApiError, Ask, parse_ask, parse_body
from .reply import Reply

_MAX_HEADER_CHARS = 256  # of an identifier that a client sends along
_TENANT_HEADER = os.environ.get("DSAGENT_TENANT_HEADER", "x-tenant-id").lower().encode()


class Generate:
    """POST /v1/completions and POST /v1/chat/completions."""

    def __init__(self, frontend: Frontend, *, chat: bool) -> None:
        self._frontend = frontend
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        life = self._open_life(scope)
        answer = _Answer(life, scope["extensions"][EXTENSION], send)
        observer = self._frontend.observer
        failure: BaseException | None = None
        try:
            try:
                raw = await read_body(receive, self._frontend.limits)
            finally:
                observer.request_opened(life)
            await self._generate(raw, answer)
        except (ApiError, ChatTemplateError) as error:
            failure = error if isinstance(error, ApiError) else ApiError(400, str(error))
            with contextlib.suppress(ClientGone):  # it is refused all the same
                await answer.refuse(failure)
        except ClientGone as gone:
            failure = stopping() if self._frontend.cut_off else gone
        except BaseException as error:
            failure = error
            raise
        finally:
            end_life(life, failure)
            observer.request_closed(life)

    def _open_life(self, scope: Scope) -> RequestLife:
        received_ns = monotonic_ns()
        headers = scope["headers"]
        return RequestLife(
            request_id=f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(16)}",
            operation="chat" if self._chat else "text_completion",
            model=self._frontend.model,
            received_ns=received_ns,
            traceparent=_header(headers, b"traceparent"),
            external_id=_header(headers, b"x-request-id"),
            tenant=_header(headers, _TENANT_HEADER),
        )

    async def _generate(self, raw: bytes, answer: _Answer) -> None:
        frontend, life = self._frontend, answer.life
        frontend.admit()
        ask = self._ask(parse_body(raw))
        life.max_tokens, life.temperature, life.top_p = ask.max_tokens, ask.temperature, ask.top_p
        token_ids = await frontend.tokenise(ask)
        life.tokenised_ns = monotonic_ns()
        life.prompt_tokens = len(token_ids)
        reply = Reply(life, include_usage=ask.include_usage)
        respond = self._stream if ask.stream else self._whole
        with frontend.computing(life, ask, token_ids, answer.connection) as call:
            await respond(call, reply, answer)

    def _ask(self, body: dict[str, object]) -> Ask:
        ask = parse_ask(body, chat=self._chat, vocab_size=self._frontend.vocab_size)
        if ask.model != self._frontend.model:
            raise ApiError(
                404,
                f"no model {ask.model[:100]!r} here, only {self._frontend.model!r}",
                param="model",
                code="model_not_found",
            )
        return ask

    async def _stream(self, call: Call, reply: Reply, answer: _Answer) -> None:
        await answer.start(200, b"text/event-stream; charset=utf-8")
        try:
            while True:
                text = await call.text()
                if call.done:
                    break
                if text:
                    await answer.send(reply.piece(text), more=True)
        except ApiError as error:
            await answer.send(reply.failure(error), more=False)
            raise
        self._frontend.cancel(call)  # a stop string: the engine does not know
        await answer.send(reply.end(text), more=False)

    async def _whole(self, call: Call, reply: Reply, answer: _Answer) -> None:
        pieces = []
        while not call.done:
            pieces.append(await call.text())
        self._frontend.cancel(call)
        body = reply.whole("".join(pieces))
        await answer.start(200, b"application/json", length=len(body))
        await answer.send(body, more=False)


class _Answer:
    """The way out, and when the socket took what."""

    __slots__ = ("_send", "_started", "connection", "life")

    def __init__(self, life: RequestLife, connection: Connection, send: Send) -> None:
        self.life = life
        self.connection = connection
        self._send = send
        self._started = False

    async def start(self, status: int, content_type: bytes, *, length: int | None = None) -> None:
        headers = [
            (b"content-type", content_type),
            (b"x-request-id", self.life.request_id.encode()),
            (b"cache-control", b"no-store"),
        ]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        if status in (408, 503):
            headers.append((b"connection", b"close"))
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes, *, more: bool) -> None:
        """Raises ClientGone where the socket did not take it."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        await self.connection.drained()
        now_ns = monotonic_ns()
        if self.life.first_sent_ns is None and self.life.first_token_ns is not None:
            self.life.first_sent_ns = now_ns
        if not more:
            self.life.sent_ns = now_ns

    async def refuse(self, error: ApiError) -> None:
        """The error's document, unless something else has gone out already."""
        if not self._started:
            body = error.body()
            await self.start(error.status, b"application/json", length=len(body))
            await self.send(body, more=False)


def _header(headers: list[tuple[bytes, bytes]], name: bytes) -> str | None:
    """As it came, cut to a bounded length; several of one name are one list, as HTTP has it."""
    values = [value for key, value in headers if key == name]
    return b",".join(values).decode("latin-1")[:_MAX_HEADER_CHARS] if values else None


def build_app(frontend: Frontend) -> Starlette:
    """All paths."""
    started = int(time())

    async def health(request: Request) -> Response:
        status = frontend.status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def models(request: Request) -> Response:
        card = {"id": frontend.model, "object": "model", "created": started, "owned_by": "dsagent"}
        wanted = request.path_params.get("model")
        if wanted is None:
            return JSONResponse({"object": "list", "data": [card]})
        if wanted != frontend.model:
            return _error_response(ApiError(404, "no such model", code="model_not_found"))
        return JSONResponse(card)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(
            encode(frontend.engine.metrics.registry), headers={"content-type": content_type}
        )

    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = f"{request.method} {request.url.path[:100]}: "
        message += {404: "no such path", 405: "method not allowed"}.get(status, "failed")
        return _error_response(ApiError(status, message))

    return Starlette(
        routes=[
            Route("/v1/completions", Generate(frontend, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", Generate(frontend, chat=True), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: http_error, Exception: http_error},
    )


def _error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, media_type="application/json")
