"""Attention of training rows without a mask: each kernel by a name of ours, through transformers' interface.

transformers builds no mask for a name that its mask interface does not know. So a row must need none: it is
causal, and all that stands at its end is padding, which no token before it sees and which carries no loss; or
it is several documents, whose borders TRL's collator hands on. What would need a mask is refused.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from finetune.core import upstream_private
from finetune.kernels.kernel_limits import IMPLEMENTATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def register(name: str) -> None:
    """Make `attn_implementation=IMPLEMENTATIONS[name]` known to transformers, if `name` is one of ours."""
    if name in IMPLEMENTATIONS:
        AttentionInterface.register(IMPLEMENTATIONS[name], without_mask(KERNELS[name]()))


def without_mask(kernel: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """A kernel as transformers calls attention.

    Args:
        kernel: called with queries (rows, tokens, heads, size), keys and values (of fewer heads, it may be),
            `scale`, `window` (tokens seen, itself included; `None`: all), `softcap`, `borders` (int32,
            documents + 1; `None`: a row is a document) and `longest` (tokens of a document); returns what
            the queries attend to, (rows, tokens, heads, size).
    """

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        unknown = [name for name in ("s_aux", "position_bias", "cache") if others.get(name) is not None]
        if attention_mask is not None or not causal or dropout or unknown or query.shape[2] != key.shape[2]:
            raise ValueError("this attention is for training: causal, without mask, cache, dropout or sinks")
        if torch.is_autocast_enabled(query.device.type):  # rotary embeddings leave queries and keys in fp32
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
    window: Any,
    softcap: Any,
    borders: Any,
    **_: Any,
) -> Tensor:
    """SDPA by cuDNN alone: whole rows, no window."""
    if window is not None or softcap is not None or borders is not None:
        raise ValueError("cuDNN's attention has no window, no softcap and no documents")
    # on the CPU, where the tests prove what stands around it, torch's plain one
    backend = SDPBackend.CUDNN_ATTENTION if query.is_cuda else SDPBackend.MATH
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def varlen() -> Callable[..., Tensor]:
    """torch's own FlashAttention-2 of documents; rows of a batch are documents of one length."""
    from torch.nn.attention.varlen import varlen_attn

    attend: Callable[..., Any] = varlen_attn
    # torch 2.11 takes fewer key heads as they are, 2.13 wants it said
    takes = inspect.signature(varlen_attn).parameters
    said: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in takes else {}

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: Any, softcap: Any, borders: Any,
        longest: int,
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


def flash(package: Any) -> Callable[..., Tensor]:
    """FlashAttention 2 or 3: `flash_attn` or `flash_attn_interface`."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: Any, softcap: Any, borders: Any,
        longest: int,
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
        # two tensors to torch.compile, which takes no autograd.Function that is given one twice
        both = borders, borders.view(-1)
        out = package.flash_attn_varlen_func(*flat, *both, longest, longest, **options)
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
    """FlashAttention-4 as one operation, since torch.compile can't look into what it compiles itself.

    Returns:
        What the queries attend to, and the logarithms of the sums of exponentials, fp32.
    """
    forward, _ = upstream_private.flash_attention_4()
    out, sums = forward(
        query, key, value, return_lse=True, **_flash4_options(borders, longest, scale, window, softcap)
    )[:2]
    return out, sums


@flash4_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, borders: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    *tokens, heads, _size = query.shape
    sums = (heads, *tokens) if borders is not None else (tokens[0], heads, tokens[1])
    return query.new_empty(*tokens, heads, value.shape[-1]), query.new_empty(sums, dtype=torch.float32)


@torch.library.custom_op("finetune::flash_attention_4_backward", mutates_args=(), device_types="cuda")
def flash4_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
    borders: Tensor | None, longest: int, scale: float, window: int | None, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values."""
    _, backward = upstream_private.flash_attention_4()
    options = _flash4_options(borders, longest, scale, window, softcap)
    can = torch.cuda.get_device_capability(query.device) < (
        12,
        0,
    )  # RTX 50's backward asserts it is not asked
    options["deterministic"] = torch.are_deterministic_algorithms_enabled() and can
    dq, dk, dv = backward(query, key, value, out, gradient.contiguous(), sums, **options)[:3]
    return dq, dk, dv


@flash4_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _flash4_options(borders: Any, longest: int, scale: float, window: Any, softcap: float) -> dict[str, Any]:
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


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*flash4_backward(gradient, *ctx.saved_tensors, *ctx.settings), *[None] * 5)


flash4_forward.register_autograd(_backward, setup_context=_keep)


def flash4_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: Any, softcap: Any, borders: Any,
    longest: int,
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
