"""Compute DoRA's column scale m / ||W + s B A|| (arXiv 2402.09353) from a norm that is updated once per step.

On a GPU, one kernel per layer reads W once and sums the squares of each tile. On a CPU, and in all run
checks, the norm is factored:

    ||w_i + s b_i A||^2 = ||w_i||^2 + 2 s b_i . (W A^T)_i + s^2 b_i (A A^T) b_i^T        for each output i

||W||^2 is summed once, and W A^T is a thin GEMM. Neither way allocates memory of W's size. The norm has no
gradient (section 4.3 of the paper), so it changes only if A, B or s changes. A forward pass that finds a
change computes it again. PEFT computes B A and the norm in every forward pass, with an identity matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.core import upstream_private
from finetune.core.run_checks import RunChecks
from finetune.kernels import ops
from finetune.quantization import four_bit, fp8_linear

ROWS = 4096  # rows of W that are converted to float32 at a time


def column(layer: Any, name: str) -> torch.Tensor | None:
    """Return m / ||W + s B A|| [out] of a DoRA layer, with m's gradient; `None` for another layer."""
    if name not in layer.lora_magnitude_vector:
        return None
    return layer.lora_magnitude_vector[name].weight / layer.finetune_norm


class Norms:
    """The norms of all DoRA layers: `finetune_norm` [out] of each, in float32 or float64."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.seen: list[tuple[Any, ...]] = [()] * len(layers)
        self.squares = [_squares(layer) for layer in layers]
        for layer, square in zip(layers, self.squares, strict=True):
            layer.finetune_norm = square.sqrt()
        self.refreshed = 0

    def refresh(self, *, stepped: bool = False) -> None:
        """Update the norms of layers whose A, B or scaling has changed.

        Args:
            stepped: whether the optimizer has stepped. Fused optimizers of torch and bitsandbytes do not
                increase the version of a weight, which shows other changes.
        """
        for index, layer in enumerate(self.layers):
            if not (name := _active(layer)):
                continue
            parts = (layer.lora_A[name].weight, layer.lora_B[name].weight)
            state = (
                layer.scaling[name],
                *((part.data_ptr(), upstream_private.version(part)) for part in parts),
            )
            if stepped or state != self.seen[index]:
                self.seen[index] = state
                self.refreshed += 1
                layer.finetune_norm.copy_(norm(layer, name, self.squares[index]))

    def error(self) -> float:
        """Return the largest relative difference of a norm from the factored norm of the current weights."""
        both = zip(self.layers, self.squares, strict=True)
        factors = [(one, factored(one, name, square)) for one, square in both if (name := _active(one))]
        off = [(new - one.finetune_norm).norm() / new.norm() for one, new in factors]
        return float(torch.stack(off).max()) if off else 0.0

    def rebased(self) -> None:
        """Update the norms after the weights of the base model have changed."""
        self.squares, self.seen = [_squares(layer) for layer in self.layers], [()] * len(self.layers)


def _active(layer: LoraLayer) -> str:
    """Return the active adapter of a layer if it is a DoRA adapter; else the empty string."""
    return next((name for name in layer.active_adapters if name in layer.lora_magnitude_vector), "")


@torch.no_grad()
def norm(layer: Any, name: str, squares: torch.Tensor) -> torch.Tensor:
    """Return ||W + s B A|| of each row [out] in float32 or float64, given ||W||^2."""
    base = layer.get_base_layer()
    weight, scale = _weight(base), base.weight_scale if isinstance(base, fp8_linear.Fp8Linear) else None
    if not (weight.is_cuda and weight.is_contiguous() and squares.dtype == torch.float32):
        return factored(layer, name, squares)
    parts = (layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float())
    return ops.triton_linear.dora_norm(weight, scale, *parts, layer.scaling[name])


@torch.no_grad()
def factored(layer: Any, name: str, squares: torch.Tensor) -> torch.Tensor:
    """Return the result of `norm` from ||W||^2 and thin GEMMs."""
    exact = squares.dtype
    a, b = layer.lora_A[name].weight.to(exact), layer.lora_B[name].weight.to(exact)
    scale = layer.scaling[name]
    cross = (_times(layer.get_base_layer(), a) * b).sum(1)
    square = squares + 2 * scale * cross + scale**2 * ((b @ (a @ a.t())) * b).sum(1)
    return square.clamp(min=0).sqrt()


def _times(base: nn.Module, a: torch.Tensor) -> torch.Tensor:
    """Return W a^T [out, r] in a's dtype. For a 16-bit W, a is split into three 16-bit parts."""
    weight, exact = _weight(base), a.dtype
    if isinstance(base, fp8_linear.Fp8Linear):
        return _parts(weight.to(torch.bfloat16), a) * base.weight_scale
    return weight @ a.t() if weight.dtype == exact else _parts(weight, a)


def _parts(weight: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    if not weight.is_cuda:
        return weight.to(a.dtype) @ a.t()
    parts, rest = [], a
    for _ in range(3):
        parts.append(rest.to(weight.dtype))
        rest = rest - parts[-1].to(a.dtype)
    product = torch.mm(weight, torch.cat(parts).t(), out_dtype=torch.float32)  # GPU only
    return product.view(len(weight), 3, len(a)).sum(1)


def _weight(base: Any) -> torch.Tensor:
    """Return the weight of a layer without the fp8 scale. A 4-bit weight is dequantized."""
    return four_bit.weight(base) if four_bit.is_four_bit(base) else base.weight


@torch.no_grad()
def _squares(layer: Any) -> torch.Tensor:
    """Return ||w_i||^2 of each row [out]."""
    base = layer.get_base_layer()
    weight = _weight(base)
    exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
    sums = [part.to(exact).square().sum(1) for part in weight.split(ROWS)]
    scale = base.weight_scale.flatten() if isinstance(base, fp8_linear.Fp8Linear) else 1.0
    return torch.cat(sums) * scale**2


class RefreshNorms(TrainerCallback):
    """Update DoRA's norms after each optimizer step, and add a run check of the last norms."""

    def __init__(self, norms: Norms, checks: RunChecks) -> None:
        self.norms, self.checks = norms, checks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.norms.refresh(stepped=True)  # weights may have come from a checkpoint

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.norms.refresh(stepped=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        error = self.norms.error()
        self.checks.add(
            "DoRA norms",
            expected="the norms of the weights",
            actual=f"{error:.1g} off",
            how="relative difference of ||W + s B A|| after the last step from a new computation",
            ok=error < 1e-5,
        )


def refreshing(model: nn.Module, checks: RunChecks) -> list[TrainerCallback]:
    """Return the callback that updates the norms of fused DoRA layers."""
    norms = getattr(model, "finetune_norms", None)
    return [RefreshNorms(norms, checks)] if norms else []
