"""A frozen linear layer in fp8: an e4m3 weight with one scale for each output.

    W ~ s_w[:, None] * W_q                   quantized once, when the weight is loaded
    y = s_x[:, None] * (x_q @ W_q^T) * s_w   x is quantized row by row
    dx = s_g[:, None] * (g_q @ W_q)          g = dy * s_w is quantized with W's scale included

Both GEMMs use the same quantized weight W_q, so the gradient matches the forward pass. The weight is frozen.
It has no gradient and is never quantized again. On devices without fp8 GEMMs, the same W_q is multiplied in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from finetune.core import upstream_private
from finetune.hardware import detection
from finetune.kernels.kernel_limits import FP8_CAPABILITY, FP8_MULTIPLE
from finetune.kernels.ops import E4M3, quantize_rows, transpose


def product(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    exact_sum: bool = False,
) -> torch.Tensor:
    """Return x W^T of two quantized matrices.

    Args:
        codes: the quantized x, [rows, in] e4m3, row-major.
        scale: scale of each row of x, [rows, 1] float32.
        weight: the quantized W, [out, in] e4m3, row-major.
        weight_scale: scale of each output, [out, 1] float32.
        exact_sum: whether sums are in float32. Otherwise a GPU keeps fewer bits, which is 3 to 8% faster.
            Sums of 151,936 terms were 1 to 2% off then (benchmarks/LOG.md).

    Returns:
        [rows, out] in `dtype`.
    """
    if not has_gemm(codes.device):
        with torch.autocast(codes.device.type, enabled=False):
            return _cast((codes.float() @ weight.float().t()) * scale * weight_scale.t(), dtype)
    scales = scale, weight_scale.t()
    return _cast(upstream_private.scaled_mm(codes, weight.t(), *scales, fast=not exact_sum), dtype)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x.to(dtype)`, or `x` itself if the dtype matches.

    If the cast changes nothing, torch 2.11 never writes the output of a compiled autograd.Function that
    returns the result. The gradient is lost (fixed in torch 2.13).
    """
    return x if x.dtype == dtype else x.to(dtype)


def input_gradient(
    grad: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of x in y = x W^T.

    Args:
        grad: gradient of y, [rows, out].
        weight: the quantized W, [out, in] e4m3.
        weight_scale: [out, 1] float32.

    Returns:
        [rows, in] in `grad`'s dtype.
    """
    codes, scale = quantize_rows(grad, weight_scale.flatten())
    return codes_gradient(codes, scale, weight, grad.dtype)


def codes_gradient(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `input_gradient` for a gradient that is already quantized, with the weight's scale included."""
    ones = torch.ones(weight.shape[1], 1, dtype=torch.float32, device=weight.device)
    return product(codes, scale, transpose(weight), ones, dtype)


def has_gemm(device: torch.device) -> bool:
    """Return whether the device has fp8 GEMMs."""
    return device.type == "cuda" and detection.capability(device) >= FP8_CAPABILITY


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, weight_scale)
        ctx.dtype = x.dtype
        codes, scale = quantize_rows(x)
        return product(codes, scale, weight, weight_scale, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        weight, weight_scale = ctx.saved_tensors
        gradient = input_gradient(grads[0], weight, weight_scale)
        return _cast(gradient, ctx.dtype), None, None, None


class Fp8Linear(torch.nn.Linear):
    """A frozen linear layer stored as an e4m3 weight and one float32 scale for each output.

    Attributes:
        weight: [out, in] e4m3 without gradient, or [out, in / 2] bf16 after `pack`.
        weight_scale: buffer [out, 1] float32.
        compute_dtype: the dtype of the layer without fp8. PEFT casts a new adapter to this dtype, as it does
            for a base model that is not quantized. Otherwise it would cast the adapter to e4m3.
    """

    weight_scale: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(1, 1, bias=False, device="meta")  # creates the names without drawing random values
        self.in_features, self.out_features = in_features, out_features
        codes = torch.empty(out_features, in_features, dtype=E4M3, device=device)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.register_buffer("weight_scale", torch.empty(out_features, 1, device=device))
        if bias:
            empty = torch.empty(out_features, dtype=compute_dtype, device=device)
            self.bias = torch.nn.Parameter(empty, requires_grad=False)
        self.compute_dtype = compute_dtype

    @classmethod
    def of(cls, plain: torch.nn.Linear) -> Fp8Linear:
        """Quantize a layer that is already in memory, on its device."""
        layer = cls(
            plain.in_features, plain.out_features, bias=False, compute_dtype=plain.weight.dtype, device="meta"
        )
        codes, scale = quantize_rows(plain.weight.detach())
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = scale
        if plain.bias is not None:
            layer.bias = torch.nn.Parameter(plain.bias.detach(), requires_grad=False)
        return layer

    def pack(self) -> None:
        """Store two fp8 values as one bf16 value, because FSDP casts gathered weights to bf16.

        Two finite fp8 values never form a bf16 NaN, whose bits a copy could change (`four_bit.fsdp_policy`).
        """
        packed = self.weight.detach().view(torch.bfloat16)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    @property
    def W_q(self) -> torch.Tensor:
        """The quantized weight, [out, in] e4m3.

        PEFT calls `dequantize()` on a layer that has an attribute with this name. DoRA's magnitude needs
        that. Otherwise PEFT would use the quantized values as weights (`dequantize_module_weight` in
        peft/utils/integrations.py).
        """
        return self.weight.view(E4M3) if self.weight.dtype == torch.bfloat16 else self.weight

    def dequantize(self) -> torch.Tensor:
        """Return the weight that this layer computes with, [out, in] float32."""
        return self.W_q.float() * self.weight_scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        flat = input.reshape(-1, input.shape[-1])
        rows: Any = _FrozenLinear.apply(flat, self.W_q, self.weight_scale, dtype)
        # create the view here, because a view from inside the function does not allow in-place addition
        y = rows.view(*input.shape[:-1], rows.shape[-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Fp8Linear:
        """Move the layer between devices.

        Raises:
            TypeError: the call was `.to(dtype)`, which would cast the quantized values.
        """
        super()._apply(fn, recurse)
        packed = self.weight.dtype == torch.bfloat16 and 2 * self.weight.shape[1] == self.in_features
        if not (packed or self.weight.dtype == E4M3) or self.weight_scale.dtype != torch.float32:
            raise TypeError("an fp8 layer can't be cast: load the base model without quantization")
        return self


def fits(layer: torch.nn.Module) -> bool:
    """Return whether a layer can be stored in fp8: a plain linear layer with both sizes divisible by 16."""
    return type(layer) is torch.nn.Linear and not (
        layer.in_features % FP8_MULTIPLE or layer.out_features % FP8_MULTIPLE
    )
