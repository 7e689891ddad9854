"""Register attention kernels without a mask in transformers, under finetune's own names.

transformers builds no mask for a name that its mask interface does not know. So a training sequence must not
need a mask. Either it is causal and has padding only at its end, which no token before sees and which does
not contribute to the loss. Or it is packed, and TRL's collator gives the borders of its examples. Sequences
that need a mask raise an error.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from finetune.core import upstream_private
from finetune.hardware import detection
from finetune.kernels.kernel_limits import IMPLEMENTATIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

Tensor = torch.Tensor


def register(name: str) -> None:
    """Register `attn_implementation=IMPLEMENTATIONS[name]` with transformers if `name` is a known kernel."""
    if name in IMPLEMENTATIONS:
        AttentionInterface.register(IMPLEMENTATIONS[name], without_mask(KERNELS[name]()))


def without_mask(kernel: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Wrap a kernel in the signature of transformers' attention functions.

    Args:
        kernel: takes queries (rows, tokens, heads, size), keys and values (possibly with fewer heads),
        `scale`,
            `window` (number of visible tokens with the token itself; `None`: all), `softcap`, `borders`
            (int32, examples + 1; `None`: each row is one example) and `longest` (tokens of the longest
            example). It returns the attention output (rows, tokens, heads, size).
    """

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        unknown = [name for name in ("s_aux", "position_bias", "cache") if others.get(name) is not None]
        if attention_mask is not None or not causal or dropout or unknown or query.shape[2] != key.shape[2]:
            raise ValueError("this attention is for training: causal, without mask, cache, dropout or sinks")
        if torch.is_autocast_enabled(query.device.type):  # rotary embeddings return queries and keys in fp32
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        longest: Any = query.shape[2] if cu_seq_lens_q is None else max_length_q
        window = None if sliding_window is None or sliding_window >= longest else sliding_window
        heads_last = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = kernel(
            *heads_last, scale=scale, window=window, softcap=softcap, borders=cu_seq_lens_q, longest=longest
        )
        return out, None

    return forward


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    borders: Tensor | None,
    **_: object,
) -> Tensor:
    """Run SDPA with cuDNN only, for unpacked sequences without a window."""
    if window is not None or softcap is not None or borders is not None:
        raise ValueError("cuDNN's attention has no window, no softcap and no documents")
    # on a CPU, which only tests use, torch's plain kernel
    backend = SDPBackend.CUDNN_ATTENTION if query.is_cuda else SDPBackend.MATH
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def varlen() -> Callable[..., Tensor]:
    """Run torch's own FlashAttention-2 on packed examples. Rows of a batch are examples of one length."""
    from torch.nn.attention.varlen import varlen_attn

    attend: Callable[..., Any] = varlen_attn
    # torch 2.13 needs enable_gqa for fewer key heads, and torch 2.11 does not
    takes = inspect.signature(varlen_attn).parameters
    said: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in takes else {}

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None,
        borders: Tensor | None, longest: int,
    ) -> Tensor:  # fmt: skip
        if softcap is not None:
            raise ValueError("torch's varlen_attn has no softcap")
        rows, tokens = query.shape[:2]
        if borders is None:
            borders = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device)
        flat: Any = [tensor.reshape(rows * tokens, *tensor.shape[2:]) for tensor in (query, key, value)]
        size = (-1, 0) if window is None else (window - 1, 0)
        out: Any = attend(*flat, borders, borders, longest, longest, scale=scale, window_size=size, **said)
        return out.view(rows, tokens, *out.shape[1:])

    return kernel


def flash(package: ModuleType) -> Callable[..., Tensor]:
    """Run FlashAttention 2 or 3 from `flash_attn` or `flash_attn_interface`."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None,
        borders: Tensor | None, longest: int,
    ) -> Tensor:  # fmt: skip
        options = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": softcap or 0.0,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if borders is None:
            return package.flash_attn_func(query, key, value, **options)
        rows, tokens = query.shape[:2]
        flat: Any = [tensor.reshape(rows * tokens, *tensor.shape[2:]) for tensor in (query, key, value)]
        # two tensors, because torch.compile does not support an autograd.Function with the same input twice
        out = package.flash_attn_varlen_func(*flat, borders, borders.view(-1), longest, longest, **options)
        return out.view(rows, tokens, *out.shape[1:])

    return kernel


def flash2() -> Callable[..., Tensor]:
    import flash_attn  # type: ignore[reportMissingImports]  (GPU only)

    return flash(flash_attn)


def flash3() -> Callable[..., Tensor]:
    import flash_attn_interface  # type: ignore[reportMissingImports]  (GPU only)

    return flash(flash_attn_interface)


@torch.library.custom_op("finetune::flash_attention_4", mutates_args=(), device_types="cuda")
def flash4_forward(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor | None, longest: int, scale: float,
    window: int | None, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run FlashAttention-4 as one operator, because torch.compile can't trace its own compilation.

    Returns:
        The attention output, and the log-sum-exp in fp32.
    """
    forward, _ = upstream_private.flash_attention_4()
    out, sums = forward(
        query, key, value, return_lse=True, **_flash4_options(borders, longest, scale, window, softcap)
    )[:2]
    return out, sums


@flash4_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, borders: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    *tokens, heads, _size = query.shape
    sums = (heads, *tokens) if borders is not None else (tokens[0], heads, tokens[1])
    return query.new_empty(*tokens, heads, value.shape[-1]), query.new_empty(sums, dtype=torch.float32)


@torch.library.custom_op("finetune::flash_attention_4_backward", mutates_args=(), device_types="cuda")
def flash4_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
    borders: Tensor | None, longest: int, scale: float, window: int | None, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    _, backward = upstream_private.flash_attention_4()
    options = _flash4_options(borders, longest, scale, window, softcap)
    can = detection.capability(query.device) < (
        12,
        0,
    )  # the backward pass on RTX 50 raises an error otherwise
    options["deterministic"] = torch.are_deterministic_algorithms_enabled() and can
    dq, dk, dv = backward(query, key, value, out, gradient.contiguous(), sums, **options)[:3]
    return dq, dk, dv


@flash4_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _flash4_options(
    borders: Tensor | None, longest: int, scale: float, window: int | None, softcap: float
) -> dict[str, Any]:
    documents = {} if borders is None else {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return {
        "cu_seqlens_q": borders,
        "cu_seqlens_k": borders,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if window is None else window - 1,
        "window_size_right": None if window is None else 0,
        "softcap": softcap,
        **documents,
    }


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, borders, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, borders)


def _backward(ctx: Any, gradient: Tensor, _: object) -> tuple[Tensor | None, ...]:
    return (*flash4_backward(gradient, *ctx.saved_tensors, *ctx.settings), *[None] * 5)


flash4_forward.register_autograd(_backward, setup_context=_keep)


def flash4_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None,
    borders: Tensor | None, longest: int,
) -> Tensor:  # fmt: skip
    rows, tokens = query.shape[:2]
    if borders is not None:
        query, key, value = [t.reshape(rows * tokens, *t.shape[2:]) for t in (query, key, value)]
    out, _ = flash4_forward(query, key, value, borders, longest, scale, window, softcap or 0.0)
    return out.view(rows, tokens, *out.shape[-2:])


def flash4() -> Callable[..., Tensor]:
    import flash_attn.cute.interface  # type: ignore[reportMissingImports]  (GPU only)  # noqa: F401 (fails here, if at all)

    return flash4_kernel


KERNELS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "flash_attention_4": flash4,
    "flash_attention_3": flash3,
    "flash_attention_2": flash2,
    "cudnn": lambda: cudnn,
    "varlen": varlen,
}
