"""`finetune.speed.apply` in loops that are not finetune's: a hand-written one, and TRL's SFTTrainer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, OFTConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import finetune
from finetune.core.errors import UserError
from support.fused_models import IDS, TYPES, adapted, ranked, step, worst
from support.paths import MODEL


def storages(model: Any) -> list[int]:
    return [p.untyped_storage().data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("kind", TYPES)
def test_apply_and_remove_give_the_gradients_and_the_state_of_peft(kind: str) -> None:
    model = adapted(TYPES[kind](), dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss, gradients = step(model)
    assert finetune.speed.apply(model) is model
    fused_loss, fused_gradients = step(model)
    assert abs(float(fused_loss - loss)) < 1e-10 and worst(fused_gradients, gradients) < 1e-10
    assert finetune.speed.remove(model) is model
    own_loss, own_gradients = step(model)
    assert float(own_loss) == float(loss) and worst(own_gradients, gradients) == 0
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert len(set(storages(model))) == len(storages(model)), "no weight shares memory with another"
    assert not any("finetune" in name or name == "forward" for m in model.modules() for name in vars(m))
    assert not any(m._forward_pre_hooks for m in model.modules())


def unfreeze(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "layers.0.mlp" in name or "q_proj.base_layer" in name:
            parameter.requires_grad_(True)


def load_other_weights(model: Any) -> None:
    held = model.state_dict()
    model.load_state_dict({name: value + 0.01 * ("lora" not in name) for name, value in held.items()})


def change_biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("base_layer.bias"):
            parameter.data.add_(0.3)


def hook_forward(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith(("up_proj", "down_proj.lora_A.default", "k_proj.base_layer", "act_fn")):
            module.register_forward_hook(lambda *given: given[-1] * 1.1)


def hook_backward(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("down_proj"):
            module.register_full_backward_hook(lambda _, inner, __: tuple(2 * one for one in inner))


CHANGES = (unfreeze, load_other_weights, change_biases, hook_forward, hook_backward)


@pytest.mark.parametrize("before", [False, True], ids=["after apply", "before apply"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_apply_follows_a_model_that_the_loop_changes(change: Any, kind: str, before: bool) -> None:
    fused, own = (adapted(TYPES[kind](), dtype=torch.float64, family="qwen2") for _ in range(2))
    for model in (fused, own):
        if before:
            change(model)
        if model is fused:
            finetune.speed.apply(fused)
        if not before:
            step(model)
            change(model)
        model.zero_grad()
    (loss, gradients), (right, theirs) = step(fused), step(own)
    assert gradients.keys() == theirs.keys()
    assert abs(float(loss - right)) < 1e-10 and worst(gradients, theirs) < 1e-9


def test_apply_logs_layers_that_a_hook_gives_back_to_peft(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = finetune.speed.apply(adapted(ranked())), list[int]()
    for name, module in model.named_modules():
        if name.endswith("down_proj"):
            hook = module.register_forward_hook(lambda *_: seen.append(1))
    with caplog.at_level(logging.INFO, logger="finetune"):
        step(model)
        assert len(seen) == 2 and "by PEFT: an inner module has hooks" in caplog.text
        caplog.clear()
        step(model)
        assert not caplog.text
        hook.remove()
        step(model)
    assert "fused layers have changed" in caplog.text


@pytest.mark.parametrize("targets", [["q_proj", "k_proj"], ["gate_proj", "up_proj", "down_proj"]], ids=str)
def test_gradients_of_gradients_are_an_error_with_fused_layers(targets: list[str]) -> None:
    """Their formulas of the backward pass are not differentiated, so the result would be wrong."""
    model = finetune.speed.apply(adapted(LoraConfig(r=4, target_modules=targets), dtype=torch.float64))
    model.set_attn_implementation("eager")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(model(input_ids=IDS, labels=IDS).loss, trained, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.stack([(one**2).sum() for one in found]).sum().backward()


@pytest.mark.parametrize("kind", ["dora", "lora"])
def test_apply_in_a_loop_with_a_fused_optimizer_learns_what_peft_learns(kind: str) -> None:
    """torch's fused AdamW moves weights without counting a version, and nobody tells the norms of DoRA."""
    losses: dict[bool, list[float]] = {}
    for fused in (False, True):
        model = adapted(TYPES[kind](), dtype=torch.float64)
        if fused:
            finetune.speed.apply(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, losses[fused] = torch.optim.AdamW(trained, lr=0.05, fused=True), []
        for _ in range(4):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[fused].append(float(loss.detach()))
    assert losses[True] == pytest.approx(losses[False], abs=1e-9)
    assert losses[True][0] - losses[True][-1] > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_apply_under_sft_trainer_learns_what_peft_learns(tmp_path: Any, checkpointing: bool) -> None:
    texts = Dataset.from_dict({"text": [f"The number after {n} is {n + 1}." for n in range(16)]})
    losses: dict[bool, list[float]] = {}
    for fused in (False, True):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(use_dora=True, target_modules="all-linear"))
        arguments = SFTConfig(
            output_dir=str(tmp_path / str(fused)),
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=checkpointing,
            disable_tqdm=True,
        )
        given = finetune.speed.apply(model) if fused else model
        trainer = SFTTrainer(model=given, args=arguments, train_dataset=texts)
        trainer.train()
        losses[fused] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert losses[True][0] - losses[True][-1] > 0.01


def test_apply_twice_fuses_an_adapter_that_came_later() -> None:
    model = finetune.speed.apply(adapted(ranked(), dtype=torch.float64))
    model.add_adapter("second", ranked())
    model.set_adapter("second")
    loss, gradients = step(model)
    finetune.speed.apply(model)
    assert sum(hasattr(module, "finetune_fused") for module in model.modules())
    fused_loss, fused_gradients = step(model)
    assert abs(float(fused_loss - loss)) < 1e-10 and worst(fused_gradients, gradients) < 1e-10


@pytest.mark.parametrize("targets", [["q_proj"], ["gate_proj", "up_proj"], ["down_proj"]])
def test_apply_leaves_layers_without_the_active_adapter_to_peft(targets: list[str], caplog) -> None:
    caplog.set_level(logging.INFO, logger="finetune")
    model: Any = adapted(ranked(), dtype=torch.float64)
    model.add_adapter("second", LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    model.set_adapter("second")
    loss, gradients = step(model)
    finetune.speed.apply(model)
    fused_loss, fused_gradients = step(model)
    assert abs(float(fused_loss - loss)) < 1e-10 and worst(fused_gradients, gradients) < 1e-10
    assert "it has no weights of the active adapter second" in caplog.text


def test_apply_logs_what_it_fused_and_what_stays_pefts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="finetune")
    finetune.speed.apply(adapted(ranked(), dtype=torch.float64))
    assert "fused 14 linear layers" in caplog.text


def test_apply_without_an_adapter_is_a_user_error() -> None:
    base: Any = AutoModelForCausalLM.from_pretrained(MODEL)
    deleted: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), LoraConfig())
    deleted.delete_adapter("default")
    with pytest.raises(UserError, match="the model has no adapter"):
        finetune.speed.apply(deleted)
    with pytest.raises(UserError, match="the model has no adapter"):
        finetune.speed.apply(base)


def test_apply_on_adapters_that_cannot_be_fused_is_a_user_error_and_leaves_the_model() -> None:
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    model = get_peft_model(base, OFTConfig(target_modules=["q_proj"], oft_block_size=4, r=0))
    with pytest.raises(UserError, match="none of the adapter's layers can be fused"):
        finetune.speed.apply(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("value", [None, "x", {}, torch.nn.Linear, object()])
def test_remove_of_what_is_no_model_is_an_error_of_the_user(value: Any) -> None:
    with pytest.raises(UserError, match="not a model"):
        finetune.speed.remove(value)
