"""What stands between the linears: embedding rows, silu(gate) * up, the choice of the next id, the position."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kestrel_cuda.backends.base import Backend
from kestrel_cuda.backends.operands import CHOSEN_SLOTS, Activation, SequenceState
from kestrel_cuda.quant.grouped import quantize_activations
from kestrel_cuda.quant.packed import Element
from tests.backends.arrays import (
    POISON_TOKEN,
    Doubles,
    Floats,
    assert_poison_outside,
    assert_same_bits,
    normal,
    poison,
    poisoned,
    poisoned_activation,
    read_codes,
    read_values,
    rng,
    sequence_state,
    stored,
    stored_values,
)
from tests.compare import assert_close


class TestEmbed:
    @pytest.mark.parametrize("element", [Element.BF16, Element.F16, Element.F32])
    @pytest.mark.parametrize("k", [1, 100, 256, 2048])
    def test_rows_are_gathered_and_widened_exactly(self, backend: Backend, element: Element, k: int) -> None:
        vocab, position, m = 300, 3, 9
        values = normal(rng(k), vocab, k, scale=0.05)
        values[5] = 0
        values[6, :] = 2.0**-24  # a subnormal float16
        table = stored(values, element)
        tokens = np.array([7, 7, 7, 299, 0, 5, 6, 150, 150, 1, 2, 3], np.int32)
        state = sequence_state(backend, 20, position, tokens=tokens)
        h = poisoned(backend, (m + 1, k))
        backend.embed(backend.to_device(table.copy()), state, h, m)
        got = backend.to_host(h)
        assert_poison_outside(got, (slice(m),), "rows below")
        expected = stored_values(table)[tokens[position : position + m]].astype(np.float32)
        assert_same_bits(got[:m], expected, "embedding rows")
        assert backend.to_host(state.position)[0] == position

    @pytest.mark.parametrize("element", [Element.BF16, Element.F16, Element.F32])
    def test_rows_can_stay_in_host_memory(self, backend: Backend, element: Element) -> None:
        # Large enough that malloc gives it pages of its own.
        table = np.tile(stored(normal(rng(9), 1000, 1024), element), (17, 1))
        tokens = np.array([0, 999, 1000, 16999, 8500], np.int32)
        state = sequence_state(backend, 8, 0, tokens=tokens)
        h = poisoned(backend, (6, 1024))
        backend.embed(backend.map_host(table), state, h, 5)
        got = backend.to_host(h)
        assert_poison_outside(got, (slice(5),), "rows below")
        assert_same_bits(got[:5], stored_values(table[tokens]).astype(np.float32), "embedding rows")


class TestAdd:
    @pytest.mark.parametrize("k", [1, 96, 2048])
    def test_rows_are_added_in_float32(self, backend: Backend, k: int) -> None:
        rows, added = normal(rng(k), 5, k), normal(rng(k + 1), 3, k, scale=1e-3)
        h = backend.to_device(rows)
        backend.add(h[1:4], backend.to_device(added))
        got = backend.to_host(h)
        assert_same_bits(got[[0, 4]], rows[[0, 4]], "rows around")
        assert_same_bits(got[1:4], rows[1:4] + added, "sums")


class TestSiluMul:
    def silu_mul(self, backend: Backend, gate: Floats, up: Floats, gap: int, quantized: bool) -> Activation:
        m, k = gate.shape
        joint = poison((m + 1, k + gap + k + gap))
        joint[:m, :k], joint[:m, k + gap : k + gap + k] = gate, up
        out = poisoned_activation(backend, m + 1, k, quantized)
        backend.silu_mul(backend.to_device(joint), k + gap, out, m)
        return out

    def expected(self, gate: Floats, up: Floats) -> Doubles:
        wide = gate.astype(np.float64)
        with np.errstate(over="ignore"):
            return wide / (1 + np.exp(-wide)) * up

    @pytest.mark.parametrize("k", [1, 31, 96, 100, 256, 1000, 6144])
    @pytest.mark.parametrize("gap", [0, 4])
    def test_plain(self, backend: Backend, cpu_backend: Backend, k: int, gap: int) -> None:
        random, m = rng(k), 7
        gate, up = normal(random, m, k, scale=4), normal(random, m, k, scale=2)
        actual = read_values(backend, self.silu_mul(backend, gate, up, gap, quantized=False), m)
        assert_close(actual, self.expected(gate, up), max_nmse=1e-13)
        if backend.name != "cpu":
            on_cpu = read_values(cpu_backend, self.silu_mul(cpu_backend, gate, up, gap, quantized=False), m)
            assert_close(actual, on_cpu, max_nmse=1e-9, what="against the CPU")

    @pytest.mark.parametrize("k", [1, 31, 96, 100, 256, 1000, 6144])
    @pytest.mark.parametrize("gap", [0, 4])
    def test_quantized_is_the_plain_result_quantized(self, backend: Backend, k: int, gap: int) -> None:
        random, m = rng(1, k), 5
        gate, up = normal(random, m, k, scale=4), normal(random, m, k)
        up[3, k // 2 :] = 0
        up[4] = 0
        codes, scales = read_codes(backend, self.silu_mul(backend, gate, up, gap, quantized=True), m)
        plain = read_values(backend, self.silu_mul(backend, gate, up, gap, quantized=False), m)
        expected_codes, expected_scales = quantize_activations(plain)
        assert (codes == expected_codes).all()
        assert_same_bits(scales, expected_scales, "scales")

    def test_extreme_gates(self, backend: Backend) -> None:
        gate = np.array([[1e4, -1e4, 80, -80, 0, -0.0, 100, -100, 88.8, -88.8, -104, 20, -20]], np.float32)
        up = np.full_like(gate, 3)
        actual = read_values(backend, self.silu_mul(backend, gate, up, 0, quantized=False), 1)
        expected = self.expected(gate, up)
        assert np.isfinite(actual).all()
        # Beyond -88.7 the exponential overflows and the result is 0 instead of some 1e-37.
        assert (np.abs(actual - expected) <= 1e-6 * np.abs(expected) + 1e-35).all()
        codes, scales = read_codes(backend, self.silu_mul(backend, gate, up, 0, quantized=True), 1)
        assert codes[0, :2].tolist() == [127, 0]
        assert scales[0, 0] == np.float32(3e4) / np.float32(127)

    def test_each_element_near_float64(self, backend: Backend) -> None:
        gate = np.linspace(-80, 80, 4001, dtype=np.float32)[None]
        up = np.ones_like(gate)
        actual = read_values(backend, self.silu_mul(backend, gate, up, 3, quantized=False), 1)
        expected = self.expected(gate, up)
        assert (np.abs(actual - expected) <= 1e-6 * np.abs(expected)).all()


class TestChoose:
    POSITION, CTX = 4, 12

    def choose(
        self, backend: Backend, logits: Floats, num_ids: int | None = None, num_rows: int = 1
    ) -> tuple[int, SequenceState]:
        """The chosen id; checks that the token, the id and the position agree and that no other of either changed."""
        state = sequence_state(backend, self.CTX, self.POSITION)
        logits_mv = backend.to_device(np.vstack([logits, np.full_like(logits, np.inf)]))
        backend.choose(logits_mv[0], len(logits) if num_ids is None else num_ids, state, num_rows)
        ids, tokens = backend.to_host(state.chosen), backend.to_host(state.tokens)
        after = self.POSITION + num_rows
        chosen = int(ids[after % CHOSEN_SLOTS])
        assert backend.to_host(state.position)[0] == after
        assert tokens[after] == max(chosen, 0)
        assert (np.delete(tokens, after) == POISON_TOKEN).all()
        assert (np.delete(ids, after % CHOSEN_SLOTS) == POISON_TOKEN).all()
        return chosen, state

    @pytest.mark.parametrize("vocab", [1, 2, 31, 255, 256, 257, 656, 65537, 151936])
    def test_the_largest_logit(self, backend: Backend, vocab: int) -> None:
        logits = normal(rng(vocab), vocab)
        assert self.choose(backend, logits)[0] == int(logits.argmax())
        for best in {0, vocab // 3, vocab - 1}:
            logits[best] = 100
            assert self.choose(backend, logits)[0] == best
            logits[best] = -100

    @pytest.mark.parametrize(
        "tied",
        [(3, 4), (0, 655), (31, 32), (255, 256), (255, 256, 511), (100, 65636), (65535, 70000), (70000, 131072),
         (151934, 151935), (255, 65536, 65537, 131072), (65536, 131072)],
    )  # fmt: skip
    def test_the_lowest_of_equals_wins(self, backend: Backend, tied: tuple[int, ...]) -> None:
        """Within a thread, a warp, a block and across blocks: an id's block has no say."""
        logits = np.minimum(normal(rng(2), 151936), np.float32(3))
        logits[list(tied)] = 7
        assert self.choose(backend, logits)[0] == tied[0]

    @pytest.mark.parametrize("vocab", [1, 33, 656, 151936])
    @pytest.mark.parametrize("value", [0.0, -5.0, np.inf, -np.inf])
    def test_all_equal_gives_id_0(self, backend: Backend, vocab: int, value: float) -> None:
        assert self.choose(backend, np.full(vocab, value, np.float32))[0] == 0

    def test_zero_and_negative_zero_are_equal(self, backend: Backend) -> None:
        assert self.choose(backend, np.array([-1, -0.0, 0.0], np.float32))[0] == 1

    def test_nan_is_never_chosen(self, backend: Backend) -> None:
        logits = normal(rng(3), 1000)
        best = int(logits.argmax())
        logits[[0, 5, 999]] = np.nan
        logits[best] = 50
        assert self.choose(backend, logits)[0] == best
        only = np.full(1000, np.nan, np.float32)
        only[777] = -3e38
        assert self.choose(backend, only)[0] == 777

    @pytest.mark.parametrize("number", [0, 1, 300, 999])
    def test_minus_infinity_is_chosen_before_nan(self, backend: Backend, number: int) -> None:
        logits = np.full(1000, np.nan, np.float32)
        logits[number:] = -np.inf
        assert self.choose(backend, logits)[0] == number

    @pytest.mark.parametrize("vocab", [1, 656, 151936])
    def test_nothing_but_nan_chooses_nothing(self, backend: Backend, vocab: int) -> None:
        chosen, state = self.choose(backend, np.full(vocab, np.nan, np.float32))
        assert chosen == -1
        # What the next embedding reads is a row that exists.
        assert backend.to_host(state.tokens)[self.POSITION + 1] == 0

    @pytest.mark.parametrize(("vocab", "num_ids"), [(656, 640), (656, 1), (640, 639), (151936, 151669), (260, 256)])
    def test_ids_at_the_limit_or_above_are_never_chosen(self, backend: Backend, vocab: int, num_ids: int) -> None:
        logits = normal(rng(4), vocab)
        logits[num_ids:] = np.inf
        best = int(logits[:num_ids].argmax())
        assert self.choose(backend, logits, num_ids)[0] == best
        logits[num_ids:] = logits[best]
        assert self.choose(backend, logits, num_ids)[0] == best
        logits[:num_ids] = np.nan
        assert self.choose(backend, logits, num_ids)[0] == -1

    @pytest.mark.parametrize("num_rows", [1, 2, 8])
    def test_the_token_follows_the_rows(self, backend: Backend, num_rows: int) -> None:
        assert self.choose(backend, np.array([0, 1, 0], np.float32), num_rows=num_rows)[0] == 1

    def test_choices_follow_one_another(self, backend: Backend) -> None:
        state = sequence_state(backend, 8, 2)
        for best in (5, 3, 7):
            logits = np.zeros(9, np.float32)
            logits[best] = 1
            backend.choose(backend.to_device(logits), 9, state, 1)
        backend.advance(state, 1)
        assert backend.to_host(state.position)[0] == 6
        assert backend.to_host(state.tokens)[2:7].tolist() == [POISON_TOKEN, 5, 3, 7, POISON_TOKEN]
        assert backend.to_host(state.chosen).tolist() == [3, 7, POISON_TOKEN, 5], "slots 4, 5, none and 3"

    def test_the_host_reads_ids_in_place(self, backend: Backend) -> None:
        """While later ones are on their way, and after the memory has been gone round."""
        state = replace(sequence_state(backend, 12, 2), chosen=backend.shared_zeros((CHOSEN_SLOTS,), np.int32))
        ids = backend.peek(state.chosen)
        assert (ids.dtype, ids.tolist()) == (np.int32, [0] * CHOSEN_SLOTS)
        rows = [backend.to_device(np.eye(9, dtype=np.float32)[best]) for best in range(1, 9)]
        marks = []
        for row_v in rows:
            backend.choose(row_v, 9, state, 1)
            marks.append(backend.mark())
            if len(marks) > 1:
                backend.wait(marks[-2])
                assert ids[(len(marks) + 1) % CHOSEN_SLOTS] == len(marks) - 1
        backend.wait(marks[-1])
        assert ids.tolist() == [6, 7, 8, 5], "slots 8, 9, 10 and 7"


def test_advance_moves_the_position_alone(backend: Backend) -> None:
    state = sequence_state(backend, 200, 1)
    backend.advance(state, 64)
    backend.advance(state, 1)
    assert backend.to_host(state.position)[0] == 66
    assert (backend.to_host(state.tokens) == POISON_TOKEN).all()
    assert (backend.to_host(state.chosen) == POISON_TOKEN).all()
