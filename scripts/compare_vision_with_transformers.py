"""Compare pictures and videos with Hugging Face transformers on one checkpoint, run beside it on one GPU.

Needs PyTorch and transformers, which this project does not install. Prints JSON lines: `--accuracy` compares features,
logits and ids of three pictures and a video, both in float32 (exit code 1 when an error is over --limit or an id
differs); `--speed` times the towers in bfloat16, both from pixels in host memory and, for the reference, from pixels on
the device.

    PYTHONPATH=. python scripts/compare_vision_with_transformers.py CHECKPOINT --accuracy --speed 30x40 68x120 256x256
"""

from __future__ import annotations

import inspect
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_cuda.backends.vision import PixelCodes
from kestrel_cuda.config import EngineConfig, Grid, Quant
from kestrel_cuda.engine import Engine
from kestrel_cuda.model.prompt_positions import Visual
from scripts import arguments as kinds

PICTURES: list[Grid] = [(1, 30, 40), (1, 16, 44), (1, 52, 20)]
VIDEO: Grid = (3, 12, 18)
NUM_NEW = 8
Rows = NDArray[np.float32]


def nmse(found: NDArray[Any], exact: NDArray[Any]) -> float:
    wide = exact.astype(np.float64)
    return float(np.sum((found - wide) ** 2) / np.sum(wide**2))


def pixels(grids: list[Grid], num_inputs: int, seed: int) -> list[PixelCodes]:
    """Of each grid patches that are smooth, as pictures are, and noisy."""
    random = np.random.default_rng(seed)
    values_cv = np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (3, 1))
    found = []
    for grid in grids:
        num_rows = math.prod(grid)
        smooth = random.uniform(0, 255, (num_rows, 1)) + np.linspace(-40, 40, num_inputs)
        codes = np.clip(smooth + random.normal(0, 25, (num_rows, num_inputs)), 0, 255).astype(np.uint8)
        found.append(PixelCodes(codes, values_cv, num_inputs))
    return found


def values_of(parts: list[PixelCodes]) -> Rows:
    return np.concatenate([part.values_mk() for part in parts])


def load_reference(path: Path, dtype: str) -> Any:
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    kind = getattr(torch, dtype)
    model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=kind, attn_implementation="sdpa")
    return model.to("cuda").eval()


def tower_outputs(model: Any, pixels_mk: Rows, grids: list[Grid]) -> list[Rows]:
    """Features and deepstack features of the reference's tower."""
    import torch

    with torch.no_grad():
        out = model.model.visual(
            torch.from_numpy(pixels_mk).to("cuda", model.dtype), grid_thw=torch.tensor(grids, device="cuda")
        )
    tokens, levels = (out.pooler_output, out.deepstack_features) if hasattr(out, "pooler_output") else out
    return [array.float().cpu().numpy() for array in (tokens, *levels)]


def prompt(engine: Engine, visuals: list[Visual]) -> list[int]:
    """Each picture between words; a time before each frame pair."""
    config = engine.checkpoint.config
    assert config.vision is not None
    ids = engine.encode_raw("<|im_start|>user\n")
    for number, (kind, grid) in enumerate(visuals):
        for frame in range(grid[0]):
            ids += engine.encode_raw(f"<{frame}.5 seconds>" if kind == "video" else f"Number {number}:")
            pad = config.video_token_id if kind == "video" else config.image_token_id
            assert pad is not None
            num_tokens = config.vision.num_tokens((1, *grid[1:]))
            ids += [*engine.encode_raw("<|vision_start|>"), *[pad] * num_tokens, *engine.encode_raw("<|vision_end|>")]
    return ids + engine.encode_raw("What is in them?<|im_end|>\n<|im_start|>assistant\n")


def accuracy(path: Path, limit: float) -> bool:
    import torch

    engine = Engine.open(EngineConfig(model=path, backend="cuda", quant=Quant.NONE))
    config = engine.checkpoint.config
    assert config.vision is not None
    visuals = [Visual("image", grid) for grid in PICTURES] + [Visual("video", VIDEO)]
    codes = pixels([visual.grid for visual in visuals], config.vision.patch_inputs, seed=1)
    pixels_mk = values_of(codes)
    num_images = sum(math.prod(grid) for grid in PICTURES)
    ids = prompt(engine, visuals)
    encoded = engine.encode_visuals(visuals, codes)
    assert engine.backend is not None
    ours = [engine.backend.to_host(array) for array in encoded.features.arrays()]
    engine.load(len(ids) + NUM_NEW)
    generation = engine.generate(ids, NUM_NEW, ignore_eos=True, logits="keep", encoded=encoded)
    our_ids = [token.token_id for token in generation]
    our_logits = generation.prompt_logits
    assert our_logits is not None
    engine.close()

    model = load_reference(path, "float32")
    theirs = [
        np.concatenate(parts)
        for parts in zip(
            tower_outputs(model, pixels_mk[:num_images], PICTURES),
            tower_outputs(model, pixels_mk[num_images:], [VIDEO]),
            strict=True,
        )
    ]
    num_ids = min(engine.tokenizer.size, config.text.vocab_size)
    kinds = {config.image_token_id: 1, config.video_token_id: 2}
    their_ids: list[int] = []
    prompt_logits = np.zeros(0)
    for step in range(NUM_NEW):
        row = [*ids, *their_ids]
        inputs = {
            "input_ids": torch.tensor([row], device="cuda"),
            "attention_mask": torch.ones((1, len(row)), dtype=torch.long, device="cuda"),
            "pixel_values": torch.from_numpy(pixels_mk[:num_images]).cuda(),
            "image_grid_thw": torch.tensor(PICTURES, device="cuda"),
            "pixel_values_videos": torch.from_numpy(pixels_mk[num_images:]).cuda(),
            "video_grid_thw": torch.tensor([VIDEO], device="cuda"),
            "mm_token_type_ids": torch.tensor([[kinds.get(i, 0) for i in row]], dtype=torch.int, device="cuda"),
        }
        if "mm_token_type_ids" not in inspect.signature(model.forward).parameters:
            del inputs["mm_token_type_ids"]
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0].float().cpu().numpy()
        if step == 0:
            prompt_logits = logits
        their_ids.append(int(logits[-1, :num_ids].argmax()))
    errors = [nmse(found, exact) for found, exact in zip(ours, theirs, strict=True)]
    error = nmse(our_logits, prompt_logits)
    result = {
        "what": "accuracy, float32",
        "tokens": len(ids),
        "features_nmse": errors[0],
        "deepstack_nmse": errors[1:],
        "logits_nmse": error,
        "ids": our_ids,
        "ids_equal": our_ids == their_ids,
    }
    print(json.dumps(result), flush=True)
    del model
    torch.cuda.empty_cache()
    return max(*errors, error) <= limit and our_ids == their_ids


def times_ms(call: Any, rounds: int) -> tuple[float, float]:
    """Median and standard deviation of whole calls, the device idle before and after."""
    import time

    call()
    call()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(found), 3), round(statistics.pstdev(found), 3)


def speed(path: Path, grids: list[Grid], rounds: int) -> None:
    import torch

    # One after the other, so that neither holds memory while the other runs.
    ours: dict[Grid, tuple[float, float]] = {}
    features: dict[Grid, list[Rows]] = {}
    engine = Engine.open(EngineConfig(model=path, backend="cuda", keep_tower=True))
    vision = engine.checkpoint.config.vision
    assert vision is not None
    inputs = {grid: pixels([grid], vision.patch_inputs, seed=2) for grid in grids}
    for grid, codes in inputs.items():

        def encode(grid: Grid = grid, codes: list[PixelCodes] = codes) -> None:
            encoded = engine.encode_visuals([Visual("image", grid)], codes)
            assert engine.backend is not None
            engine.backend.synchronize()
            encoded.free()

        ours[grid] = times_ms(encode, rounds)
        encoded = engine.encode_visuals([Visual("image", grid)], codes)
        assert engine.backend is not None
        features[grid] = [engine.backend.to_host(array) for array in encoded.features.arrays()]
        encoded.free()
    assert engine.backend is not None
    assert engine._encoder is not None
    device, memory = engine.backend.device_name, engine.backend.memory()
    planned_bytes = engine._encoder.peak_bytes - memory.context_bytes
    peak_bytes = memory.peak_allocated_bytes
    engine.close()

    model = load_reference(path, "bfloat16")
    for grid, codes in inputs.items():
        pixels_mk = values_of(codes)
        on_host = torch.from_numpy(pixels_mk)
        on_device = on_host.to("cuda", torch.bfloat16)
        size = torch.tensor([grid], device="cuda")

        def visual(source: Any, size: Any = size) -> None:
            with torch.no_grad():
                model.model.visual(source.to("cuda", torch.bfloat16), grid_thw=size)
            torch.cuda.synchronize()

        theirs = times_ms(lambda source=on_device: visual(source), rounds)
        with_upload = times_ms(lambda source=on_host: visual(source), rounds)
        exact = tower_outputs(model, pixels_mk, [grid])
        result = {
            "what": "speed, bfloat16",
            "device": device,
            "patches": math.prod(grid),
            "ours_ms": ours[grid],
            "transformers_ms": theirs,
            "transformers_with_upload_ms": with_upload,
            "ours_of_transformers": round(ours[grid][0] / theirs[0], 3),
            "nmse_between": [nmse(a, b) for a, b in zip(features[grid], exact, strict=True)],
        }
        print(json.dumps(result), flush=True)
    peaks = {"peak_bytes": peak_bytes, "planned_bytes": planned_bytes, "share": round(peak_bytes / planned_bytes, 4)}
    print(json.dumps({"what": "the driver's own left out"} | peaks), flush=True)


def grid_of(text: str) -> Grid:
    rows, columns = text.split("x")
    return 1, int(rows), int(columns)


def main() -> int:
    parser = kinds.Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--limit", type=float, default=1e-6)
    parser.add_argument("--speed", nargs="*", type=grid_of, default=[], metavar="ROWSxCOLUMNS", help="of patches")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if not arguments.accuracy and not arguments.speed:
        parser.error("nothing to compare: give --accuracy, or --speed with sizes like 30x40")
    is_right = not arguments.accuracy or accuracy(arguments.checkpoint, arguments.limit)
    if arguments.speed:
        speed(arguments.checkpoint, arguments.speed, arguments.rounds)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
