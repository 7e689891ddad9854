"""The chunked cross-entropy of a frozen output head, with the gradient of the hidden states in fp8.

    z = h W^T     in 16 bits, so the loss equals the loss of `chunked_cross_entropy`
    dh = g W      g = softmax(z) - onehot is rounded to fp8 row by row, and W column by column

Both factors are rounded as a whole. With an exact W[label] next to a rounded softmax(z) W, an error remains
where the gradient should vanish: where the model is sure of the label. Two small models then ended with a
validation loss that was 1 to 2% higher (benchmarks/LOG.md). The head stays as it is loaded. Each call rounds
it. Without a gradient, `chunked_cross_entropy` computes the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finetune.autoconfig import loss_support
from finetune.autoconfig.memory_estimate import CHUNK_BYTES, chunk_rows
from finetune.data.loss_mask import IGNORED
from finetune.kernels.kernel_limits import FP8_MULTIPLE
from finetune.kernels.ops import LARGEST, quantize_rows, transpose
from finetune.quantization.fp8_linear import has_gemm, product
from finetune.speed.loss_weights import scaled_gradient

triton_loss: Any = None
if torch.cuda.is_available():
    from finetune.kernels import triton_loss

BYTES_PER_LOGIT = 3  # in 16 bits, and its gradient in 8 bits


def unsupported_reason(weight: Tensor, *, bias: bool, softcap: float | None) -> str:
    """Return why an fp8 GEMM can't compute the gradient of the hidden states; the empty string if it can.

    `autoconfig.loss_support.fp8_unsupported_reason` applies the same rules to a config.

    Args:
        weight: the weight of the output head, (vocabulary, hidden).
        bias: whether the head has a bias.
        softcap: the softcap of the model's logits, or `None`.
    """
    obstacles = {
        f"the output head is in {str(weight.dtype).removeprefix('torch.')}": weight.dtype != torch.bfloat16,
        loss_support.HEAD_TRAINS: weight.requires_grad,
        "the output head has a bias": bias,
        loss_support.HAS_SOFTCAP: softcap is not None,
        loss_support.ODD_SIZE: any(size % FP8_MULTIPLE for size in weight.shape),
        "fp8 GEMMs need a GPU of compute capability 8.9 or later": not has_gemm(weight.device),
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), "")


class Fp8OutputHead(torch.autograd.Function):
    """Sums of the negative log-likelihood, entropy and correct predictions, as in `TokenLoss`.

    The forward pass computes the gradient of the hidden states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (rows, hidden)
        weight: Tensor,  # (vocabulary, hidden)
        labels: Tensor,  # (n,)
        weights: Tensor | None,  # (n,) of the labels; `None`: 1
        picked: Tensor | None,  # (n,) indices of tokens with a label; `None`: all tokens
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, vocabulary, has_label = len(labels), len(weight), labels != IGNORED
        share = has_label if weights is None else torch.where(has_label, weights.float(), 0)
        codes, scale = _columns_in_fp8(weight)
        nll, entropy = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(2))
        correct = labels.new_empty(rows, dtype=torch.bool)
        gradient = hidden.new_empty(rows, hidden.shape[1])
        size = chunk_rows(rows, CHUNK_BYTES // (vocabulary * BYTES_PER_LOGIT))
        logits = hidden.new_empty(size, vocabulary)
        step = triton_loss.gradient_in_fp8 if hidden.is_cuda else gradient_in_fp8
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            source = hidden[part] if picked is None else hidden[picked[part]]
            chunk = torch.mm(source, weight.T, out=logits[: len(source)])
            nll[part], correct[part], entropy[part], g, g_scale = step(chunk, labels[part])
            gradient[part] = product(g, g_scale, codes, scale, hidden.dtype, exact_sum=True)
        ctx.rows = len(hidden)
        ctx.save_for_backward(gradient, share, picked)
        ctx.set_materialize_grads(False)
        total, right = torch.where(has_label, nll, 0), (correct & has_label).sum()
        total = total.sum() if weights is None else (total * share).sum()
        entropy = torch.where(has_label, entropy, 0).sum()
        ctx.mark_non_differentiable(right, entropy)
        return total, entropy, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        gradient, share, picked = ctx.saved_tensors
        return scaled_gradient(gradient, share, picked, gradients[0], ctx.rows), None, None, None, None


def _columns_in_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return W^T [hidden, vocabulary] in e4m3, and the scale of each of its rows [hidden, 1]."""
    scale = torch.linalg.vector_norm(weight, torch.inf, dim=0, dtype=torch.float32) / LARGEST
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    whole = torch.full((len(weight),), LARGEST, device=weight.device)  # a scale of 1 for each row of W
    return transpose(quantize_rows(weight, 1 / scale, whole)[0]), scale[:, None]


def gradient_in_fp8(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the loss needs of logits, and their gradient in fp8.

    Args:
        logits: (n, vocabulary) in 16 bits or float32. They stay as they are.
        labels: (n,) int64. Results of rows with label -100 have no meaning.

    Returns:
        nll: the negative log-likelihood, (n,) float32.
        correct: whether the label has the highest logit, (n,) bool.
        entropy: in nats, (n,) float32.
        codes: softmax - onehot, divided by `scale`, (n, vocabulary) e4m3.
        scale: the scale of each row, (n, 1) float32.
    """
    wide, target = logits.float(), labels.clamp(min=0)[:, None]
    log_z = wide.logsumexp(1, keepdim=True)
    gradient = (wide - log_z).exp()
    finite = wide.clamp(min=torch.finfo(wide.dtype).min)  # the probability of -inf is 0, and adds nothing
    entropy = log_z - (gradient * finite).sum(1, keepdim=True)
    gradient.scatter_add_(1, target, torch.full_like(log_z, -1))
    nll, correct = log_z - wide.gather(1, target), wide.argmax(1) == labels
    return nll[:, 0], correct, entropy[:, 0], *quantize_rows(gradient)
