"""Between many HTTP handlers (asyncio) and one engine loop (a thread)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from time import monotonic_ns

from .call import Call, stopping
from .connection import ClientGone, Connection
from .loop import Engine
from .observe import RequestLife, StepObserver
from .protocol import ApiError, Ask, Messages
from .request import EngineStopped, RequestRefused, SamplingParams, TokenOutput
from .tokenizer import TextTokenizer

# Longer texts are tokenised in a thread of their own (the library lets go of
# the GIL): a long prompt must not hold up everybody else's tokens.
_INLINE_CHARS = 4096


class Frontend:
    """The requests in the house, and the one way for tokens to reach them."""

    def __init__(
        self,
        *,
        model: str,
        vocab_size: int,
        tokenizer: TextTokenizer,
        observer: StepObserver,
        max_requests: int,
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.observer = observer
        self.draining = False
        self.failed = False
        self._tokenizer = tokenizer
        self._max_requests = max_requests
        self._longest_token = max(map(len, tokenizer.token_bytes))
        self._loop = asyncio.get_running_loop()
        self._calls: dict[str, Call] = {}  # waiting for tokens
        self._inside: set[Call] = set()  # admitted, and not yet answered to the last byte
        self._empty = asyncio.Event()
        self._empty.set()

    def attach(self, engine: Engine) -> None:
        """The engine needs `on_outputs` to be made, so it comes second."""
        self._engine = engine
        self._max_model_len = engine.max_model_len

    @property
    def healthy(self) -> bool:
        """Whether a request would be answered."""
        return self._engine.healthy

    # Tokens on their way out

    def on_outputs(self, outputs: list[TokenOutput]) -> None:
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
        if chars > self._max_model_len * self._longest_token:
            raise ApiError(
                400,
                f"the prompt's {chars} characters cannot fit into this model's context of "
                f"{self._max_model_len} tokens",
                code="context_length_exceeded",
            )
        if chars <= _INLINE_CHARS:
            return encode()
        return await self._loop.run_in_executor(None, encode)

    def sampling(self, ask: Ask, prompt_tokens: int) -> SamplingParams:
        """Raises ApiError where prompt and answer together are longer than the context."""
        room = self._max_model_len - prompt_tokens
        if prompt_tokens == 0:
            raise ApiError(400, "the prompt is empty", param="prompt")
        if room < (ask.max_tokens or 1):
            raise ApiError(
                400,
                f"this model's context is {self._max_model_len} tokens, but the prompt has "
                f"{prompt_tokens} and {ask.max_tokens or 1} were asked for",
                code="context_length_exceeded",
            )
        return SamplingParams(
            max_tokens=room if ask.max_tokens is None else ask.max_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            ignore_eos=ask.ignore_eos,
        )

    def admit(self) -> None:
        """Raises ApiError (503) while stopping, after a failure, or with too many inside."""
        if self.draining:
            raise stopping()
        if not self._engine.healthy:
            raise ApiError(503, "the engine has failed", kind="engine_error")
        if len(self._inside) >= self._max_requests:
            raise ApiError(503, "too many requests are waiting", kind="overloaded")

    def submit(
        self,
        life: RequestLife,
        ask: Ask,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        connection: Connection,
    ) -> Call:
        """Hand the request to the engine. To be followed by `release`. Raises ApiError."""
        self.admit()
        call = Call(life, self._tokenizer.token_bytes, ask.stop)
        self._calls[life.request_id] = call
        try:
            life.queued_ns = monotonic_ns()
            self._engine.submit(life.request_id, token_ids, sampling)
        except (RequestRefused, EngineStopped) as error:
            life.queued_ns = None
            del self._calls[life.request_id]
            raise _refusal(error) from None
        self._inside.add(call)
        self._empty.clear()
        connection.watch(lambda: self._lose(call))
        return call

    def cancel(self, call: Call) -> None:
        """The engine need not go on with it; nothing to do where it has finished."""
        if self._calls.pop(call.life.request_id, None) is not None:
            self._engine.abort(call.life.request_id)

    def release(self, call: Call, connection: Connection) -> None:
        """The request has left, one way or the other."""
        connection.unwatch()
        self.cancel(call)
        self._inside.discard(call)
        if not self._inside:
            self._empty.set()

    def _lose(self, call: Call) -> None:
        self.cancel(call)
        call.fail(ClientGone())

    # The end

    async def emptied(self) -> None:
        """Returns once nobody is inside."""
        await self._empty.wait()

    def fail_all(self) -> None:
        """Whoever is still inside ends now, by the server's doing."""
        self.failed = True
        for call in self._inside:
            self.cancel(call)
            call.fail(stopping())


def _refusal(error: RequestRefused | EngineStopped) -> ApiError:
    return ApiError(400, str(error)) if isinstance(error, RequestRefused) else stopping()
