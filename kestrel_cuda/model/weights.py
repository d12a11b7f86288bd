"""How the decoder's matrices are grouped into packed weights and slabs, and where their outputs land. No device code.

Q, K, V and gate, up are fused side by side where every member's outputs divide by four; elsewhere each member is a
weight of its own and writes its own columns of the same output row, so what follows never notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kestrel_cuda.backends.operands import TokenShape
from kestrel_cuda.checkpoint.names import linear_shape
from kestrel_cuda.config import ModelConfig, Quant, TextConfig
from kestrel_cuda.quant.grouped import ACTIVATION_GROUP, scheme_for
from kestrel_cuda.quant.packed import (
    COLUMN_MULTIPLE,
    Element,
    PackedGeometry,
    SlabLayout,
    geometry_for,
    round_up,
    slab_layout,
)
from kestrel_cuda.weight_keys import LM_HEAD, LM_HEAD_LAYER, Projection, WeightKey

StoredElement = Callable[[WeightKey], Element]
"""The float element a plain weight is stored in by the checkpoint."""

_FUSABLE = (Projection.QKV, Projection.GATE_UP)


@dataclass(frozen=True)
class JointOutput:
    """Output row of projections that share an input: `parts` are packed weights with their first columns,
    `columns` the first column of each plain member, `width` the length of a row."""

    parts: tuple[tuple[Projection, int], ...]
    columns: dict[Projection, int]
    width: int


@dataclass(frozen=True)
class DecoderWeights:
    """Slab layouts of every layer and of lm_head, and the two joint outputs every layer has."""

    layers: tuple[SlabLayout, ...]
    lm_head: SlabLayout
    qkv: JointOutput
    gate_up: JointOutput
    quant_by_class: dict[str, str]

    @property
    def layouts(self) -> Iterator[SlabLayout]:
        yield from self.layers
        yield self.lm_head

    @property
    def element(self) -> Element | None:
        """What every weight consists of; None where they differ."""
        elements = {geometry.element for layout in self.layouts for geometry in layout.geometry}
        return elements.pop() if len(elements) == 1 else None

    def token_shape(self, text: TextConfig) -> TokenShape | None:
        """What decides which kernels take a whole token; None where none does: of floats, of other groups than of an
        activation's size, of projections that are not fused."""
        geometries = {geometry for layout in self.layouts for geometry in layout.geometry}
        is_fused = len(self.qkv.parts) == 1 and len(self.gate_up.parts) == 1
        if self.element is None or not is_fused or any(g.group_size != ACTIVATION_GROUP for g in geometries):
            return None
        queries_per_kv = text.num_heads // text.num_kv_heads
        lm_head = self.lm_head.geometry[0]
        return TokenShape(self.layers[0].geometry, lm_head, text.num_layers, text.head_dim, queries_per_kv)


def plan_weights(config: ModelConfig, quant: Quant, stored: StoredElement) -> DecoderWeights:
    """Decide geometry, fusion and order in the slab for every matrix of the decoder."""
    text = config.text
    qkv, gate_up = _joint_output(text, Projection.QKV), _joint_output(text, Projection.GATE_UP)
    order = [*(p for p, _ in qkv.parts), Projection.O, *(p for p, _ in gate_up.parts), Projection.DOWN]
    layers = tuple(
        slab_layout(layer, [(key, _geometry(text, quant, key, stored)) for key in (WeightKey(layer, p) for p in order)])
        for layer in range(text.num_layers)
    )
    lm_head = slab_layout(LM_HEAD_LAYER, [(LM_HEAD, _geometry(text, quant, LM_HEAD, stored))])
    classes = {entry.key.projection.name.lower(): _kind(entry.geometry) for entry in layers[0].entries}
    classes["lm_head"] = _kind(lm_head.entries[0].geometry)
    return DecoderWeights(layers, lm_head, qkv, gate_up, classes)


def _joint_output(text: TextConfig, projection: Projection) -> JointOutput:
    sizes = {member: linear_shape(text, member)[0] for member in projection.members}
    fused = all(size % COLUMN_MULTIPLE == 0 for size in sizes.values())
    columns, width = {}, 0
    for member, size in sizes.items():
        columns[member] = width
        width += size if fused else round_up(size, COLUMN_MULTIPLE)
    parts = ((projection, 0),) if fused else tuple(columns.items())
    return JointOutput(parts, columns, width)


def _geometry(text: TextConfig, quant: Quant, key: WeightKey, stored: StoredElement) -> PackedGeometry:
    members = key.projection.members
    num_inputs = linear_shape(text, members[0])[1]
    num_outputs = sum(linear_shape(text, member)[0] for member in members)
    elements = {stored(WeightKey(key.layer, member)) for member in members}
    element = elements.pop() if len(elements) == 1 else Element.F32
    return geometry_for(scheme_for(quant, num_inputs), element, num_inputs, num_outputs)


def _kind(geometry: PackedGeometry) -> str:
    match geometry.element:
        case Element.INT8:
            return "q8_0" if geometry.group_size == 32 else f"g{geometry.group_size}"
        case Element.INT4:
            return "q4_0"
        case element:
            return f"none ({element})"
