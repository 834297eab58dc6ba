"""A model's chat template, rendered in a sandbox, as the template comes with the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stepscope.errors import StepscopeError


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], **tokens: str) -> str:
    """The conversation as text, with the prompt for the model's answer at its end.

    The environment is the one that templates are written for: blocks trimmed, `break` and
    `continue`, raise_exception, strftime_now and a tojson that leaves text unescaped (Hugging Face,
    "Chat templates"). Raises StepscopeError if the template is broken or refuses the messages.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **tokens
        )
    except (TemplateError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).rstrip(".")
        raise StepscopeError(
            f"The model's chat template fails on these messages ({reason}); send raw text instead."
        ) from None


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
