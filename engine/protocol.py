"""What a client may ask for: OpenAI's request bodies, checked field by field.

Everything here comes from strangers. A body that is not right ends in an
`ApiError` with the status, the text and the parameter that the client needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiError(Exception):
    """A refusal, in OpenAI's shape. `kind` is what observers see as error.type."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The JSON document that goes to the client."""
        error = {
            "message": str(self),
            "type": "invalid_request_error" if self.status < 500 else "server_error",
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True, slots=True)
class Ask:
    """One checked request. Exactly one of `text`, `token_ids` and `messages` is not None."""

    model: str
    text: str | None
    token_ids: tuple[int, ...] | None
    messages: tuple[dict[str, str], ...] | None
    max_tokens: int | None  # None: up to the end of the context (chat only)
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool  # an extension that load generators send


# Fields that would change the answer and that this engine does not have, with
# the values that ask for nothing. Ignoring the rest would be a silent lie.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body; strict: UTF-8 only, no NaN, no infinity, no lone surrogates."""

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def parse_completion(body: Mapping[str, Any], *, vocab_size: int) -> Ask:
    """POST /v1/completions."""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        text = _text(prompt, "prompt")
    elif isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        if not all(0 <= item < vocab_size for item in prompt):
            _refuse("prompt", f"token ids must be between 0 and {vocab_size - 1}")
        token_ids = tuple(prompt)
    elif isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        _refuse("prompt", "one prompt a request: send several requests instead")
    else:
        _refuse("prompt", "must be a string or a non-empty list of token ids")
    max_tokens = _max_tokens(body, "max_tokens")
    return _ask(
        body, text=text, token_ids=token_ids, max_tokens=16 if max_tokens is None else max_tokens
    )


def parse_chat(body: Mapping[str, Any]) -> Ask:
    """POST /v1/chat/completions."""
    raw = body.get("messages")
    if not isinstance(raw, list) or not raw:
        _refuse("messages", "must be a non-empty list")
    if len(raw) > MAX_MESSAGES:
        _refuse("messages", f"at most {MAX_MESSAGES} messages")
    messages = tuple(_message(item, f"messages[{index}]") for index, item in enumerate(raw))
    max_tokens = _max_tokens(body, "max_completion_tokens")
    if max_tokens is None:
        max_tokens = _max_tokens(body, "max_tokens")
    return _ask(body, messages=messages, max_tokens=max_tokens)


def _ask(
    body: Mapping[str, Any],
    *,
    max_tokens: int | None,
    text: str | None = None,
    token_ids: tuple[int, ...] | None = None,
    messages: tuple[dict[str, str], ...] | None = None,
) -> Ask:
    for name, neutral in _UNSUPPORTED.items():
        if body.get(name) is not None and not any(_same(body[name], value) for value in neutral):
            _refuse(name, "is not supported by this engine with that value")
    stream = _boolean(body, "stream")
    return Ask(
        model=model_of(body),
        text=text,
        token_ids=token_ids,
        messages=messages,
        max_tokens=max_tokens,
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0, above=True),
        seed=_integer(body, "seed", -(2**63), 2**63 - 1),
        stop=_stop(body.get("stop")),
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream=stream),
        ignore_eos=_boolean(body, "ignore_eos"),
    )


def model_of(body: Mapping[str, Any]) -> str:
    """The model's name that the body asks for."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        _refuse("model", "must be the name of a model (see /v1/models)")
    return _text(model, "model")


def _refuse(param: str, message: str) -> NoReturn:
    raise ApiError(400, f"{param}: {message}", param=param)


def _same(value: object, neutral: object) -> bool:
    """Equal, but True is not 1 and False is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _text(value: str, param: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer and no UTF-8 can take."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        _refuse(param, "is not valid Unicode (a lone surrogate)")
    return value


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        _refuse(name, "must be true or false")
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int:
        _refuse(name, "must be an integer")
    if value < low:
        _refuse(name, f"must be at least {low}")
    if value > high:
        _refuse(name, f"must be at most {high}")
    return value


def _max_tokens(body: Mapping[str, Any], name: str) -> int | None:
    return _integer(body, name, 1, 2**31 - 1)


def _number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    low: float,
    high: float,
    *,
    above: bool = False,
) -> float:
    value = body.get(name)
    if value is None:
        return default
    # A long integer is no float at all, so only floats are asked whether they are finite.
    if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
        _refuse(name, "must be a finite number")
    if not low <= value <= high or (above and value == low):
        _refuse(name, f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}")
    return float(value)


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOP_STRINGS:
        _refuse("stop", f"must be a string or a list of at most {MAX_STOP_STRINGS} strings")
    for item in items:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_CHARS:
            _refuse("stop", f"each must be a string of 1 to {MAX_STOP_CHARS} characters")
        _text(item, "stop")
    return tuple(items)


def _include_usage(options: object, *, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        _refuse("stream_options", "must be an object")
    if not stream:
        _refuse("stream_options", "only allowed when stream is true")
    return _boolean(options, "include_usage")


def _message(item: object, where: str) -> dict[str, str]:
    if not isinstance(item, dict):
        _refuse(where, "must be an object")
    role = item.get("role")
    if role not in ROLES:
        _refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content") for part in content)
    if not isinstance(content, str):
        _refuse(f"{where}.content", "must be a string or a list of text parts")
    # Chat templates know OpenAI's newer name for it only by the old one.
    return {
        "role": "system" if role == "developer" else role,
        "content": _text(content, f"{where}.content"),
    }


def _part(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    _refuse(where, "only text parts are supported")
