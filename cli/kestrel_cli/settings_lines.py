"""The settings of a command as lines for people: what somebody chose first, then what nobody did. Writes nothing."""

from __future__ import annotations

from kestrel_cli.options import MODEL
from kestrel_cli.settings import Settings


def settings_lines(settings: Settings) -> list[str]:
    """One line a source; the defaults last, those that are off or unset by name alone."""
    chosen: dict[str, list[str]] = {}
    defaults: dict[str, list[str]] = {"default": [], "off": [], "unset": []}
    for name, setting in settings.as_json().items():
        value, source = setting["value"], str(setting["source"])
        if source != "default":
            chosen.setdefault(source, []).append(f"{name}={_words(value)}")
        elif value is None:
            defaults["unset"].append(name)
        elif value is False:
            defaults["off"].append(name)
        elif name == MODEL.name:
            defaults["default"].append(f"{name}=({MODEL.default.name}, embedded)")
        else:
            defaults["default"].append(f"{name}={_words(value)}")
    sources = [f"{source}: {' '.join(words)}" for source, words in chosen.items()]
    return [*sources, "; ".join(f"{kind}: {' '.join(words)}" for kind, words in defaults.items() if words)]


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "unset" if value is None else str(value)
