"""Chat templates: Jinja text that comes with a model, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template does not take these messages, or is no template; the text is for the client."""


class ChatTemplate:
    """Renders messages into the text that the model was trained on.

    The environment is the one that published templates expect: trimmed blocks,
    loop controls, `raise_exception`, `strftime_now` and a plain `tojson`.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt, open for the assistant's answer. Raises ChatTemplateError."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._special
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatTemplateError(
                f"the model's chat template refuses these messages: {error}"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)
