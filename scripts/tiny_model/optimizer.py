"""The optimizer of training: Muon for matrices, AdamW for what is no matrix of a layer. Needs PyTorch.

Muon (K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) steps along the nearest orthogonal matrix to
the momentum, found by Newton-Schulz iterations. PyTorch's own takes matrices one by one, thousands of launches a step
here; these are stacked by shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Tensor = Any

MOMENTUM = 0.95
DECAY = 0.02
ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""The quintic of the Newton-Schulz iteration, from the article."""


def is_matrix_of_a_layer(name: str, parameter: Tensor) -> bool:
    """Whether Muon steps it: embeddings, norms, biases and the convolution of patches are AdamW's."""
    return parameter.ndim == 2 and "embed" not in name


class Optimizer:
    """Both over the parameters of a network."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], on_gpu: bool) -> None:
        import torch

        named = list(named_parameters)
        self._by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for name, parameter in named:
            if is_matrix_of_a_layer(name, parameter):
                self._by_shape[tuple(parameter.shape)].append(parameter)
        rest = [parameter for name, parameter in named if not is_matrix_of_a_layer(name, parameter)]
        self._adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=on_gpu)
        self._momentum = {p: torch.zeros_like(p) for same in self._by_shape.values() for p in same}
        self._dtype = torch.bfloat16 if on_gpu else torch.float32

    def moment_names(self, parameter: Tensor) -> tuple[str, ...]:
        """Of what a state keeps of a parameter beside its values."""
        return ("momentum",) if parameter in self._momentum else ("exp_avg", "exp_avg_sq")

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """The values of `moment_names`, after at least one step."""
        if parameter in self._momentum:
            return {"momentum": self._momentum[parameter]}
        return {name: self._adam.state[parameter][name] for name in self.moment_names(parameter)}

    def resume(self, parameter: Tensor, step: int, moments: Mapping[str, Tensor]) -> None:
        """Go on from moments after `step` steps."""
        import torch

        moments = {name: values.to(parameter.device, torch.float32) for name, values in moments.items()}
        if parameter in self._momentum:
            self._momentum[parameter] = moments["momentum"]
        else:
            count = torch.tensor(float(step), device=parameter.device)
            self._adam.state[parameter] = {"step": count, **moments}

    def step(self, rate: float, adam_rate: float) -> None:
        """One step along the gradients, which are dropped; `rate` is Muon's."""
        import torch

        for group in self._adam.param_groups:
            group["lr"] = adam_rate
        self._adam.step()
        with torch.no_grad():
            for (rows, columns), parameters in self._by_shape.items():
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
                momenta = [self._momentum[parameter] for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
                ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)
                along = orthogonal(torch.stack(ahead).to(self._dtype)).to(parameters[0].dtype)
                torch._foreach_mul_(parameters, 1 - rate * DECAY)
                torch._foreach_add_(parameters, list(along.unbind()), alpha=-rate * max(1.0, rows / columns) ** 0.5)
        self._adam.zero_grad(set_to_none=True)
        for parameters in self._by_shape.values():
            for parameter in parameters:
                parameter.grad = None


def orthogonal(matrices_nrc: Tensor) -> Tensor:
    """Of each matrix the nearest one whose singular values are about 1, [n, rows, columns]."""
    x = matrices_nrc.mT if matrices_nrc.shape[1] > matrices_nrc.shape[2] else matrices_nrc
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.mT if matrices_nrc.shape[1] > matrices_nrc.shape[2] else x
