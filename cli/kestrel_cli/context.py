"""How long a run may get: the key-value cache's slots and the new tokens that fit. Arithmetic only; loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_cli import options
from kestrel_cli.settings import Settings
from kestrel_cli.visuals import Visuals
from kestrel_cuda.errors import InputError, SettingError


@dataclass(frozen=True)
class Context:
    """`warning` says where fewer new tokens fit than were asked for."""

    num_slots: int
    max_new_tokens: int
    warning: str | None


def context_of(
    settings: Settings, num_prompt_tokens: int, max_positions: int, visuals: Visuals | None = None
) -> Context:
    """What --ctx says, else what the run needs, within the positions that the model has; `visuals` are in the prompt.

    Raises InputError when not one new token fits behind the prompt, which is never cut; SettingError when --ctx asks
    for more than the model's positions.
    """
    visuals = visuals or Visuals()
    asked, wanted = settings[options.CTX], settings[options.MAX_NEW_TOKENS]
    prompt = f"the prompt has {num_prompt_tokens} tokens"
    if visuals.num_tokens:
        prompt += f" ({visuals.num_tokens} of them for {visuals.counted})"

    def smaller(num_slots: int) -> str | None:
        """What leaves room for one new token."""
        return visuals.advice(num_slots - 1 - (num_prompt_tokens - visuals.num_tokens))

    if num_prompt_tokens >= max_positions:
        advice = smaller(min(asked or max_positions, max_positions)) or smaller(max_positions)
        raise InputError(
            f"{prompt}; with one new token that is over the {max_positions} positions this model has; "
            f"{f'{advice} would make it fit' if advice else 'shorten it'}"
        )
    if asked is not None and asked > max_positions:
        raise SettingError(f"--ctx {asked} is over the {max_positions} positions this model has; use at most that")
    if asked is not None and num_prompt_tokens >= asked:
        advice = smaller(asked)
        raise InputError(
            f"{prompt} and --ctx holds {asked}; needed: --ctx {num_prompt_tokens + 1} or more"
            f"{f', or {advice}' if advice else ''}"
        )
    num_slots = min(num_prompt_tokens + wanted, max_positions) if asked is None else asked
    room = num_slots - num_prompt_tokens
    if wanted <= room:
        return Context(num_slots, wanted, None)
    what = f"the model's {max_positions} positions" if asked is None else f"{num_slots} of context (--ctx)"
    tokens = "token" if room == 1 else "tokens"
    warning = f"at most {room} new {tokens}, not {wanted}: {what} less {num_prompt_tokens} of the prompt"
    return Context(num_slots, room, warning)
