"""The command line's words: one Typer type for each flag, shared by the commands. Values stay text here.

Text, so that a flag, a variable and a profile are read by the same parser and refused in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from kestrel_cli.output import Output
from kestrel_cli.settings import Raw

Given = Mapping[str, Raw]

VISUAL_ORDER = "visual_order"
"""Where a parsed command line keeps which of --image and --video came when."""

PROMPT_HELP = (
    "What to ask, in quotes where it has blanks. - reads standard input, be it empty; without PROMPT standard input is "
    "read when it is no terminal, and where that is empty a built-in question is asked."
)
Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help=PROMPT_HELP)]
PromptFile = Annotated[str | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a file.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")]
Messages = Annotated[
    str | None,
    typer.Option(
        "--messages",
        metavar="FILE",
        help=(
            "A conversation as JSON: a list of {role, content}, or an object with messages; content is text, or a "
            'list of {"type": "text", "text": ...}, {"type": "image", "image": PATH} and {"type": "video", "video": '
            'PATH or [PATH, ...], "fps": N}, paths starting from the file\'s folder. - reads standard input.'
        ),
    ),
]
Image = Annotated[
    list[str] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="A picture, put before the text; again for more. Pictures and videos stay in the order given.",
    ),
]
Video = Annotated[
    list[str] | None,
    typer.Option(
        "--video",
        metavar="FILE|DIR",
        help="A video, put before the text: a file (needs PyAV), or a folder of frames, of which none is left out.",
    ),
]
InspectedVideo = Annotated[
    list[str] | None,
    typer.Option("--video", metavar="FILE|DIR", help="A video: a file (needs PyAV), or a folder of frames."),
]
Fps = Annotated[
    str | None,
    typer.Option(
        "--fps",
        metavar="N",
        help="Frames a second: to take of a video file, or what a folder of frames has.  [default: the checkpoint's]",
    ),
]
RawSwitch = Annotated[
    bool,
    typer.Option(
        "--raw", help="Take the prompt as it is, without the chat template; <|image_pad|> in it stands for a picture."
    ),
]
Ids = Annotated[str | None, typer.Option("--ids", metavar="1,2,3", help="The prompt as token ids.")]
MaxNewTokens = Annotated[
    str | None, typer.Option("--max-new-tokens", "-n", metavar="N", help="Tokens to generate at most.  [default: 256]")
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        help="Go on after an end token.  [default: no-ignore-eos]",
        show_default=False,
    ),
]
Logits = Annotated[
    str | None,
    typer.Option(
        "--logits",
        metavar="FILE.npz",
        help="Save prompt_logits [S,V] and step_logits [n,V] in float32; a link is followed.",
    ),
]
Expect = Annotated[
    str | None,
    typer.Option("--expect", metavar="1,2,3", help="Token ids the answer must begin with; exit code 1 if it does not."),
]
Table = Annotated[
    str | None,
    typer.Option("--table", metavar="last|all|none", help="Rows of the per-token table; last is 32.  [default: last]"),
]

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="DIR", help="The checkpoint's folder.  [default: the small embedded one]"),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help="Settings from a .toml file, or a shipped one by name: default, low-vram, qwen3-vl-2b-int8, "
        "qwen3-vl-8b-int4; none of these names a model.",
    ),
]
Backend = Annotated[
    str | None, typer.Option("--backend", metavar="auto|cuda|cpu", help="Where to compute.  [default: auto]")
]
Device = Annotated[str | None, typer.Option("--device", metavar="N", help="Which GPU.  [default: 0]")]
Quant = Annotated[
    str | None,
    typer.Option(
        "--quant",
        metavar="q8_0|q4_0|g256|none",
        help="How the linears are stored: 8 or 4 bits in groups of 32, 8 bits in groups of 256, or as in the file and "
        "computed in float32.  [default: q8_0]",
    ),
]
Kv = Annotated[
    str | None,
    typer.Option(
        "--kv",
        metavar="f16|f32|q8",
        help="Entries of the key-value cache. q8, int8 with a scale for 32, takes 53 % of f16's bytes and costs about "
        "0.01 nats (mean KL divergence, random test weights; q8_0 weights cost 0.07).  [default: f32 with --quant "
        "none, else f16]",
    ),
]
Ctx = Annotated[
    str | None,
    typer.Option(
        "--ctx", "-c", metavar="N", help="Tokens the key-value cache holds.  [default: prompt and new tokens]"
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        "--keep",
        metavar="N|auto|off",
        help="Layers kept on the device: N, off (or 0) for all, auto for all or the most that fit beside those that "
        "are fetched ahead and long passes over the prompt.  [default: auto]",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="past-only|pinned|both-sides",
        help="Which layers the window lets go of. Peak in layers with --keep N and --prefetch D: past-only 2N+D, "
        "pinned N+1+D; both-sides N+D, but it uploads every layer for every token.  [default: pinned]",
    ),
]
Prefetch = Annotated[
    str | None, typer.Option("--prefetch", metavar="N", help="Layers fetched ahead; 0 = off.  [default: 2]")
]
Evict = Annotated[
    str | None,
    typer.Option(
        "--evict",
        metavar="pool|free",
        help="Keep evicted buffers for reuse, or free them, to see its cost.  [default: pool]",
    ),
]
Lazy = Annotated[
    bool | None,
    typer.Option(
        "--lazy/--no-lazy",
        help="Upload weights when first needed, not before the first token.  [default: no-lazy]",
        show_default=False,
    ),
]
KeepTower = Annotated[
    bool | None,
    typer.Option(
        "--keep-tower/--no-keep-tower",
        help="Leave the vision tower on the device after pictures are encoded; the plan then counts it. A run encodes "
        "once, so this shows what it costs.  [default: no-keep-tower]",
        show_default=False,
    ),
]
StripCache = Annotated[
    str | None,
    typer.Option(
        "--strip-cache",
        metavar="DIR",
        help="Save the packed weights there and find them the next time.  [default: none]",
    ),
]
HostKeep = Annotated[
    str | None,
    typer.Option(
        "--host-keep",
        metavar="N",
        help="Under a window, layers held in host memory; the others are read from the strip cache.  [default: all]",
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        "--vram", metavar="SIZE", help="Device memory to use at most.  [default: what is free, less a margin]"
    ),
]
CacheBudget = Annotated[
    str | None,
    typer.Option("--cache-budget", metavar="seeds|SIZE", help="Device memory for weights.  [default: what is left]"),
]
PrefillChunk = Annotated[
    str | None,
    typer.Option(
        "--prefill-chunk",
        metavar="N",
        help="Prompt tokens computed at a time; on the CPU, and there alone, logits differ by roundings with it.  "
        "[default: what fits, up to 2048, in a window 5632; on the CPU 512]",
    ),
]

Files = Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Picture files.")]
MinPixels = Annotated[
    str | None,
    typer.Option("--min-pixels", metavar="N", help="Smaller pictures are enlarged to it.  [default: the checkpoint's]"),
]
MaxPixels = Annotated[
    str | None,
    typer.Option(
        "--max-pixels",
        metavar="N",
        help="Larger pictures are reduced to it; videos keep to the checkpoint's own.  [default: the checkpoint's]",
    ),
]
ImageTokens = Annotated[
    str | None,
    typer.Option("--image-tokens", metavar="N", help="--max-pixels in tokens, of 1024 pixels each in released models."),
]

SweepKeep = Annotated[
    bool, typer.Option("--sweep-keep", help="Measure many windows, from everything resident down to one layer.")
]
Keeps = Annotated[
    str | None,
    typer.Option("--keeps", metavar="off,27,1", help="The windows of a sweep.  [default: off and several down to 1]"),
]
Policies = Annotated[
    str | None,
    typer.Option("--policies", metavar="LIST", help="Sweep over several policies: past-only,pinned,both-sides."),
]
Evicts = Annotated[
    str | None, typer.Option("--evicts", metavar="LIST", help="Sweep over both ways to evict: pool,free.")
]
PromptTokens = Annotated[
    str | None, typer.Option("--prompt-tokens", metavar="N", help="Tokens of the prompt.  [default: 16]")
]
NewTokens = Annotated[
    str | None, typer.Option("--new-tokens", "-n", metavar="N", help="Tokens a round, 4 or more.  [default: 24]")
]
Rounds = Annotated[
    str | None, typer.Option("--rounds", metavar="N", help="How often each window is measured.  [default: 5]")
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Nothing on standard error but errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="A traceback where the fault is this program's.")]


@dataclass(frozen=True)
class Invocation:
    """A parsed command line. Typer stops here: `work(given, variables, output)` runs outside it, since Typer would
    turn signals and closed pipes into exit codes of its own."""

    work: Callable[[Given, Mapping[str, str], Output], None]
    given: Given


def given(params: Mapping[str, object], order: Sequence[str] = ()) -> Given:
    """What was on the command line: the texts, the switches that were turned, and nothing that was left alone.

    `order` names the options that may be repeated, one entry for each time.
    """
    negatable = ("lazy", "ignore_eos", "keep_tower")
    found: dict[str, Raw] = {VISUAL_ORDER: tuple(order)} if order else {}
    for name, value in params.items():
        if isinstance(value, str) or value is True or (value is False and name in negatable):
            found[name] = value
        elif isinstance(value, list | tuple) and value:
            found[name] = tuple(map(str, value))
    return found
