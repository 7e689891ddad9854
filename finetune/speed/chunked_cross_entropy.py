"""Compute the cross-entropy of an output head in chunks of tokens, with two GEMMs and without saved logits.

The gradient of the hidden states is final as soon as the logits of a chunk are known: dh = (softmax(z) -
onehot) W. The forward pass computes it with the loss, and saves it (tokens, hidden) instead of the logits.
The backward pass only scales it. A head that trains needs a third GEMM, dW = (softmax(z) - onehot)^T h,
summed over chunks in fp32.

TRL's fused head recomputes the logits in the backward pass and needs three GEMMs. Liger's
`LigerFusedLinearCrossEntropyLoss` has the same two GEMMs. Its chunks have logits no larger than the hidden
states (512 of 16,384 tokens for an 8B Llama), which makes the GEMMs narrow. It also waits for the device to
count the labels, and computes tokens without a label. `torch.nn.functional.linear_cross_entropy`
(torch >= 2.13) is plain cross-entropy without a chunk size, and also computes tokens without a label.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.utils.generic import ModelOutput

from finetune.autoconfig.memory_estimate import CHUNK_BYTES, chunk_rows, logit_bytes
from finetune.core import upstream_private
from finetune.data.loss_mask import IGNORED
from finetune.speed.fp8_cross_entropy import Fp8OutputHead
from finetune.speed.loss_weights import scaled_gradient

triton_loss: Any = None
if torch.cuda.is_available():
    from finetune.kernels import triton_loss

FEW = 64  # up to 1 of 64 tokens without a label is computed too, which is cheaper than selecting the others


@dataclass
class TokenLoss(ModelOutput):
    """Sums over the tokens with a label, as zero-dimensional tensors on the device."""

    nll: torch.Tensor | None = None
    """Negative log-likelihood times the weights, in fp32 (fp64 for fp64 logits), with gradient."""
    entropy: torch.Tensor | None = None
    """Entropy of the predictions in nats. `None` for a head with a bias or softcap, or without gradient."""
    correct: torch.Tensor | None = None
    """Number of tokens whose label has the highest logit, int64."""
    aux_loss: torch.Tensor | None = None
    """The auxiliary loss of a mixture's routers, with gradient. `None` if nobody asks for it."""
    router_entropy: torch.Tensor | None = None
    """`RouterUse.entropy`. `None`, as the next two, out of training and without routers."""
    router_rows: torch.Tensor | None = None
    """`RouterUse.rows`."""
    expert_tokens: torch.Tensor | None = None
    """`RouterUse.tokens`."""


def counted(collate: Callable[..., dict[str, Any]], rows: list[Any]) -> dict[str, Any]:
    """Collate a batch, and add its numbers of labels and tokens.

    The loader's process counts them on the CPU. A GPU would answer only after all its queued work, and would
    then be idle until new work is queued.
    """
    batch = collate(rows)
    return {**batch, **dict(zip(("num_labels", "num_tokens"), numbers(batch), strict=True))}


def numbers(batch: dict[str, Any]) -> tuple[int, int]:
    """Count the labels that a token predicts, and the tokens without padding. Wait for the batch's device."""
    labels = int((batch["labels"][:, 1:] != IGNORED).sum())
    mask = batch.get("attention_mask")
    return labels, batch["input_ids"].numel() if mask is None else int(mask.sum())


def computes_all(rows: int, num_labels: int) -> bool:
    """Return whether so few tokens lack a label that all tokens are computed, without a copy."""
    return (rows - num_labels) * FEW <= rows


class Head(NamedTuple):
    """An output head, which computes logits from hidden states."""

    weight: Tensor
    """(vocabulary, hidden), with a gradient if it trains."""
    bias: Tensor | None = None
    """(vocabulary,), with a gradient if it trains."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118)."""
    fp8: bool = False
    """Whether the gradient of the hidden states is computed in fp8 (`fp8_cross_entropy`). This needs a frozen
    head without bias and softcap."""


def token_loss(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    num_labels: int | None = None,
    compiled: bool = False,
) -> TokenLoss:
    """Sum -log softmax(h W^T + b)[label] over the tokens with a label, as `cross_entropy(reduction="sum")`.

    Softmax runs in fp32 (fp64 for fp64). GEMMs run in autocast's dtype, or in the dtype of the hidden states.

    Args:
        hidden: (..., hidden). Hidden state i predicts `labels`[i].
        labels: (...), int64. -100 means no label.
        weights: (...). Each label's weight in the sum. `None` means 1.
        num_labels: number of labels that are not -100. `None` waits for the device to count them.

    Raises:
        ValueError: `head.fp8` with a head that trains, or has a bias or a softcap.
    """
    weight, bias, softcap, fp8 = head
    if fp8 and (weight.requires_grad or bias is not None or softcap is not None):
        raise ValueError("the gradient in fp8 needs a frozen output head without bias and softcap")
    device = weight.device
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
    hidden = hidden.to(device, dtype).flatten(0, -2)
    labels = labels.to(device).flatten()
    weights = None if weights is None else weights.to(device).flatten()
    picked = None
    if num_labels is None:
        num_labels = int((labels != IGNORED).sum())
    if not computes_all(len(labels), num_labels):
        # a sort, because `nonzero` would wait for the device to count the labels
        picked = (labels == IGNORED).to(torch.uint8).argsort(stable=True)[:num_labels]
        labels, weights = labels[picked], None if weights is None else weights[picked]
    with torch.autocast(device.type, enabled=False):
        differentiate = torch.is_grad_enabled() and any(
            one is not None and one.requires_grad for one in (hidden, weight, bias)
        )
        loss: Any
        if fp8 and differentiate:
            loss = Fp8OutputHead.apply(hidden, weight, labels, weights, picked)
        else:
            loss = _OutputHead.apply(
                hidden, weight, bias, labels, weights, picked, softcap, compiled, differentiate
            )
        nll, entropy, correct = loss
    return TokenLoss(nll=nll, entropy=entropy, correct=correct)


class _OutputHead(torch.autograd.Function):
    """Negative log-likelihood with a forward pass that computes all gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (rows, hidden)
        weight: Tensor,  # (vocabulary, hidden)
        bias: Tensor | None,  # (vocabulary,)
        labels: Tensor,  # (n,)
        weights: Tensor | None,  # (n,) of the labels; `None`: 1
        picked: Tensor | None,  # (n,) indices of tokens with a label; `None`: all tokens
        softcap: float | None,
        compiled: bool,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        rows, vocabulary, has_label = len(labels), len(weight), labels != IGNORED
        share = has_label if weights is None else torch.where(has_label, weights.to(wide), 0)
        summed = [  # of weight and bias
            torch.zeros_like(one, dtype=wide) if needed and differentiate and one is not None else None
            for one, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        ctx.dtypes = [one if one is None else one.dtype for one in (weight, bias)]
        weight, bias = weight.to(hidden.dtype), bias if bias is None else bias.to(hidden.dtype)
        sizes = {"narrow": hidden.element_size(), "wide": wide.itemsize}
        one_kernel = hidden.is_cuda and softcap is None and wide == torch.float32
        bytes_per_token = logit_bytes(compiled=compiled or one_kernel, capped=softcap is not None, **sizes)
        size = chunk_rows(rows, CHUNK_BYTES // (vocabulary * bytes_per_token))
        logits = hidden.new_empty(size, vocabulary)
        gradient = hidden.new_empty(rows if differentiate else 0, hidden.shape[1])
        nll = hidden.new_zeros(rows, dtype=wide)
        entropy = torch.zeros_like(nll) if differentiate and bias is None and softcap is None else None
        correct = labels.new_zeros(rows, dtype=torch.bool)
        step = _in_one_kernel if one_kernel else _compiled() if compiled else softmax_in_place
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            source = hidden[part] if picked is None else hidden[picked[part]]
            chunk = torch.mm(source, weight.T, out=logits[: len(source)])
            if bias is not None:
                chunk.add_(bias)
            wanted = labels[part]
            for one in (
                (chunk, wanted) if compiled and not one_kernel else ()
            ):  # the number of tokens with a label changes
                upstream_private.mark_dynamic(one)
            nll[part], correct[part] = step(chunk, wanted, softcap, wide, differentiate)
            if differentiate:
                torch.mm(chunk, weight, out=gradient[part])
                _sum_of_head(chunk, source, share[part], *summed)
            if entropy is not None:
                # H = log Z - sum p z = nll - h (p - onehot) W, from the result of the second GEMM
                entropy[part] = nll[part] - torch.linalg.vecdot(source.to(wide), gradient[part].to(wide))
        ctx.rows = len(hidden)
        ctx.save_for_backward(gradient, share, picked, *summed)
        ctx.set_materialize_grads(False)
        total, right = torch.where(has_label, nll, 0), (correct & has_label).sum()
        total = total.sum() if weights is None else (total * share).sum()
        ctx.mark_non_differentiable(right)
        if entropy is not None:
            entropy = torch.where(has_label, entropy, 0).sum()
            ctx.mark_non_differentiable(entropy)
        return total, entropy, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        gradient, share, picked, *summed = ctx.saved_tensors
        if gradients[0] is None:
            return (None,) * 9
        scaled = scaled_gradient(gradient, share, picked, gradients[0], ctx.rows)
        head = [
            None if one is None else (one * gradients[0]).to(dtype)
            for one, dtype in zip(summed, ctx.dtypes, strict=True)
        ]
        return scaled, *head, *(None,) * 6


def _sum_of_head(
    chunk: Tensor, source: Tensor, share: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Add the part of a chunk to the gradients of a head that trains. Tokens without a label add nothing.

    Args:
        chunk: (n, vocabulary), the gradient of the logits.
        source: (n, hidden).
        share: (n,), the weight of each label, or whether there is one.
    """
    there = share.to(chunk.dtype)
    if weight is not None:
        # a weight in fp32 would be rounded before the multiplication
        scaled = source * (there if share.dtype == torch.bool else share)[:, None]
        weight += chunk.T @ scaled.to(chunk.dtype)
    if bias is not None:
        bias += chunk.T @ there


def softmax_in_place(
    logits: Tensor, labels: Tensor, softcap: float | None, wide: torch.dtype, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood (n,) in `wide`, and whether the label has the highest logit (n,)
    bool.

    Args:
        logits: (n, vocabulary). With `differentiate`, their gradient (softmax - onehot) replaces them.
        labels: (n,). The result for a label of -100 has no meaning.
        softcap: applied to the logits first.
    """
    target = labels.clamp(min=0)[:, None]
    capped = logits if softcap is None else softcap * torch.tanh(logits.to(wide) / softcap)
    highest, best = capped.max(dim=-1, keepdim=True)
    p = torch.softmax(capped, dim=-1, dtype=wide)  # one kernel, fp32 inside
    # log Z from the largest probability, which is at least 1 / vocabulary. The label's may underflow to 0.
    log_z = highest.to(wide) - p.gather(1, best).log()
    nll = log_z - capped.gather(1, target).to(wide)
    if differentiate:
        if (
            torch.compiler.is_compiling()
        ):  # Inductor fuses the comparison, which would need two more kernels in eager mode
            p = p - (torch.arange(logits.shape[1], device=logits.device) == target).to(wide)
        else:
            p.scatter_add_(1, target, torch.full_like(nll, -1))
        if softcap is not None:
            p *= 1 - (capped / softcap).square()
        logits.copy_(p)
    return nll[:, 0], best[:, 0] == labels


def _in_one_kernel(
    logits: Tensor, labels: Tensor, softcap: object, wide: object, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """Compute `softmax_in_place` without a softcap in one Triton kernel, in float32."""
    return triton_loss.softmax_in_place(logits, labels, differentiate)


@functools.cache
def _compiled() -> Any:
    return torch.compile(softmax_in_place, fullgraph=True)
