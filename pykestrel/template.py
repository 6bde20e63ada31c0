"""Chat templates, rendered as the transformers library renders them.

A template is a program that came with a checkpoint: it runs in jinja2's immutable sandbox and is
given plain data only. Sources, first found wins: the file the user names, chat_template.jinja,
`chat_template` in tokenizer_config.json (a string, or a list of named ones), chat_template.json.
Where there is one named "tool_use", it takes over as soon as there are tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pykestrel._errors import FileError, FormatError, InvalidArgument, TemplateError
from pykestrel._guard import Guard, Rendered, plain_data
from pykestrel.checkpoint import read_json_if_there

Message = Mapping[str, Any]

# One field under three names; templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TOKEN_VARIABLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the jinja2 text.
        origin: where it came from, for messages.
        variables: names the template may use in every rendering (bos_token and so on).
    """

    def __init__(
        self, source: str, *, origin: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self.origin = origin
        self.variables = dict(variables or {})
        self.tool_use: ChatTemplate | None = None  # takes over where there are tools
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{origin}: line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise TemplateError(f"{origin}: nested too deeply") from error

    @classmethod
    def load(
        cls, directory: Path, *, file: Path | None = None, name: str = "default"
    ) -> ChatTemplate:
        """The template of a checkpoint directory, or of `file` if one is named.

        Raises:
            TemplateError: there is none, or none of that name, or it does not compile.
        """
        config_path = directory / "tokenizer_config.json"
        config = read_json_if_there(config_path)
        variables = _token_variables(config)
        if file is not None:
            return cls(_read_text(file), origin=str(file), variables=variables)
        origin, named = _templates(directory, config)
        if name not in named:
            raise TemplateError(f"{origin}: no chat template {name!r} among {', '.join(named)}")
        template = cls(named[name], origin=str(origin), variables=variables)
        if "tool_use" in named and name == "default":
            template.tool_use = cls(named["tool_use"], origin=str(origin), variables=variables)
        return template

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        guard: Guard | None = None,
        **variables: Any,
    ) -> Rendered:
        """The prompt for a conversation.

        Args:
            messages: dicts with "role" and "content". Keys whose value is None are dropped.
            tools: JSON schemas of the functions the model may call.
            add_generation_prompt: end with the opening of the assistant's turn.
            guard: marks control tokens in the input; None trusts it.
            variables: template variables such as enable_thinking.
        """
        if tools and self.tool_use is not None:
            return self.tool_use.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                guard=guard,
                **variables,
            )
        try:
            plain = _plain_messages(messages)
            rest = plain_data({"tools": list(tools) if tools else None, **variables}, "a variable")
        except RecursionError as error:
            raise InvalidArgument("the messages are nested too deeply") from error
        plain, rest, mark = (guard or Guard(())).mark(plain, rest)
        context = {"documents": None, **self.variables, **rest}
        try:
            text = self._template.render(
                messages=plain, add_generation_prompt=add_generation_prompt, **context
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"{self.origin}: {error.message or error}") from error
        except RecursionError as error:
            raise TemplateError(f"{self.origin}: recursion without end") from error
        except Exception as error:  # a template can raise anything Python can: 1/0, None + "a"
            raise TemplateError(f"{self.origin}: {type(error).__name__}: {error}") from error
        return Rendered(text, mark)


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgument(f"message {i} must be a dict with a role")
        known = {key: value for key, value in message.items() if value is not None}
        copy: dict[str, Any] = plain_data(known, f"message {i}")
        reasoning = next((copy[name] for name in _REASONING if name in copy), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy}
            copy["reasoning_content"] = reasoning
        plain.append(copy)
    return plain


def _templates(directory: Path, config: dict[str, Any]) -> tuple[Path, dict[str, str]]:
    """Where the templates of a checkpoint are, and all of them by name."""
    jinja_path = directory / "chat_template.jinja"
    if jinja_path.exists():
        more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        named = {path.stem: _read_text(path) for path in more}
        return jinja_path, {"default": _read_text(jinja_path), **named}
    config_path, json_path = directory / "tokenizer_config.json", directory / "chat_template.json"
    for path, found in (
        (config_path, config.get("chat_template")),
        (json_path, read_json_if_there(json_path).get("chat_template")),
    ):
        if found is not None:
            return path, _named(path, found)
    raise TemplateError(f"{directory}: this checkpoint has no chat template")


def _named(path: Path, found: Any) -> dict[str, str]:
    if isinstance(found, str):
        return {"default": found}
    try:
        named = {entry["name"]: entry["template"] for entry in found}
    except (TypeError, KeyError) as error:
        raise FormatError(f"{path}: chat_template must be text or a list of named ones") from error
    if not all(isinstance(text, str) for text in (*named, *named.values())):
        raise FormatError(f"{path}: chat_template has a name or a template that is not text")
    return named


def _token_variables(config: dict[str, Any]) -> dict[str, str]:
    variables = {}
    for name in _TOKEN_VARIABLES:
        value = config.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            variables[name] = value
    return variables


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 (byte {error.start})") from error


# -- the environment -----------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's text for training: renders it."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as transformers has it: what is set inside stays inside.
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """As jinja2's, without names that begin with an underscore."""

    def __init__(self, **attributes: Any) -> None:
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(**attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own tojson escapes HTML characters, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> jinja2.Environment:
    version = tuple(int(n) for n in jinja2.__version__.split(".")[:3] if n.isdigit())
    if version < (3, 1, 6):
        raise TemplateError(
            f"jinja2 {jinja2.__version__} lets templates out of its sandbox; 3.1.6 is needed"
        )
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment
