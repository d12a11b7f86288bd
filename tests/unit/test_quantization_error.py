"""The arithmetic of scripts/quantization_error.py, against distributions whose divergence is known."""

from __future__ import annotations

import json
import sys
from math import log
from pathlib import Path

import numpy as np
import pytest

from kestrel_cuda.errors import DeviceError
from scripts import quantization_error
from scripts.quantization_error import compare, goldens_of, kl_divergence

P, Q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])


def test_kl_divergence_by_hand() -> None:
    # 1/2 log 2 + 0 - 1/4 log 2; a constant added to a row of logits changes nothing.
    (divergence,) = kl_divergence([np.log(P) + 7], [np.log(Q) - 3])
    assert divergence == pytest.approx(log(2) / 4, rel=1e-14)


def test_kl_divergence_is_that_of_the_first_from_the_second() -> None:
    p, q = np.array([0.75, 0.25]), np.array([0.5, 0.5])
    there, back = kl_divergence(np.log([p, q]), np.log([q, p]))
    assert there == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5), rel=1e-14)
    assert back == pytest.approx(0.5 * log(2 / 3) + 0.5 * log(2), rel=1e-14)


def test_kl_divergence_of_equal_rows_and_of_large_logits() -> None:
    # A probability of exp(-2000) is 0 in float64; its logarithm is not.
    assert kl_divergence([[1000.0, -1000.0]], [[1000.0, -1000.0]]).tolist() == [0]
    assert kl_divergence([[1000.0, -1000.0]], [[-1000.0, 1000.0]]).tolist() == [2000]


def test_positions_of_all_prompts_count_alike() -> None:
    equal = np.zeros((3, 2))
    far = np.array([[2.0, 0.0]])
    error = compare([(equal, equal), (far, -far)])
    (divergence,) = kl_divergence(far, -far)
    assert (error.num_positions, error.kl_max) == (4, divergence)
    assert error.kl_mean == divergence / 4
    assert error.top1_agreement == 3 / 4
    assert error.logit_difference_mean == (0 + 0 + 0 + 2) / 4


@pytest.mark.parametrize("bad", [np.zeros((2, 3)), np.array([[0.0, np.nan, 0.0]])])
def test_what_cannot_be_compared_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="logits of shapes"):
        compare([(np.zeros((1, 3)), bad)])


def test_one_object_for_each_quant(
    oracle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = oracle / "checkpoints" / "tiny-28L"
    options = ["--backend", "cpu", "--quant", "q8_0", "--quant", "none"]
    monkeypatch.setattr(sys, "argv", ["quantization_error.py", str(checkpoint), *options])
    quantization_error.main()
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(one["checkpoint"], one["quant"]) for one in (first, second)] == [
        ("tiny-28L", "q8_0"),
        ("tiny-28L", "none"),
    ]
    num_positions = sum(len(golden.prompt_ids) for golden in goldens_of(checkpoint))
    assert first["num_positions"] == second["num_positions"] == num_positions
    assert second["kl_mean"] < first["kl_mean"]


def test_an_object_for_each_cache_and_a_line_where_there_is_none(
    oracle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tiny-28L has heads of 16 channels, which an int8 cache does not take."""
    checkpoints = [str(oracle / "checkpoints" / name) for name in ("tiny-28L", "tiny-dense-tied")]
    options = ["--backend", "cpu", "--quant", "none", "--kv", "f16", "--kv", "q8"]
    monkeypatch.setattr(sys, "argv", ["quantization_error.py", *checkpoints, *options])
    quantization_error.main()
    out, err = capsys.readouterr()
    assert [(said["checkpoint"], said["kv"]) for said in map(json.loads, out.splitlines())] == [
        ("tiny-28L", "f16"),
        ("tiny-dense-tied", "f16"),
        ("tiny-dense-tied", "q8"),
    ]
    assert err.startswith("tiny-28L: --kv q8 needs a head_dim")
    assert err.count("\n") == 1


def test_a_checkpoint_without_goldens_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quantization_error.py", str(tiny_model)])
    with pytest.raises(SystemExit):
        quantization_error.main()
    assert "has no goldens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quant", "bad"], "argument --quant: 'bad' is none of q8_0, q4_0, g256, none"),
        (["--backend", "gpu"], "argument --backend: invalid choice: 'gpu'"),
    ],
)
def test_arguments_are_refused_in_one_line(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quantization_error.py", *options])
    with pytest.raises(SystemExit) as caught:
        quantization_error.main()
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_without_a_gpu_one_line_says_so(
    oracle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_here(name: str, device: int) -> None:
        raise DeviceError("no usable GPU here")

    monkeypatch.setattr("kestrel_cuda.engine.open_backend", none_here)
    checkpoint = oracle / "checkpoints" / "tiny-28L"
    monkeypatch.setattr(sys, "argv", ["quantization_error.py", str(checkpoint), "--backend", "cuda"])
    assert quantization_error.main() == 2
    assert capsys.readouterr() == ("", "tiny-28L: no usable GPU here\n")
