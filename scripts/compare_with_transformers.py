"""Compare `--quant none` with Hugging Face transformers in float32 on one checkpoint, run beside it on one machine.

Needs PyTorch and transformers, which this project does not install. Prints one JSON object; exit code 1 when the
logits' NMSE is over --limit or an id differs before the first margin below --margin.

    PYTHONPATH=. python scripts/compare_with_transformers.py CHECKPOINT [--prompt-tokens 256] [--new-tokens 32]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kestrel_cuda.config import EngineConfig, Quant
from kestrel_cuda.engine import Engine
from scripts import arguments as kinds


def reference(path: Path, prompt_ids: list[int], num_new: int, num_ids: int) -> tuple[Any, Any, list[int]]:
    """Prompt logits [S, V], step logits [n, V] and greedy ids below `num_ids` of transformers in float32, TF32 off."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    with torch.no_grad():
        out = model(input_ids=torch.tensor([prompt_ids], device=device), use_cache=True)
        prompt_logits = out.logits[0].float().cpu().numpy()
        step, ids, steps = out.logits[0, -1], [], []
        for _ in range(num_new):
            steps.append(step.float().cpu().numpy())
            ids.append(int(step[:num_ids].argmax()))
            out = model(
                input_ids=torch.tensor([[ids[-1]]], device=device), past_key_values=out.past_key_values, use_cache=True
            )
            step = out.logits[0, -1]
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return prompt_logits, np.stack(steps), ids


def compare(arguments: argparse.Namespace) -> int:
    """1 where they are further apart than --limit."""
    engine = Engine.open(EngineConfig(model=arguments.checkpoint, backend=arguments.backend, quant=Quant.NONE))
    words = "The kestrel hovers over the meadow and watches the grass below, its head still against the wind. " * 64
    prompt_ids = engine.encode_chat([{"role": "user", "content": words}])[: arguments.prompt_tokens]
    num_ids = min(engine.tokenizer.size, engine.checkpoint.config.text.vocab_size)
    prompt_logits, step_logits, ids = reference(arguments.checkpoint, prompt_ids, arguments.new_tokens, num_ids)

    engine.load(len(prompt_ids) + arguments.new_tokens)
    generation = engine.generate(prompt_ids, arguments.new_tokens, ignore_eos=True, logits="keep")
    ours = [token.token_id for token in generation]
    error = float(np.sum((generation.prompt_logits - prompt_logits.astype(np.float64)) ** 2) / np.sum(prompt_logits**2))
    best_two = np.partition(step_logits[:, :num_ids], -2, axis=1)[:, -2:]
    small = np.flatnonzero(best_two[:, 1] - best_two[:, 0] < arguments.margin)
    compared = int(small[0]) if small.size else arguments.new_tokens
    equal = ours[:compared] == ids[:compared]
    print(
        json.dumps(
            {
                "checkpoint": str(arguments.checkpoint),
                "device": engine.backend.device_name if engine.backend else None,
                "prompt_tokens": len(prompt_ids),
                "logits_nmse": error,
                "ids_compared": compared,
                "ids_equal": equal,
            }
        )
    )
    engine.close()
    return 0 if error <= arguments.limit and equal else 1


def main() -> int:
    parser = kinds.Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompt-tokens", type=kinds.whole(1), default=256)
    parser.add_argument("--new-tokens", type=kinds.whole(1), default=32)
    parser.add_argument("--backend", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--limit", type=kinds.number(0, math.inf, "a number of at least 0"), default=1e-6)
    parser.add_argument("--margin", type=kinds.number(0, math.inf, "a number of at least 0"), default=1e-2)
    return kinds.finish(compare, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
