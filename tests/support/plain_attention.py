"""Attention in plain operations, for comparison with the kernels, and tiny models and batches."""

import math
from itertools import pairwise

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.kernels.attention_functions import without_mask

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 256}


def tiny(family: str, **fields):
    """A model of two layers in float32, with windows of 8 tokens where the family has any, and its name."""
    config = AutoConfig.for_model(
        family, **{**SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **fields}
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)


def by_document(query, key, value, *, scale, window, softcap, borders, longest):
    """Compute the attention of one document at a time with a mask."""
    rows, tokens = query.shape[:2]
    ends = range(0, rows * tokens + 1, tokens) if borders is None else borders.tolist()
    flat = [
        tensor.reshape(1, rows * tokens, *tensor.shape[2:]).transpose(1, 2) for tensor in (query, key, value)
    ]
    parts = []
    for start, end in pairwise(ends):
        q, k, v = (tensor[:, :, start:end] for tensor in flat)
        at = torch.arange(end - start, device=query.device)
        back = at[:, None] - at[None]
        seen = (back >= 0) & (back < (window or math.inf))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        parts.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v)
    return torch.cat(parts, dim=2).transpose(1, 2).reshape(rows, tokens, *query.shape[2:])


AttentionInterface.register("by_document", without_mask(by_document))


def batch(packed: bool) -> dict:
    """Documents of 21, 13 and 1 tokens: padded on the right, or end to end."""
    made = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 128, (length,), generator=made).tolist() for length in (21, 13, 1)]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packed)
    return collate([{"input_ids": row, "labels": row} for row in rows])


def loss_and_gradients(model, inputs: dict) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(**inputs, use_cache=False).loss
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
