"""Chat templates: untrusted Jinja text from a checkpoint, rendered in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes, parser


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Render messages, each with a `role` and mostly a `content`, with the variables that templates expect.

    The environment is the one transformers gives a template. Raises ValueError if the template is no Jinja, refuses the
    messages, or reaches for what the sandbox forbids.
    """
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"messages holds {message!r}; taken: mappings with a 'role' and a 'content'")
    try:
        return _compile(template).render(messages=messages, **variables)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training masks; here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Template variables that can be set; names with a leading underscore, which Python looks up itself, can't."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        namespace, *rest = args
        jinja2.utils.Namespace.__init__(namespace)
        for name, value in dict(*rest, **kwargs).items():
            namespace[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    return environment.from_string(template)
