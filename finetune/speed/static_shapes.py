"""Pad batches to one fixed shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sized


def one_shape(rows: int, documents: Iterable[Sized], length: int) -> tuple[int, int, int]:
    """Of every flattened batch: tokens, documents with those that fill it up, and tokens of the longest.

    Args:
        rows: packed rows of a batch.
        documents: of each packed row of the data.
        length: tokens of a full row.
    """
    return rows * length, rows * max(map(len, documents)) + rows + 1, length


def tokens_of(shape: tuple[int, int, int], parts: int) -> int:
    """Tokens of a batch of that shape that is divided in so many parts: room for a document at least, and a
    multiple that TransformerEngine's products take, too."""
    tokens, _, longest = shape
    part = max(longest, math.ceil(tokens / parts))
    return math.ceil(part / launch_environment.TE_TOKENS) * launch_environment.TE_TOKENS


def fixed_shape(inputs: dict[str, Any], tokens: int, documents: int, longest: int) -> dict[str, Any]:
    """A flattened batch filled up to `tokens` tokens by more documents, which carry no loss.

    So that compiled code sees one shape: the borders are `documents` + 1 in number, whatever the batch holds,
    and the longest document is said to be `longest`. No filler is longer: kernels for documents look no
    further, and leave what stands there as they found it, in gradients too.
    """
    given = inputs["input_ids"].shape[1]
    missing, borders = tokens - given, inputs["cu_seq_lens_q"]
    pad = torch.nn.functional.pad
    filled = dict(inputs)
    filled["input_ids"] = pad(inputs["input_ids"], (0, missing))
    filled["labels"] = pad(inputs["labels"], (0, missing), value=-100)
    counted = torch.arange(missing, device=inputs["position_ids"].device)[None]
    filled["position_ids"] = torch.cat([inputs["position_ids"], counted % longest], dim=1)
    number = (len(borders) - 1 + counted // longest).to(inputs["seq_idx"].dtype)
    filled["seq_idx"] = torch.cat([inputs["seq_idx"], number], dim=1)
    starts = torch.arange(given, tokens, longest, dtype=borders.dtype, device=borders.device)
    borders = torch.cat([borders, starts[1:]])  # the first starts where the batch ends
    borders = pad(borders, (0, documents + 1 - len(borders)), value=tokens)  # the rest have no tokens
    filled["cu_seq_lens_q"] = filled["cu_seq_lens_k"] = borders
    filled["max_length_q"] = filled["max_length_k"] = longest
    return filled
