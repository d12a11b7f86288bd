"""The chat template that a checkpoint ships: found, compiled, rendered to text. Knows no token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kestrel_cuda.checkpoint.json_file import JsonObject, read_json_if_present
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.inputs.tokenizer_files import named_tokens


class ChatTemplate:
    """A compiled chat template. `source` names the file it is from; `warnings` are one line each."""

    def __init__(
        self, text: str, source: str, tokens: Mapping[str, str] | None = None, warnings: Sequence[str] = ()
    ) -> None:
        self.text = text
        self.source = source
        self.warnings = list(warnings)
        self._tokens = dict(tokens or {})
        self._template = _compile(text, source)

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """The template of the checkpoint in `directory`, None when it ships none.

        The order is that of transformers' processor: processor_config.json, chat_template.json,
        chat_template.jinja, and then the tokenizer's tokenizer_config.json; when they differ, that is a warning.
        Raises CheckpointError when a file is damaged or the template does not compile.
        """
        tokenizer_config = read_json_if_present(directory / "tokenizer_config.json")
        found = _find_templates(directory, tokenizer_config)
        if not found:
            return None
        source, text = next(iter(found.items()))
        others = [name for name, other in found.items() if other != text]
        warnings = [f"chat templates differ: {source} is used, {', '.join(others)} is not"] if others else []
        return cls(text, source, named_tokens(tokenizer_config), warnings)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[object] | None = None,
        **flags: object,
    ) -> str:
        """The conversation as text. Raises InputError when the template refuses it."""
        try:
            return self._template.render(
                **self._tokens, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **flags
            )
        # A template runs as Python: a conversation it was not written for fails as Python does.
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())  # a template's own message may have several lines
            raise InputError(f"the chat template ({self.source}) refuses this conversation: {reason}") from error


def _find_templates(directory: Path, tokenizer_config: JsonObject) -> dict[str, str]:
    """Every chat template by file name, the one that counts first."""
    legacy = ("processor_config.json", "chat_template.json")
    found = {name: _template_text(read_json_if_present(directory / name)) for name in legacy}
    jinja = directory / "chat_template.jinja"
    if jinja.exists():
        try:
            found[jinja.name] = jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {jinja}: {error}; fetch it again") from error
    found["tokenizer_config.json"] = _template_text(tokenizer_config)
    return {name: text for name, text in found.items() if text is not None}


def _template_text(section: JsonObject) -> str | None:
    """`chat_template` of a JSON file: a text, or a list of named ones of which "default" counts."""
    value = section.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise section.wrong("chat_template", "a text, or a list of named texts")
    return value


def _compile(text: str, source: str) -> Template:
    """The template as transformers compiles it: sandboxed, with its block rules, filter and functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template in {source} does not compile (line {error.lineno}): {error.message}"
        ) from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own: keeps the order of keys, non-ASCII characters, and `<`, `>`, `&` as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by this name
    return datetime.now().strftime(format)
