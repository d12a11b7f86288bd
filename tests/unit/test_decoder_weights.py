"""What all of a decoder's weights consist of, and the shape that decides which kernels take a whole token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kestrel_cuda.backends.operands import TokenShape
from kestrel_cuda.config import ModelConfig, Quant
from kestrel_cuda.model.weights import plan_weights
from kestrel_cuda.quant.packed import Element, PackedGeometry
from kestrel_cuda.weight_keys import LM_HEAD
from tests.plans import TEXT, L

MODEL = ModelConfig("", TEXT, True, None, None, None)


@pytest.mark.parametrize(
    ("quant", "element", "has_shape"),
    [
        (Quant.Q8_0, Element.INT8, True),
        (Quant.Q4_0, Element.INT4, True),
        (Quant.G256, Element.INT8, False),
        (Quant.NONE, Element.BF16, False),
    ],
)
def test_weights_of_one_kind(quant: Quant, element: Element, has_shape: bool) -> None:
    weights = plan_weights(MODEL, quant, lambda _key: Element.BF16)
    assert weights.element is element
    shape = weights.token_shape(TEXT)
    assert (shape is not None) == has_shape
    if shape is not None:
        outputs = ((2048, 4096), (2048, 2048), (2048, 2 * 6144), (6144, 2048))
        layer = tuple(PackedGeometry(element, k, n, 32) for k, n in outputs)
        assert shape == TokenShape(layer, PackedGeometry(element, 2048, TEXT.vocab_size, 32), L, 128, 2)


def test_weights_of_two_kinds() -> None:
    weights = plan_weights(MODEL, Quant.NONE, lambda key: Element.F32 if key == LM_HEAD else Element.F16)
    assert weights.element is None
    assert weights.token_shape(TEXT) is None


def test_projections_that_are_not_fused() -> None:
    odd = replace(TEXT, intermediate_size=6146)
    weights = plan_weights(replace(MODEL, text=odd), Quant.Q8_0, lambda _key: Element.BF16)
    assert weights.token_shape(odd) is None
