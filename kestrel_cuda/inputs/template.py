"""The chat template that a checkpoint ships: found, compiled, rendered to text. Knows no token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kestrel_cuda.checkpoint.files import is_present, printable, read_text
from kestrel_cuda.checkpoint.json_file import JsonObject, read_json_if_present
from kestrel_cuda.errors import CheckpointError, InputError
from kestrel_cuda.inputs.tokenizer_files import named_tokens

# What one rendering may take: far more than a conversation needs, and about a second's work.
_MAX_STEPS = 200_000
_MAX_BITS = 4096
_MAX_REPEATED = 10_000_000


class ChatTemplate:
    """A compiled chat template. `source` names the file it is from; `warnings` are one line each."""

    def __init__(
        self, text: str, source: str, tokens: Mapping[str, str] | None = None, warnings: Sequence[str] = ()
    ) -> None:
        self.text = text
        self.source = source
        self.warnings = list(warnings)
        self._tokens = dict(tokens or {})
        self._template, self._environment = _compile(text, source)

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
        if not text.strip():
            raise CheckpointError(
                f"{directory / source} has an empty chat template ({len(text)} bytes); fetch it again"
            )
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
        self._environment.steps_left = _MAX_STEPS
        try:
            return self._template.render(
                **self._tokens, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **flags
            )
        # A template runs as Python: a conversation it was not written for fails in any way that Python can.
        except Exception as error:
            reason = _reason(error)
            raise InputError(f"the chat template ({self.source}) refuses this conversation: {reason}") from error


def _find_templates(directory: Path, tokenizer_config: JsonObject) -> dict[str, str]:
    """Every chat template by file name, the one that counts first."""
    legacy = ("processor_config.json", "chat_template.json")
    found = {name: _template_text(read_json_if_present(directory / name)) for name in legacy}
    jinja = directory / "chat_template.jinja"
    if is_present(jinja):
        try:
            found[jinja.name] = read_text(jinja)
        except UnicodeDecodeError as error:
            raise CheckpointError(f"cannot read {jinja}: {error}; fetch it again") from error
    found["tokenizer_config.json"] = _template_text(tokenizer_config)
    return {name: text for name, text in found.items() if text is not None}


def _template_text(section: JsonObject) -> str | None:
    """`chat_template` of a JSON file: a text, or a list of named ones of which "default" counts."""
    value = section.get("chat_template")
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if value is not None and not isinstance(value, str):
        raise section.wrong("chat_template", "a text, or a list of named texts")
    return value


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, whose operators and loops also end: a template is a stranger's program.

    Every round of a loop and every call of a macro counts as a step of one rendering.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.steps_left = _MAX_STEPS
        del self.globals["lipsum"]  # no template needs it, and it writes as much as it is asked for

    def step(self) -> str:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise SecurityError(f"it takes more than {_MAX_STEPS} steps")
        return ""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and _num_bits(left) * abs(right) > _MAX_BITS:
            raise SecurityError("its ** gives too large a number")
        if operator == "*" and (
            _num_bits(left) + _num_bits(right) > _MAX_BITS
            or max(_num_repeated(left, right), _num_repeated(right, left)) > _MAX_REPEATED
        ):
            raise SecurityError("its * gives too large a result")
        return super().call_binop(context, operator, left, right)


def _num_bits(operand: object) -> int:
    return operand.bit_length() if isinstance(operand, int) else 0


def _num_repeated(text: object, times: object) -> int:
    """The length of a text or list repeated."""
    return len(text) * times if isinstance(text, Sized) and isinstance(times, int) else 0


def _compile(text: str, source: str) -> tuple[Template, _Environment]:
    """The template as transformers compiles it: sandboxed, with its block rules, filter and functions."""
    environment = _Environment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        tree = environment.parse(text)
        repeated: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for block in repeated:
            step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(step, lineno=block.lineno))
        return environment.from_string(tree), environment
    except TemplateSyntaxError as error:
        where, reason = f" (line {error.lineno})", error.message or ""
    except Exception as error:  # what Jinja takes, Python may not: nesting, numbers, names
        where, reason = "", _reason(error)
    raise CheckpointError(
        f"the chat template in {source} does not compile{where}: {printable(reason, most=200)}; fetch it again"
    )


def _reason(error: Exception) -> str:
    """Why a template failed, on one line; its own message may have several."""
    if isinstance(error, RecursionError):
        return "it nests or calls itself too deeply"
    return printable(" ".join(str(error).split()) or type(error).__name__, most=500)


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
