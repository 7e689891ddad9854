"""Cross-entropy on an output head, in chunks of tokens: two matrix products, and no logits kept.

The gradient of the hidden states is final as soon as a chunk's logits are known:
dh = (softmax(z) - onehot) W. Forward computes it next to the loss, and keeps it, (tokens, hidden), in place
of the logits. Backward multiplies by a number. A head that trains takes a third product,
dW = (softmax(z) - onehot)^T h, summed over chunks in fp32.

What others do: TRL's fused head computes the logits again in backward, three products. Liger's
`LigerFusedLinearCrossEntropyLoss` has the same two, in chunks whose logits are no larger than the hidden
states (512 of 16,384 tokens for an 8B Llama), which makes the products narrow; it asks the device how many
labels there are, and drops no row without one. `torch.nn.functional.linear_cross_entropy` (torch >= 2.13) is
plain cross-entropy unless told how to chunk, and drops none either.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from transformers.utils.generic import ModelOutput

from finetune.autoconfig.memory_estimate import CHUNK_BYTES, chunk_rows, logit_bytes
from finetune.core import upstream_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

triton_loss: Any = None
if torch.cuda.is_available():
    from finetune.kernels import triton_loss

IGNORED = -100
FEW = 64  # of which one row without a label is computed along: cheaper than picking the others out


@dataclass
class TokenLoss(ModelOutput):
    """Sums over the tokens that have a label; zero-dimensional tensors on the device."""

    nll: torch.Tensor | None = None
    """fp32 (fp64 of fp64 logits), with gradient."""
    entropy: torch.Tensor | None = None
    """Of the predicted distributions, nats; not for a head with a bias or softcap, nor without gradient."""
    correct: torch.Tensor | None = None
    """Tokens whose label has the highest logit, int64."""


def counted(collate: Callable[..., dict[str, Any]], rows: list[Any]) -> dict[str, Any]:
    """A collated batch with its numbers of labels and tokens, counted on the CPU.

    Counted in the loader's process, before anything is on a device: a GPU that is asked how many rows have a
    label answers when all its work is done, and stands still until the next is queued.
    """
    batch = collate(rows)
    return {**batch, **dict(zip(("num_labels", "num_tokens"), numbers(batch), strict=True))}


def numbers(batch: dict[str, Any]) -> tuple[int, int]:
    """Labels that a token predicts, and tokens without padding. Waits for the device that holds them."""
    labels = int((batch["labels"][:, 1:] != IGNORED).sum())
    mask = batch.get("attention_mask")
    return labels, batch["input_ids"].numel() if mask is None else int(mask.sum())


def computes_all(rows: int, num_labels: int) -> bool:
    """Whether so few rows lack a label that all are computed where they lie, and nothing is copied."""
    return (rows - num_labels) * FEW <= rows


class Head(NamedTuple):
    """An output head: what makes logits of hidden states."""

    weight: Tensor
    """(vocabulary, hidden); with a gradient if it trains."""
    bias: Tensor | None = None
    """(vocabulary,), the same."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118)."""


def token_loss(
    hidden: Tensor, head: Head, labels: Tensor, *, num_labels: int | None = None, compiled: bool = False
) -> TokenLoss:
    """Sum of -log softmax(h W^T + b)[label] over the rows with a label: `cross_entropy(reduction="sum")`.

    Softmax in fp32 (fp64 for fp64), products in autocast's dtype or else the hidden states'.

    Args:
        hidden: (..., hidden), of which row i predicts `labels`[i].
        labels: (...), int64; -100 where there is none.
        num_labels: labels that are not -100; `None` asks the device, and waits for it.
    """
    weight, bias, softcap = head
    device = weight.device
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
    hidden = hidden.to(device, dtype).flatten(0, -2)
    labels = labels.to(device).flatten()
    picked = None
    if num_labels is None:
        num_labels = int((labels != IGNORED).sum())
    if not computes_all(len(labels), num_labels):
        # sorted and cut, for `nonzero` would wait to learn how many there are
        picked = (labels == IGNORED).to(torch.uint8).argsort(stable=True)[:num_labels]
        labels = labels[picked]
    with torch.autocast(device.type, enabled=False):
        trains = any(one is not None and one.requires_grad for one in (hidden, weight, bias))
        given = weight, bias, labels, picked, softcap, compiled, torch.is_grad_enabled() and trains
        made: Any = _OutputHead.apply(hidden, *given)
        nll, entropy, correct = made
    return TokenLoss(nll=nll, entropy=entropy, correct=correct)


class _OutputHead(torch.autograd.Function):
    """Negative log-likelihood whose forward computes all gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (rows, hidden)
        weight: Tensor,  # (vocabulary, hidden)
        bias: Tensor | None,  # (vocabulary,)
        labels: Tensor,  # (n,)
        picked: Tensor | None,  # (n,) rows that have a label; all of them if `None`
        softcap: float | None,
        compiled: bool,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        rows, vocabulary, has_label = len(labels), len(weight), labels != IGNORED
        summed = [  # of weight and bias
            torch.zeros_like(one, dtype=wide) if needed and differentiate and one is not None else None
            for one, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        ctx.dtypes = [one if one is None else one.dtype for one in (weight, bias)]
        weight, bias = weight.to(hidden.dtype), bias if bias is None else bias.to(hidden.dtype)
        sizes = {"narrow": hidden.element_size(), "wide": wide.itemsize}
        one_kernel = hidden.is_cuda and softcap is None and wide == torch.float32
        held = logit_bytes(compiled=compiled or one_kernel, capped=softcap is not None, **sizes)
        size = chunk_rows(rows, CHUNK_BYTES // (vocabulary * held))
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
            ):  # rows with a label are never as many
                upstream_private.mark_dynamic(one)
            nll[part], correct[part] = step(chunk, wanted, softcap, wide, differentiate)
            if differentiate:
                torch.mm(chunk, weight, out=gradient[part])
                _sum_of_head(chunk, source, has_label[part], *summed)
            if entropy is not None:
                # H = log Z - sum p z = nll - h (p - onehot) W: the second product has it
                entropy[part] = nll[part] - torch.linalg.vecdot(source.to(wide), gradient[part].to(wide))
        ctx.rows = len(hidden)
        ctx.save_for_backward(gradient, has_label, picked, *summed)
        ctx.set_materialize_grads(False)
        total, right = torch.where(has_label, nll, 0).sum(), (correct & has_label).sum()
        ctx.mark_non_differentiable(right)
        if entropy is not None:
            entropy = torch.where(has_label, entropy, 0).sum()
            ctx.mark_non_differentiable(entropy)
        return total, entropy, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        gradient, has_label, picked, *summed = ctx.saved_tensors
        if gradients[0] is None:
            return (None,) * 8
        # (n, 1) and not a number: that one would be rounded to the gradient's dtype before the product
        weight = torch.where(has_label, gradients[0], 0)[:, None]
        scaled = torch.mul(gradient, weight, out=torch.empty_like(gradient))
        if picked is not None:
            scaled = scaled.new_zeros(ctx.rows, scaled.shape[1]).index_copy_(0, picked, scaled)
        head = [
            None if one is None else (one * gradients[0]).to(dtype)
            for one, dtype in zip(summed, ctx.dtypes, strict=True)
        ]
        return scaled, *head, *(None,) * 5


def _sum_of_head(
    chunk: Tensor, source: Tensor, has_label: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Add a chunk's part to the gradients of a head that trains; of rows without a label there is none.

    Args:
        chunk: (n, vocabulary), gradient of the logits; source: (n, hidden).
    """
    there = has_label.to(chunk.dtype)
    if weight is not None:
        weight += chunk.T @ (source * there[:, None])
    if bias is not None:
        bias += chunk.T @ there


def softmax_in_place(
    logits: Tensor, labels: Tensor, softcap: float | None, wide: torch.dtype, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood (n,) in `wide`, and whether the label is the highest logit (n,) bool.

    Args:
        logits: (n, vocabulary); holds their gradient afterwards, softmax - onehot, if `differentiate`.
        labels: (n,); where -100, numbers mean nothing.
        softcap: applied to the logits first.
    """
    target = labels.clamp(min=0)[:, None]
    capped = logits if softcap is None else softcap * torch.tanh(logits.to(wide) / softcap)
    highest, best = capped.max(dim=-1, keepdim=True)
    p = torch.softmax(capped, dim=-1, dtype=wide)  # one kernel, fp32 inside
    # log Z from the largest probability, which is at least 1 / vocabulary: the label's may be nothing at all
    log_z = highest.to(wide) - p.gather(1, best).log()
    nll = log_z - capped.gather(1, target).to(wide)
    if differentiate:
        if (
            torch.compiler.is_compiling()
        ):  # Inductor fuses the comparison; eager would make two more passes of it
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
