"""The objects that --json prints, built from reports. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kestrel_cli import options
from kestrel_cli.heard import Heard
from kestrel_cli.settings import Settings
from kestrel_cli.visuals import Visuals
from kestrel_cuda import __version__
from kestrel_cuda.report import LoadReport, RunReport

if TYPE_CHECKING:
    from kestrel_cuda.bench import BenchReport
    from kestrel_cuda.encode import EncodeCost
    from kestrel_cuda.inputs.inspection import Inspection


def run_result(
    load: LoadReport, run: RunReport, visuals: Visuals, settings: Settings, heard: Heard
) -> dict[str, object]:
    """Everything a run says, in plain JSON types."""
    return {
        "version": __version__,
        "model": load.model,
        "backend": load.backend,
        "device": load.device,
        "prompt_ids": list(run.prompt_ids),
        "n_prompt": len(run.prompt_ids),
        **visuals.as_json(),
        "rope_delta": run.rope_delta,
        "max_position": len(run.prompt_ids) + run.rope_delta - 1,
        "ids": list(run.ids),
        "text": run.text,
        "stop_reason": run.stop_reason,
        "eos_ids": list(load.eos_ids),
        "template_source": load.template_source,
        "tied": load.tied,
        "dtypes": load.dtypes,
        "quant": load.quant,
        "keep": load.keep or "off",
        "kv": load.kv,
        "kv_bytes_per_slot": load.kv_bytes_per_slot,
        "settings": settings.as_json(),
        "residency": asdict(run.residency),
        "timing": asdict(run.timing),
        "bytes_read_per_token": run.bytes_read_per_token,
        "read_gb_per_s": run.read_gb_per_s,
        "device_read_gb_per_s": run.device_read_gb_per_s,
        "read_share": run.read_share,
        "logits_sha256": run.logits_sha256,
        **heard.as_json(),
    }


def bench_result(report: BenchReport, settings: Settings, heard: Heard) -> dict[str, object]:
    """Everything a bench measured, in plain JSON types."""
    return {
        "version": __version__,
        "card": report.card,
        "backend": report.backend,
        "prompt_tokens": report.prompt_tokens,
        "new_tokens": report.new_tokens,
        "rounds": report.rounds,
        "link_gb_per_s": report.link_gb_per_s,
        "device_read_gb_per_s": report.device_read_gb_per_s,
        "all_equal": report.all_equal,
        "settings": settings.as_json(),
        "rows": [asdict(row) for row in report.rows],
        "cost_lines": [asdict(line) for line in report.cost_lines],
        **heard.as_json(),
    }


def inspect_result(
    inspections: Sequence[Inspection],
    costs: Sequence[EncodeCost],
    videos: Sequence[tuple[dict[str, object], EncodeCost]],
    settings: Settings,
    heard: Heard,
) -> dict[str, object]:
    """What pictures and videos become, in plain JSON types; sizes are [height, width], `half` null for want of one."""
    return {
        "version": __version__,
        "model": str(settings[options.MODEL]),
        "images": [
            {
                "path": inspection.path,
                "orig": [inspection.height, inspection.width],
                "resized": [inspection.size.height, inspection.size.width],
                "grid": list(inspection.size.grid_thw),
                "tokens": inspection.size.num_tokens,
                "half": None if inspection.half is None else asdict(inspection.half),
                "cost": _cost(cost),
                "notes": list(inspection.notes),
            }
            for inspection, cost in zip(inspections, costs, strict=True)
        ],
        "videos": [{**facts, "cost": _cost(cost)} for facts, cost in videos],
        "settings": settings.as_json(),
        **heard.as_json(),
    }


def _cost(cost: EncodeCost) -> dict[str, object]:
    return {
        **asdict(cost),
        "device_bytes": cost.device_bytes,
        "estimated_h200_ms": round(cost.h200_ms, 1),
    }
