"""Chat templates: Jinja programs that come with a tokenizer, run in a sandbox as `transformers` runs them."""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

from refusion_jax.data.examples import DataError


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
        text = _compile(source).render(**variables)
        text.encode()
    except ImportError:
        raise DataError(f"{place}: a chat template needs Jinja; pip install refusion_jax[hf].") from None
    except Exception as error:  # whatever a template does wrong
        reason = " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__
        raise DataError(f"{place}: the chat template cannot write this conversation ({reason}).") from None
    return text


@functools.lru_cache(8)
def _compile(source: str) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words; they are known here without."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
