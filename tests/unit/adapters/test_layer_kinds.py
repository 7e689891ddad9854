"""The kinds of layers that each type of PEFT changes, tried on PEFT itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.models import checkpoint_headers, module_names
from finetune.recipe import adapter_types

WIDTH = 64
LAYERS = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "Conv1D": lambda: Conv1D(WIDTH, WIDTH),
    "Embedding": lambda: nn.Embedding(WIDTH, WIDTH),
    "Conv1d": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
}
# What PEFT wants beside its defaults for layers so small
OPTIONS: dict[str, dict[str, Any]] = {
    "adalora": {"total_step": 10}, "ia3": {"feedforward_modules": []}, "oft": {"r": 4, "oft_block_size": 0},
    "c3a": {"block_size": 4}, "vblora": {"vector_length": 4}, "trainable_tokens": {"token_indices": [1]},
    "fourierft": {"n_frequency": 8}, "waveft": {"n_frequency": 8}, "miss": {"r": 4}, "shira": {"r": 4},
    "psoft": {"r": 4}, "road": {"group_size": 8}, "frod": {"progressbar": False},
}  # fmt: skip
TYPES = sorted(
    {kind.peft for kind in adapter_types.all_types().values() if not (kind.refused or kind.prompt)} - {""}
)


class Net(nn.Module):
    """A layer of one kind behind an embedding, in front of a linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer = LAYERS[kind]()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.kind == "Embedding":
            return self.last(self.layer(ids))
        hidden = self.first(ids)
        if self.kind == "Conv1d":
            return self.last(self.layer(hidden.transpose(1, 2)).transpose(1, 2))
        return self.last(self.layer(hidden))


def adapt(peft: str, kind: str) -> Any:
    """A network with an adapter of PEFT's type on its layer."""
    configs = {str(name.value).lower(): config for name, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return get_peft_model(Net(kind), configs[peft](target_modules=["layer"], **OPTIONS.get(peft, {})))


def trains(peft: str, kind: str) -> bool:
    """Whether PEFT's type changes such a layer, and gradients reach it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of layers that it changes without use
            adapted = adapt(peft, kind)
            adapted(torch.arange(8)[None]).square().sum().backward()
    except (ValueError, TypeError, NotImplementedError, RuntimeError, AttributeError, KeyError):
        return False
    return any(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("peft", TYPES)
def test_layer_kinds_of_a_type_are_those_that_peft_adapts(peft: str, kind: str) -> None:
    if peft == "trainable_tokens" and kind == "Linear":
        pytest.skip("PEFT takes a linear layer's outputs for tokens there")
    known = adapter_types.layer_kinds(peft)
    assert trains(peft, kind) == (known is None or kind in known)


@pytest.mark.parametrize("peft", ["lily", *TYPES])
def test_output_of_a_token_depends_on_this_token_alone(peft: str) -> None:
    """Otherwise training sees the answer, packed examples see each other, and padding changes a loss."""
    torch.manual_seed(0)
    kind = {"trainable_tokens": "Embedding", "ln_tuning": "LayerNorm"}.get(peft, "Linear")
    ids = torch.arange(16).view(2, 8)
    later = ids.clone()
    later[0, 4:] += 16
    later[1] += 16
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of some types, and torch of FRoD's sparse tensors
        adapted = adapt(peft, kind).eval()
        before = adapted(ids)
        for parameter in adapted.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.requires_grad)
        first, second = adapted(ids), adapted(later)
    assert not torch.equal(before, first), "the adapter has an effect"
    alone = torch.allclose(first[0, :4], second[0, :4], atol=1e-6)
    assert alone == (peft != "lily"), "recipe/adapter_types.py refuses Lily for this reason"


@pytest.mark.parametrize("peft", [one for one in TYPES if one != "ln_tuning"])
def test_tensors_that_a_type_saves_are_accepted(peft: str, tmp_path) -> None:
    """Some types also save integers. A run of such a type can be opened again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of some types
        adapted = adapt(peft, "Embedding" if peft == "trainable_tokens" else "Linear")
        adapted.save_pretrained(tmp_path)
    saved = checkpoint_headers.stored(tmp_path)
    assert saved and not checkpoint_headers.adapter_problems(saved)


def test_kind_of_a_layer_that_adapters_fail_on_is_its_class() -> None:
    class Positions(nn.Embedding):
        def forward(self, attention_mask: torch.Tensor) -> torch.Tensor:
            return super().forward(attention_mask.cumsum(1) - 1)

    class TopKRouter(nn.Linear):
        pass

    found = {
        module_names.kind_of(module): module
        for module in (
            Positions(4, 4), TopKRouter(4, 4), nn.Conv1d(4, 4, 1, groups=4), nn.SiLU(), nn.Linear(4, 4),
            nn.Embedding(4, 4), Conv1D(4, 4), nn.LayerNorm(4),
        )
    }  # fmt: skip
    assert list(found) == [
        "Positions", "TopKRouter", "grouped Conv1d", "no weight", "Linear", "Embedding", "Conv1D",
        "LayerNorm",
    ]  # fmt: skip
