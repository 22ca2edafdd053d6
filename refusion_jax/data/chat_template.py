"""Chat templates: Jinja programs that come with a tokenizer, run in a sandbox as `transformers` runs them."""

import datetime
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from refusion_jax.data.examples import DataError

_MOST_CHARACTERS = 10_000_000
_MOST_NUMBER = 100_000_000
_MOST_STEPS = 1_000_000
_MOST_INDENT = 1_000
# A width of five digits or more in a format, of either kind.
_WIDE = re.compile(r"%[^a-zA-Z%]*\d{5}|\{[^}]*\d{5}[^}]*\}")


def render_template(source: str, variables: Mapping[str, Any], place: str) -> str:
    """Returns what a template makes of its variables.

    Args:
      source: the template, which nobody need trust: it can reach its variables alone, and change nothing.
      variables: plain JSON by name.
      place: the file it is from, for messages.

    Raises:
      DataError: for a template that is wrong or refuses the variables, with its own message, or without Jinja.
    """
    try:
        template, pieces, size = _compile(source), [], 0
        for piece in template.generate(**variables, range=_limited_range()):
            pieces.append(piece)
            size += len(piece)
            if size > _MOST_CHARACTERS:
                raise ValueError(f"it writes more than {_MOST_CHARACTERS:,} characters")
        text = "".join(pieces)
        text.encode()
    except ImportError:
        raise DataError(f"{place}: a chat template needs Jinja; pip install refusion_jax[hf].") from None
    except Exception as error:  # whatever a template does wrong
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        reason = reason if reason.endswith("..") else reason.removesuffix(".")
        raise DataError(f"{place}: the chat template cannot write this conversation ({reason}).") from None
    return text


def _limited_range() -> Any:
    """`range` for one rendering, all loops together of so many steps."""
    left = _MOST_STEPS

    def limited(*arguments: int) -> range:
        nonlocal left
        steps = range(*arguments)
        left -= len(steps) + 1
        if left < 0:
            raise ValueError(f"its loops have more than {_MOST_STEPS:,} steps")
        return steps

    return limited


@functools.lru_cache(8)
def _compile(source: str) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses what a few characters of a template could make gigabytes of."""

        intercepted_binops = frozenset(("*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(value) if isinstance(value, str | list | tuple) else value for value in (left, right)]
            too_much = (
                (operator == "*" and sizes != [left, right] and sizes[0] * sizes[1] > _MOST_CHARACTERS)
                or (operator == "**" and isinstance(right, int) and right > 64)
                or (operator == "%" and isinstance(left, str) and _WIDE.search(left))
            )
            if too_much:
                raise SecurityError(f"{operator} makes too much")
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
            if any(isinstance(value, int) and value > _MOST_NUMBER for value in (*arguments, *named.values())):
                raise SecurityError("a call has too large a number")
            text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
            if isinstance(text, str) and function.__name__.startswith("format") and _WIDE.search(text):
                raise SecurityError("a format is too wide")
            return super().call(context, function, *arguments, **named)

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words; they are known here without."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str = "it refuses the conversation") -> None:
        raise jinja2.TemplateError(message)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    for name in ("center", "slice", "batch"):  # no conversation needs them, and they take any width
        del environment.filters[name]
    environment.filters["indent"] = _indent
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _indent(text: str, width: int | str = 4, *options: bool, **named: bool) -> str:
    from jinja2.filters import do_indent

    if isinstance(width, int) and width > _MOST_INDENT:
        raise ValueError(f"indent is {width}, more than {_MOST_INDENT}")
    return do_indent(text, width, *options, **named)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
