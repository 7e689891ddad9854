"""Weight the loss of each token.

The loss of a step is the sum of weight times loss, divided by the sum of weights. TRL and the chunked loss
divide by the number of labels of the step, so `normalize` scales the weights until their sum is this number.
A batch without weights stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from finetune.data.loss_mask import IGNORED, WEIGHTS


def collated(collate: Callable[..., dict[str, Any]], rows: list[Any]) -> dict[str, Any]:
    """Collate a batch, and add the weights of its labels. The collator of TRL ignores them."""
    batch = collate(rows)
    if WEIGHTS not in rows[0]:
        return batch
    weights = torch.zeros(batch["labels"].shape, dtype=torch.float32)
    if len(weights) != len(rows):  # a flattened batch
        flat = [weight for row in rows for weight in row[WEIGHTS]]
        weights[0, : len(flat)] = torch.tensor(flat)
    else:
        for row, own in zip(rows, weights, strict=True):
            own[: len(row[WEIGHTS])] = torch.tensor(row[WEIGHTS])
    return {**batch, WEIGHTS: weights}


def normalize(
    batches: list[dict[str, Any]], device: torch.device, sum_over: Callable[[Tensor], Tensor]
) -> None:
    """Scale the weights of a step so that their sum is the number of its labels.

    They become integers with the bits of fp64 numbers, because DeepSpeed and FSDP2 round the floating-point
    numbers of a batch to bf16.

    Args:
        batches: the micro-batches of a step in this process.
        sum_over: sums a tensor over the processes whose loss has one divisor.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        has_label = batch["labels"][:, 1:] != IGNORED
        weights = (batch[WEIGHTS][:, 1:] * has_label).double()
        totals += torch.stack([has_label.sum().double(), weights.sum()]).to(device)
    labels, weight = sum_over(totals)
    for batch in batches:
        factor = (labels / weight.clamp(min=torch.finfo(torch.float64).tiny)).to(batch[WEIGHTS].device)
        batch[WEIGHTS] = (batch[WEIGHTS].double() * factor).view(torch.int64)


def of_next(integers: Tensor) -> Tensor:
    """Return the weight of the label that each token predicts, from the weights of `normalize`."""
    return torch.nn.functional.pad(integers.view(torch.float64)[:, 1:], (0, 1))


def with_fused_head(model: Callable[..., Any], integers: Tensor) -> Callable[..., Any]:
    """Return a function that calls a model with TRL's fused head, and weights the probabilities it returns.

    Args:
        integers: the weights of `normalize`.
    """
    weights = integers.view(torch.float64)

    def call(*args: object, **inputs: object) -> Any:
        outputs = model(*args, **inputs)
        of_labels = weights[:, 1:].to(outputs.log_probs)
        before = outputs.log_probs.shape[1] - of_labels.shape[1]  # virtual tokens of a prompt
        outputs.log_probs = outputs.log_probs * torch.nn.functional.pad(of_labels, (before, 0))
        return outputs

    return call


def scaled_gradient(
    gradient: Tensor, share: Tensor, picked: Tensor | None, by: Tensor | None, rows: int
) -> Tensor | None:
    """Return the gradient of all hidden states from that of the tokens with a label.

    Args:
        gradient: (n, hidden), of the tokens with a label.
        share: (n,), the weight of each label in float32 or float64, or whether there is one in bool.
        picked: (n,), the indices of the tokens with a label in int64, or `None` for all tokens.
        by: the gradient of the loss, a scalar, or `None`.
        rows: the number of hidden states.

    Returns:
        (rows, hidden) in the dtype of `gradient`, or `None` if the loss has no gradient.
    """
    if by is None:
        return None
    # (n, 1), because a number would be rounded to the gradient's dtype before the multiplication
    weight = (torch.where(share, by, 0) if share.dtype == torch.bool else share * by)[:, None]
    scaled = torch.mul(gradient, weight, out=torch.empty_like(gradient))
    if picked is None:
        return scaled
    return scaled.new_zeros(rows, scaled.shape[1]).index_copy_(0, picked, scaled)
