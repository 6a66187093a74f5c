"""Between many HTTP handlers (asyncio) and one engine loop (a thread)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from time import monotonic_ns

from .call import Call, stopping
from .config import EngineConfig
from .connection import ClientGone, Connection, HttpLimits
from .loader import LoadedModel
from .loop import Engine
from .observe import RequestLife, StepObserver
from .protocol import ApiError, Ask, Messages
from .request import EngineStopped, RequestRefused, SamplingParams, TokenOutput

# Longer texts are tokenised in a thread of their own (the library lets go of
# the GIL): a long prompt must not hold up everybody else's tokens.
_INLINE_CHARS = 4096


class Frontend:
    """The engine, the requests in the house, and the one way for tokens to reach them.

    To be made in the event loop's thread. Raises RuntimeError or MemoryError
    where there is no room for the KV cache.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, observer: StepObserver, limits: HttpLimits
    ) -> None:
        self.model = loaded.name
        self.vocab_size = loaded.model.vocab_size
        self.observer = observer
        self.limits = limits
        self.engine = Engine(loaded, config, observer=observer, on_outputs=self._on_outputs)
        self.draining = False
        self.cut_off = False  # whoever goes now does not do so by his own will
        self._tokenizer = loaded.tokenizer
        self._max_chars = self.engine.max_model_len * max(map(len, self._tokenizer.token_bytes))
        self._loop = asyncio.get_running_loop()
        self._calls: dict[str, Call] = {}  # waiting for tokens
        self._inside: set[Call] = set()  # admitted, and not yet answered to the last byte
        self._empty = asyncio.Event()
        self._empty.set()

    # Tokens on their way out

    def _on_outputs(self, outputs: list[TokenOutput]) -> None:
        """The loop's thread: one wake-up of this thread a step, however many requests are in it."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            call = self._calls.get(output.request_id)
            if call is None:
                continue  # aborted meanwhile
            if output.finish_reason is not None:
                del self._calls[output.request_id]
            call.put(output)

    # Requests on their way in

    @property
    def status(self) -> str:
        """Whether a request would be answered: "ok", or why not."""
        if self.draining:
            return "stopping"
        return "ok" if self.engine.healthy else "failed"

    def admit(self) -> None:
        """Raises ApiError (503) while stopping, after a failure, or with too many inside."""
        if self.draining:
            raise stopping()
        if not self.engine.healthy:
            raise ApiError(503, "the engine has failed", kind="engine_error")
        if len(self._inside) >= self.limits.max_requests:
            raise ApiError(503, "too many requests are waiting", kind="overloaded")

    async def tokenise(self, ask: Ask) -> Sequence[int]:
        """The prompt's token ids. Raises ApiError for one that cannot fit, ChatTemplateError."""
        prompt = ask.prompt
        if isinstance(prompt, str):
            encode, chars = partial(self._tokenizer.encode, prompt), len(prompt)
        elif isinstance(prompt, Messages):
            encode = partial(self._tokenizer.encode_chat, prompt)
            chars = sum(len(message["content"]) for message in prompt)
        else:
            return prompt
        if chars > self._max_chars:
            raise self._too_long(f"the prompt has {chars} characters")
        if chars <= _INLINE_CHARS:
            return encode()
        return await self._loop.run_in_executor(None, encode)

    def _too_long(self, what: str) -> ApiError:
        context = f"this model's context is {self.engine.max_model_len} tokens, but {what}"
        return ApiError(400, context, code="context_length_exceeded")

    @contextlib.contextmanager
    def computing(
        self, life: RequestLife, ask: Ask, token_ids: Sequence[int], connection: Connection
    ) -> Iterator[Call]:
        """The engine works on the request meanwhile, but no longer. Raises ApiError."""
        room, wanted = self.engine.max_model_len - len(token_ids), ask.max_tokens or 1
        if room < wanted:
            raise self._too_long(f"the prompt has {len(token_ids)} and {wanted} were asked for")
        life.max_tokens = ask.max_tokens or room
        sampling = SamplingParams(
            life.max_tokens, ask.temperature, ask.top_p, ask.seed, ask.ignore_eos
        )
        self.admit()  # once more: others may have come while this prompt was tokenised
        call = Call(life, self._tokenizer.token_bytes, ask.stop)
        self._calls[life.request_id] = call
        try:
            life.queued_ns = monotonic_ns()
            self.engine.submit(life.request_id, token_ids, sampling)
        except (RequestRefused, EngineStopped) as error:
            life.queued_ns = None
            del self._calls[life.request_id]
            refused = isinstance(error, RequestRefused)
            raise (ApiError(400, str(error)) if refused else stopping()) from None
        self._inside.add(call)
        self._empty.clear()
        try:
            connection.watch(partial(self._end, call, ClientGone()))
            yield call
        finally:
            connection.unwatch()
            self.cancel(call)
            self._inside.discard(call)
            if not self._inside:
                self._empty.set()

    def cancel(self, call: Call) -> None:
        """The engine need not go on with it; nothing to do where it has finished."""
        if self._calls.pop(call.life.request_id, None) is not None:
            self.engine.abort(call.life.request_id)

    def _end(self, call: Call, failure: Exception) -> None:
        self.cancel(call)
        call.fail(failure)

    # The end

    async def emptied(self) -> None:
        """Returns once nobody is inside."""
        await self._empty.wait()

    def end_all(self) -> None:
        """Whoever is still inside ends now, by the server's doing."""
        self.cut_off = True
        for call in self._inside:
            self._end(call, stopping())
