"""What a client may ask for: OpenAI's request bodies, checked field by field.

Everything here comes from strangers. A body that is not right ends in an
`ApiError` with the status, the text and the parameter that the client needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

_MAX_MESSAGES = 4096
_MAX_STOP_STRINGS = 4
_ROLES = ("system", "developer", "user", "assistant", "tool")


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
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


class Messages(tuple[dict[str, str], ...]):
    """A conversation: role and content each."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """One checked request."""

    model: str
    prompt: str | tuple[int, ...] | Messages  # text, token ids, or a conversation
    max_tokens: int | None  # None: up to the end of the context (chat only)
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool  # an extension that load generators send


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body; strict: UTF-8 only, no NaN, no infinity."""

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


def parse_ask(body: Mapping[str, Any], *, chat: bool, vocab_size: int) -> Ask:
    """`chat`: the body is meant for /v1/chat/completions, else for /v1/completions."""
    if chat:
        prompt = _field(body, "messages", _messages)
        older = _field(body, "max_tokens", _max_tokens, None)
        max_tokens = _field(body, "max_completion_tokens", _max_tokens, older)
    else:
        prompt = _field(body, "prompt", partial(_prompt, vocab_size))
        max_tokens = _field(body, "max_tokens", _max_tokens, 16)
    for name, neutral in _UNSUPPORTED.items():
        _field(body, name, partial(_neutral, neutral), None)
    options = {name: _field(body, name, *rest) for name, rest in _OPTIONS.items()}
    include_usage = options.pop("stream_options")
    if include_usage is not None and not options["stream"]:
        raise _refusal("stream_options", "only allowed when stream is true")
    return Ask(prompt=prompt, max_tokens=max_tokens, include_usage=bool(include_usage), **options)


# How one value is checked: the function gives back what is meant, or raises
# ValueError with what it must be.
_Check = Callable[[Any], Any]
_REQUIRED = object()


def _field(body: Mapping[str, Any], name: str, check: _Check, default: Any = _REQUIRED) -> Any:
    """null is absent, as OpenAI has it."""
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    try:
        return check(value)
    except ValueError as error:
        raise _refusal(name, str(error)) from None


def _refusal(name: str, message: str) -> ApiError:
    return ApiError(400, f"{name}: {message}", param=name)


def _need(right: bool, what: str) -> None:
    if not right:
        raise ValueError(what)


def _text(value: Any, most_chars: int = 1024) -> str:
    _need(isinstance(value, str), "must be a string")
    _need(0 < len(value) <= most_chars, f"must have 1 to {most_chars} characters")
    return _unicode(value)


def _unicode(value: str) -> str:
    # JSON can spell half a surrogate pair, which no tokenizer can take.
    value.encode("utf-8")
    return value


def _boolean(value: Any) -> Any:
    _need(isinstance(value, bool), "must be true or false")
    return value


def _number(value: Any, low: float, high: float) -> float:
    _need(type(value) in (int, float), "must be a number")  # isinstance would let True in
    _need(low <= value <= high, f"must be at least {low} and at most {high}")  # NaN is not
    return float(value)


def _top_p(value: Any) -> float:
    _need(value != 0, "must be above 0")
    return _number(value, 0, 1)


def _integer(value: Any, low: int, high: int) -> int:
    _need(type(value) is int, "must be an integer")
    _need(low <= value <= high, f"must be at least {low} and at most {high}")
    return int(value)


def _max_tokens(value: Any) -> int:
    return _integer(value, 1, 2**31 - 1)


def _stop(value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    _need(len(items) <= _MAX_STOP_STRINGS, f"at most {_MAX_STOP_STRINGS} strings")
    return tuple(map(_text, items))


def _include_usage(value: Any) -> Any:
    _need(isinstance(value, dict), "must be an object")
    return _boolean(value.get("include_usage") or False)


def _neutral(neutral: tuple[object, ...], value: Any) -> None:
    # True is not 1 here, and False not 0.
    same = (isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)
    _need(any(same), "is not supported by this engine with that value")


def _prompt(vocab_size: int, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        _need(len(value) == 1, "one prompt a request: send several requests instead")
        value = value[0]
    if isinstance(value, str):
        return _unicode(value)
    whole = isinstance(value, list) and len(value) > 0
    _need(whole, "must be a string or a non-empty list of token ids")
    return tuple(_integer(item, 0, vocab_size - 1) for item in value)


def _messages(value: Any) -> Messages:
    whole = isinstance(value, list) and 0 < len(value) <= _MAX_MESSAGES
    _need(whole, f"must be a list of 1 to {_MAX_MESSAGES} messages")
    return Messages(map(_message, value))


def _message(item: Any) -> dict[str, str]:
    _need(isinstance(item, dict), "each must be an object")
    role, content = item.get("role"), item.get("content")
    _need(role in _ROLES, f"each role must be one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        content = "".join(map(_part, content))
    _need(isinstance(content, str), "each content must be a string or a list of text parts")
    # Chat templates know OpenAI's newer name for it only by the old one.
    return {"role": "system" if role == "developer" else role, "content": _unicode(content)}


def _part(part: Any) -> str:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    _need(is_text and isinstance(part.get("text"), str), "only text parts are supported")
    return str(part["text"])


_OPTIONS: dict[str, tuple[_Check, Any] | tuple[_Check]] = {
    "model": (_text,),
    "temperature": (partial(_number, low=0, high=2), 1.0),
    "top_p": (_top_p, 1.0),
    "seed": (partial(_integer, low=-(2**63), high=2**63 - 1), None),
    "stop": (_stop, ()),
    "stream": (_boolean, False),
    "stream_options": (_include_usage, None),
    "ignore_eos": (_boolean, False),
}

# Fields that would change the answer and that this engine does not have, with
# the values that ask for nothing. Ignoring the rest would be a silent lie.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("echo", "logprobs"), (False,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    "top_logprobs": (0,),
    "top_k": (0, -1),
    "suffix": ("",),
    "logit_bias": ({},),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
