"""What each way to store weights and cache costs: distance from float32 goldens, over all prompt positions.

The goldens are the reference implementation's (tests/data/oracle/README.md), found beside a checkpoint:
`ORACLE/checkpoints/NAME` has `ORACLE/golden/NAME/{text,raw}-*.npz`; those of pictures are left out, whose features are
not quantized. Prints one JSON object for each checkpoint, --quant and --kv; a checkpoint that has no such cache is
said on stderr and left out.

    PYTHONPATH=. python scripts/quantization_error.py [CHECKPOINT ...] [--quant q8_0] [--kv q8] [--backend cpu]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kestrel_cuda.checkpoint.files import printable
from kestrel_cuda.config import EngineConfig, KvDtype, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.errors import InternalError, KestrelError, SettingError
from scripts import arguments as kinds

ORACLE = Path(__file__).resolve().parents[1] / "tests" / "data" / "oracle"

PromptLogits = Callable[[Sequence[int]], NDArray[np.float32]]
"""Logits [S, V] of every position of a prompt of S ids."""


@dataclass(frozen=True)
class QuantizationError:
    """How far logits are from the goldens', all positions of all prompts alike. KL divergences are in nats."""

    num_positions: int
    kl_mean: float
    kl_max: float
    top1_agreement: float
    logit_difference_mean: float


@dataclass(frozen=True)
class Golden:
    """One prompt of S ids and the reference's float32 logits of its last positions, all of them unless S > 300.

    `quantized_sv` are the reference's own logits with its weights rounded (q8_0, q4_0) and nothing else, fewer rows.
    """

    prompt_ids: list[int]
    logits_sv: NDArray[np.float32]
    quantized_sv: dict[Quant, NDArray[np.float32]]


def log_softmax(logits_mv: ArrayLike) -> NDArray[np.float64]:
    """Natural logarithms of the probabilities, row by row, in float64."""
    shifted = np.asarray(logits_mv, np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    logs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


def kl_divergence(expected_mv: ArrayLike, actual_mv: ArrayLike) -> NDArray[np.float64]:
    """KL(expected || actual) in nats of every row's softmax, in float64."""
    expected, actual = log_softmax(expected_mv), log_softmax(actual_mv)
    divergences: NDArray[np.float64] = (np.exp(expected) * (expected - actual)).sum(axis=-1)
    return divergences


def compare(pairs: Iterable[tuple[ArrayLike, ArrayLike]]) -> QuantizationError:
    """Pool (golden, ours) logits of several prompts, each [S, V]; shapes must be equal and every logit finite."""
    divergences, same, differences = [], [], []
    for golden_sv, ours_sv in pairs:
        golden, ours = np.asarray(golden_sv, np.float64), np.asarray(ours_sv, np.float64)
        if golden.shape != ours.shape or not (np.isfinite(golden).all() and np.isfinite(ours).all()):
            raise ValueError(f"logits of shapes {golden.shape} and {ours.shape}, or some that are not finite")
        divergences.append(kl_divergence(golden, ours))
        same.append(golden.argmax(-1) == ours.argmax(-1))
        differences.append(np.abs(golden - ours).mean(-1))
    divergence = np.concatenate(divergences)
    return QuantizationError(
        num_positions=len(divergence),
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
        top1_agreement=float(np.concatenate(same).mean()),
        logit_difference_mean=float(np.concatenate(differences).mean()),
    )


def goldens_of(checkpoint: Path) -> list[Golden]:
    """Every prompt that the reference answered with this checkpoint; empty where there is none."""
    found = []
    folder = checkpoint.resolve().parent.parent / "golden" / checkpoint.resolve().name
    for path in sorted(path for kind in ("raw", "text") for path in folder.glob(f"{kind}-*.npz")):
        with np.load(path) as arrays:
            quantized = {quant: arrays[f"{quant}_logits"] for quant in Quant if f"{quant}_logits" in arrays}
            found.append(Golden(arrays["input_ids"].tolist(), arrays["logits"], quantized))
    return found


def measure(goldens: Sequence[Golden], prompt_logits: PromptLogits) -> QuantizationError:
    """Run every golden's prompt and compare."""
    return compare((golden.logits_sv, prompt_logits(golden.prompt_ids)[-len(golden.logits_sv) :]) for golden in goldens)


def prompt_logits_of(engine: Engine) -> PromptLogits:
    """The logits of a loaded engine."""

    def logits(prompt_ids: Sequence[int]) -> NDArray[np.float32]:
        generation = engine.generate(prompt_ids, 1, ignore_eos=True, logits="keep")
        for _ in generation:
            pass
        if generation.prompt_logits is None:
            raise InternalError("logits were asked for and not kept")
        return generation.prompt_logits

    return logits


def main() -> int:
    parser = kinds.Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoints", type=Path, nargs="*", help="[default: every one of tests/data/oracle]")
    parser.add_argument(
        "--quant", type=kinds.quant, action="append", help=f"{', '.join(Quant)}  [default: each in turn]"
    )
    parser.add_argument(
        "--kv", choices=list(KvDtype), type=KvDtype, action="append", help="[default: what --quant has]"
    )
    parser.add_argument("--backend", choices=["auto", "cuda", "cpu"], default="auto")
    arguments = parser.parse_args()
    checkpoints = arguments.checkpoints or sorted((ORACLE / "checkpoints").iterdir())
    for checkpoint in checkpoints:
        try:
            goldens = goldens_of(checkpoint)
        except (OSError, ValueError, KeyError, BadZipFile) as damage:
            parser.error(f"the goldens of {printable(str(checkpoint))} cannot be read ({damage}); fetch them again")
        if not goldens:
            if arguments.checkpoints:
                name = printable(checkpoint.resolve().name)
                parser.error(f"{printable(str(checkpoint))} has no goldens: ../../golden/{name}/{{text,raw}}-*.npz")
            continue
        for quant, kv in product(arguments.quant or list(Quant), arguments.kv or [None]):
            config = EngineConfig(model=checkpoint, backend=arguments.backend, quant=quant, kv=kv)
            try:
                engine = Engine.open(config)
                load = engine.load(max(len(golden.prompt_ids) for golden in goldens) + 1)
            except KestrelError as refusal:
                print(f"{checkpoint.name}: {refusal}", file=sys.stderr)
                if isinstance(refusal, SettingError):
                    continue
                return 2
            error = measure(goldens, prompt_logits_of(engine))
            engine.close()
            said = {"checkpoint": checkpoint.name, "quant": str(quant), "kv": str(config.kv_dtype)}
            print(json.dumps({**said, "device": load.device, **asdict(error)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
