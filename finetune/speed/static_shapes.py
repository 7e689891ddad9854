"""Pad batches to one fixed shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sized
from typing import Any

import torch

from finetune.data.loss_mask import WEIGHTS
from finetune.distributed import launch_environment


def one_shape(rows: int, documents: Iterable[Sized], length: int) -> tuple[int, int, int]:
    """Return the shape of every flattened batch: tokens, examples with fillers, and the longest example.

    Args:
        rows: number of packed sequences in a batch.
        documents: the examples of each packed sequence of the data.
        length: tokens of a full sequence.
    """
    return rows * length, rows * max(map(len, documents)) + rows + 1, length


def tokens_of(shape: tuple[int, int, int], parts: int) -> int:
    """Return the tokens of a part if a batch of this shape is divided into parts.

    A part can hold the longest example. Its length is a multiple that TransformerEngine's GEMMs support.
    """
    tokens, _, longest = shape
    part = max(longest, math.ceil(tokens / parts))
    return math.ceil(part / launch_environment.TE_TOKENS) * launch_environment.TE_TOKENS


def fixed_shape(inputs: dict[str, Any], tokens: int, documents: int, longest: int) -> dict[str, Any]:
    """Fill a flattened batch up to `tokens` tokens with filler examples that do not contribute to the loss.

    Compiled code then sees one shape: always `documents` + 1 borders, and `longest` as the longest example.
    No filler is longer than `longest`, because kernels would leave its end uninitialized, also in gradients.
    """
    length = inputs["input_ids"].shape[1]
    missing, borders = tokens - length, inputs["cu_seq_lens_q"]
    pad = torch.nn.functional.pad
    filled = dict(inputs)
    filled["input_ids"] = pad(inputs["input_ids"], (0, missing))
    filled["labels"] = pad(inputs["labels"], (0, missing), value=-100)
    if WEIGHTS in inputs:
        filled[WEIGHTS] = pad(inputs[WEIGHTS], (0, missing))
    counted = torch.arange(missing, device=inputs["position_ids"].device)[None]
    filled["position_ids"] = torch.cat([inputs["position_ids"], counted % longest], dim=1)
    number = (len(borders) - 1 + counted // longest).to(inputs["seq_idx"].dtype)
    filled["seq_idx"] = torch.cat([inputs["seq_idx"], number], dim=1)
    starts = torch.arange(length, tokens, longest, dtype=borders.dtype, device=borders.device)
    borders = torch.cat([borders, starts[1:]])  # the first filler starts at the end of the batch
    borders = pad(borders, (0, documents + 1 - len(borders)), value=tokens)  # other fillers have no tokens
    filled["cu_seq_lens_q"] = filled["cu_seq_lens_k"] = borders
    filled["max_length_q"] = filled["max_length_k"] = longest
    return filled
