"""What is done about TransformerEngine's conversion, of which tests/gpu/test_multi_gpu.py makes a run."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.autoconfig import launch_settings, mixed_precision
from finetune.core.errors import UserError
from finetune.distributed import transformer_engine_layers
from finetune.hardware import detection
from finetune.recipe.schema import Train
from finetune.training import stopping

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def small(*, tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=96, tie_word_embeddings=tied))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")


def converted(model: torch.nn.Module) -> None:
    """As Accelerate does: every linear layer made anew, with weights of its own."""
    for name, child in model.named_children():
        if isinstance(child, torch.nn.Linear):
            made = torch.nn.Linear(child.in_features, child.out_features, bias=False)
            made.weight.data.copy_(child.weight)
            setattr(model, name, made)
        else:
            converted(child)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_stays_what_it_was(tied: bool) -> None:
    """Also while other layers are made anew: then its weights are in the model, for DDP and the optimizer."""
    model = small(tied=tied)
    layer, head = model.model.layers[0].mlp.down_proj, model.lm_head
    before, names = sum(p.numel() for p in model.parameters()), [*model.state_dict()]
    with transformer_engine_layers.head_kept(model):
        converted(model)
        assert sum(p.numel() for p in model.parameters()) == before and [*model.state_dict()] == names
    assert sum(p.numel() for p in model.parameters()) == before and [*model.state_dict()] == names
    assert model.model.layers[0].mlp.down_proj is not layer and model.lm_head is head
    assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)


def test_without_such_a_launch_nothing_is_kept() -> None:
    model = small(tied=True)
    with transformer_engine_layers.head_kept(model):
        converted(model)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@pytest.mark.usefixtures("launched")
def test_no_checkpoint_leaves_out_what_its_layers_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "fp8_missing", lambda *_: "")
    keeper = launch_settings.read(detection.Hardware("cuda", "NVIDIA H100", 1, (9, 0), 79.6, 8)).keeper
    stopping.check(Train(), None, keeper)
    with pytest.raises(UserError, match="state that TransformerEngine keeps") as raised:
        stopping.check(Train(save_strategy="steps"), None, keeper)
    assert raised.value.code == 3


def test_what_its_layers_remember_is_not_saved() -> None:
    class Remembers(torch.nn.Linear):
        def get_extra_state(self) -> torch.Tensor:
            return torch.zeros(3)

        def set_extra_state(self, state: torch.Tensor) -> None:
            raise NotImplementedError

    model = torch.nn.Sequential(Remembers(2, 2, bias=False))
    assert [*model.state_dict()] == ["0.weight", "0._extra_state"]
    assert [*transformer_engine_layers.weights(model)] == ["0.weight"]
