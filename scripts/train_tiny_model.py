"""Train the embedded model on generated pictures and texts, in runs that add up, and export it.

Needs PyTorch and transformers, which this project does not install, and one GPU (it runs on a CPU too, slowly). Stops
by itself after --minutes or at --total-steps, whichever comes first, and leaves a state in --out; started again with
the same --out, or with --resume naming an earlier folder, it goes on where it stopped. Prints JSON lines.

    PYTHONPATH=. python scripts/train_tiny_model.py --out runs/tiny --minutes 8
    PYTHONPATH=. python scripts/train_tiny_model.py --out runs/tiny --minutes 0 --export runs/tiny-export
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import arguments as kinds
from scripts.tiny_model import state
from scripts.tiny_model.batches import BatchStream, RowEncoder, collate
from scripts.tiny_model.checkpoint import MODEL, MOST_BYTES, write_checkpoint
from scripts.tiny_model.network import (
    PLAIN,
    Arrays,
    answer_logits,
    build,
    compiled_steps,
    largest_difference,
    missing_packages,
    to_tensors,
)
from scripts.tiny_model.optimizer import Optimizer
from scripts.tiny_model.split import Split
from scripts.tiny_model.stream import SHARES, item

HELD_OUT_SEED = 10_000
"""Added to the seed for held-out items; their contents differ from those of training whatever the seed."""
WARM_UP_STEPS = 400
DECAY_SHARE = 0.3
"""The last part of the steps, in which the rate falls to nothing; until then --total-steps may still be changed."""
ADAM_SHARE = 0.1
"""AdamW's rate, which embeddings and norms have, of Muon's."""
_CHECKED_ROWS = 24
_MOST_SECONDS_A_BATCH = 60


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: a ramp, a plain, and a straight fall to zero."""

    peak: float
    total_steps: int

    def rate(self, step: int) -> float:
        fall = max(1.0, DECAY_SHARE * self.total_steps)
        return self.peak * min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, (self.total_steps - step) / fall))


class DivergedError(Exception):
    """Training that leads nowhere; the message says what to do."""


class TensorStream:
    """A BatchStream for a DataLoader, whose processes ask for batches by their first item."""

    def __init__(self, seed: int, size: int) -> None:
        self._stream = BatchStream(seed, Split.TRAIN, size)

    def __getitem__(self, first: int) -> Arrays:
        return to_tensors(self._stream.batch(first))


def batches(seed: int, size: int, firsts: range, num_workers: int, device: str) -> Iterator[Arrays]:
    """The batches on the device that begin at each of `firsts`, made ahead of time in other processes."""
    from torch.utils.data import DataLoader

    on_gpu = device == "cuda"
    loader = DataLoader(
        TensorStream(seed, size),
        batch_size=None,
        sampler=firsts,
        num_workers=num_workers,
        prefetch_factor=2 if num_workers else None,
        pin_memory=on_gpu,
        timeout=_MOST_SECONDS_A_BATCH if num_workers else 0,
    )
    for arrays in loader:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in arrays.items()}


class Trainer:
    """A network with its optimizer on one device."""

    def __init__(self, seed: int, batch_size: int, compiled: bool) -> None:
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.seed, self.batch_size, self.step, self.num_items = seed, batch_size, 0, 0
        torch.backends.cuda.matmul.allow_tf32 = True
        self.network = build(MODEL, seed).to(self.device)
        self.optimizer = Optimizer(self.network.named_parameters(), self.device == "cuda")
        self._held_out: list[Arrays] = []
        self._steps = compiled_steps() if compiled else PLAIN

    def resume(self, folder: Path) -> None:
        """Take over a state. Raises StateError for one of another seed."""
        progress = state.load(folder, self.network, self.optimizer)
        if progress.seed != self.seed:
            raise state.StateError(f"{folder} was trained with --seed {progress.seed}; give the same, or another --out")
        self.step, self.num_items = progress.step, progress.num_items

    def save(self, folder: Path) -> None:
        state.save(folder, self.network, self.optimizer, state.Progress(self.step, self.seed, self.num_items))

    def _autocast(self) -> Any:
        """bfloat16 products on a GPU; a CPU is quicker in float32."""
        import torch

        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def train_step(self, arrays: Arrays, rate: float) -> Any:
        """One step at Muon's rate; returns the loss, still on the device."""
        import torch
        from torch.nn import functional

        with self._autocast():
            logits = answer_logits(self.network, arrays, self._steps)
        loss = functional.cross_entropy(logits, arrays["targets_a"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step(rate, ADAM_SHARE * rate)
        self.step += 1
        self.num_items += self.batch_size
        return loss.detach()

    def held_out(self, num_items: int) -> dict[str, float]:
        """Share of held-out items of each task whose whole answer has the highest logits, id by id.

        An answer of which every id is the best one after those before it is the one that greedy decoding writes.
        """
        import torch

        tasks, right = list(SHARES), []
        if not self._held_out:
            encoder, seed = RowEncoder(), self.seed + HELD_OUT_SEED
            rows = [encoder.row(item(seed, Split.HELD_OUT, i, task)) for i in range(num_items) for task in tasks]
            self._held_out = [to_tensors(collate(rows[begin : begin + 256])) for begin in range(0, len(rows), 256)]
        with torch.no_grad(), self._autocast():
            for batch in self._held_out:
                arrays = {name: tensor.to(self.device) for name, tensor in batch.items()}
                is_best = answer_logits(self.network, arrays).argmax(1) == arrays["targets_a"]
                wrong = set(arrays["item_a"][~is_best].tolist())
                right += [number not in wrong for number in range(len(arrays["row_starts"]) - 1)]
        return {task: round(sum(right[i :: len(tasks)]) / num_items, 4) for i, task in enumerate(tasks)}

    def check(self) -> float:
        """The largest difference between these logits and transformers' own, over a few rows in float32."""
        import torch

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        encoder = RowEncoder()
        rows = [encoder.row(item(self.seed, Split.TRAIN, index)) for index in range(_CHECKED_ROWS)]
        arrays = {name: tensor.to(self.device) for name, tensor in to_tensors(collate(rows)).items()}
        difference = largest_difference(self.network, arrays, [cut.grid for row in rows for cut in row.cuts])
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        return difference

    def export(self, folder: Path) -> int:
        """Write the checkpoint and return its size in bytes."""
        named = self.network.named_parameters()
        return write_checkpoint(folder, {name: values.detach().float().cpu().numpy() for name, values in named})


def mean_loss(losses: list[Any], step: int) -> float:
    """Of the last steps up to `step`, 0 of none. Raises DivergedError when it is no number any more."""
    import torch

    loss = float(torch.stack(losses).mean()) if losses else 0.0
    if not math.isfinite(loss):
        raise DivergedError(f"the loss is {loss} at step {step}; go on from an earlier state, lower --rate")
    return loss


def run(trainer: Trainer, arguments: argparse.Namespace, log: Any) -> None:
    """Train until a limit is reached; the log gets a line every --log-every and every --eval-every steps.

    The state is written at the latter too. Raises DivergedError when the loss is no number any more.
    """
    schedule = Schedule(arguments.rate, arguments.total_steps)
    started = last = time.monotonic()
    last_step, waited, losses = trainer.step, 0.0, []
    size = trainer.batch_size
    last_item = trainer.num_items + (arguments.total_steps - trainer.step) * size
    firsts = range(trainer.num_items, last_item, size)
    stream = batches(trainer.seed, size, firsts, arguments.workers, trainer.device)
    while trainer.step < arguments.total_steps and time.monotonic() - started < 60 * arguments.minutes:
        before = time.monotonic()
        arrays = next(stream)
        waited += time.monotonic() - before
        rate = schedule.rate(trainer.step)
        losses.append(trainer.train_step(arrays, rate))
        if trainer.step % arguments.log_every == 0:
            loss = mean_loss(losses, trainer.step)
            now = time.monotonic()
            steps = trainer.step - last_step
            log(
                step=trainer.step,
                loss=round(loss, 4),
                rate=round(rate, 6),
                steps_per_s=round(steps / (now - last), 2),
                items_per_s=round(steps * trainer.batch_size / (now - last)),
                waited_share=round(waited / (now - last), 3),
                seconds=round(now - started, 1),
            )
            last, last_step, waited, losses = now, trainer.step, 0.0, []
        if trainer.step % arguments.eval_every == 0:
            mean_loss(losses, trainer.step)
            trainer.save(arguments.out)
            log(step=trainer.step, held_out=trainer.held_out(arguments.eval_items))
            last, last_step, waited, losses = time.monotonic(), trainer.step, 0.0, []
    mean_loss(losses, trainer.step)


def main() -> int:
    parser = kinds.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=kinds.out_folder, required=True, help="folder of the state and of log.jsonl")
    parser.add_argument("--resume", type=Path, help="folder of an earlier state, where it is not --out")
    parser.add_argument(
        "--minutes",
        type=kinds.number(0, math.inf, "a number of minutes, of at least 0"),
        default=8.0,
        help="stop after so long; 0 trains nothing",
    )
    parser.add_argument("--total-steps", type=kinds.whole(1), default=8000, help="steps of all runs together")
    parser.add_argument("--batch-size", type=kinds.whole(1), default=1024, help="items a step; may change between runs")
    parser.add_argument(
        "--rate",
        type=kinds.number(1e-6, 1, "a learning rate from 1e-06 to 1"),
        default=0.02,
        help="the highest learning rate of matrices",
    )
    parser.add_argument("--seed", type=kinds.whole(0), default=0)
    parser.add_argument("--workers", type=kinds.whole(0), default=15, help="processes that make data")
    parser.add_argument("--log-every", type=kinds.whole(1), default=100, help="steps")
    parser.add_argument("--eval-every", type=kinds.whole(1), default=2000, help="steps")
    parser.add_argument("--eval-items", type=kinds.whole(1), default=64, help="held-out items a task")
    parser.add_argument("--compile", action="store_true", help="compile the layers first, which takes a minute")
    parser.add_argument("--check", action="store_true", help="compare with transformers' own forward before training")
    parser.add_argument("--export", type=kinds.out_folder, help="folder to write the checkpoint into at the end")
    arguments = parser.parse_args()
    if absent := missing_packages():
        print(f"{absent} is not installed; run this where PyTorch and transformers are", file=sys.stderr)
        return 2

    def log(**values: Any) -> None:
        line = json.dumps(values)
        print(line, flush=True)
        with (arguments.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    try:
        trainer = Trainer(arguments.seed, arguments.batch_size, arguments.compile)
        source = arguments.resume or (arguments.out if state.exists(arguments.out) else None)
        if source is not None:
            trainer.resume(source)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (state.StateError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    log(step=trainer.step, device=trainer.device, arguments={k: str(v) for k, v in vars(arguments).items()})
    if arguments.check:
        log(largest_difference=trainer.check())
    first = trainer.step
    try:
        run(trainer, arguments, log)
    except DivergedError as error:
        print(error, file=sys.stderr)
        return 1
    if trainer.step > first:
        trainer.save(arguments.out)
        log(step=trainer.step, held_out=trainer.held_out(arguments.eval_items))
    if arguments.export:
        size = trainer.export(arguments.export)
        log(step=trainer.step, export=str(arguments.export), bytes=size, most_bytes=MOST_BYTES)
        return 0 if size <= MOST_BYTES else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
