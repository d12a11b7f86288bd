"""Variables with this program's prefix that it does not read: which, and what does what they seem to be meant for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kestrel_cli.settings import Setting

PREFIX = "KESTREL_CUDA_"


def stray_variables(known: Iterable[Setting[Any]], variables: Mapping[str, str]) -> list[str]:
    """One line for each variable that is set and read by no command."""
    settings = list(known)
    read = {setting.variable for setting in settings}
    named = {f"{PREFIX}{setting.name.upper()}": setting for setting in settings if setting.is_option}
    strays = sorted(
        name for name, text in variables.items() if name.startswith(PREFIX) and name not in read and text.strip()
    )
    return [f"{name} is not read; {_instead(name, named, read)}" for name in strays]


def _instead(name: str, named: Mapping[str, Setting[Any]], read: Iterable[str | None]) -> str:
    setting = named.get(name)
    if setting is not None:
        if setting.variable is None:
            return f"there is only the flag {setting.flag}"
        return f"the variable of {setting.flag} is {setting.variable}"
    # A search worth its import only where something is wrong.
    from difflib import get_close_matches

    # The prefix alone makes any two of them alike.
    names = [variable.removeprefix(PREFIX) for variable in read if variable and variable.startswith(PREFIX)]
    close = get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=0.7)
    return f"did you mean {PREFIX}{close[0]}?" if close else "no option has that name"
