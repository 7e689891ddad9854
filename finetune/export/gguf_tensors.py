"""Plan the tensors of a GGUF file: which tensors of the checkpoint become which tensor of llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from finetune.core.errors import Problem, UserError
from finetune.core.model_config import ModelConfig
from finetune.export import gguf_families
from finetune.export.gguf_families import Family, GgufTensor, in_pairs, rope_tensors

EXPERT = re.compile(r"(?P<layer>.*\.)experts\.(?P<number>\d+)\.(?P<part>\w+)\.weight")
FUSED = re.compile(r"(?P<layer>.*\.)experts\.(?P<part>gate_up_proj|down_proj)(\.weight)?")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def plan(names: Sequence[str], config: ModelConfig, family: Family) -> list[GgufTensor]:
    """Return the tensors of the GGUF file for the tensors of a checkpoint.

    Raises:
        UserError: llama.cpp has no tensor for one of them (exit 2).
    """
    table = gguf_families.tensor_names(config, family)
    planned, unknown = list[GgufTensor](), list[str]()
    tied = config.tie_word_embeddings
    for name, sources, compute in sorted(_parts(names)):
        if tied and name == "lm_head.weight":
            continue
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            unknown.append(name)
            continue
        step = _layout(name, config, family)
        planned.append(GgufTensor(found, sources, partial(_both, compute, step)))
    if unknown:
        raise UserError(
            Problem(
                "llama.cpp has no tensor for a weight of the model",
                found=", ".join(unknown[:5]),
                fix="--to vllm",
                code="export",
            )
        )
    planned += [
        GgufTensor(name, (), partial(_constant, value)) for name, value in rope_tensors(config).items()
    ]
    return planned


def _parts(names: Sequence[str]) -> list[tuple[str, tuple[str, ...], Any]]:
    """Return the name in llama.cpp's spelling, the tensors and the function of each part of the model.

    llama.cpp has one tensor for all experts of a layer. Checkpoints have one for each expert, or one for all
    gate and up projections.
    """
    found, experts = list[tuple[str, tuple[str, ...], Any]](), dict[str, dict[int, str]]()
    for name in names:
        if single := EXPERT.fullmatch(name):
            part = MIXTRAL.get(single["part"], single["part"])
            whole = f"{single['layer']}experts.{part}.weight".replace("block_sparse_moe", "mlp")
            experts.setdefault(whole, {})[int(single["number"])] = name
        elif fused := FUSED.fullmatch(name):
            if fused["part"] == "down_proj":
                found.append((f"{fused['layer']}experts.down_proj.weight", (name,), _first))
            else:
                for index, part in enumerate(("gate_proj", "up_proj")):
                    whole = f"{fused['layer']}experts.{part}.weight"
                    found.append((whole, (name,), partial(_half, index)))
        else:
            found.append((name, (name,), _first))
    for whole, numbered in experts.items():
        found.append((whole, tuple(numbered[number] for number in sorted(numbered)), torch.stack))
    return found


def _layout(name: str, config: ModelConfig, family: Family) -> Any:
    """Return what llama.cpp expects to be done to a tensor."""
    kind = re.search(r"self_attn\.(q|k)_proj\.(weight|bias)$", name)
    if family.permuted and kind:
        return partial(
            in_pairs, heads=config.num_attention_heads if kind[1] == "q" else config.num_key_value_heads
        )
    if family.norm_offset and name.endswith("norm.weight"):
        return partial(torch.add, other=torch.tensor(family.norm_offset))
    return None


def _both(
    compute: Callable[[list[torch.Tensor]], torch.Tensor],
    step: Callable[[torch.Tensor], torch.Tensor] | None,
    tensors: list[torch.Tensor],
) -> torch.Tensor:
    found = compute(tensors)
    return step(found) if step else found


def _first(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _half(index: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].chunk(2, dim=-2)[index]


def _constant(value: torch.Tensor, _: list[torch.Tensor]) -> torch.Tensor:
    return value
