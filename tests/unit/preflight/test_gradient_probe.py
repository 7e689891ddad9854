"""Trained tensors that no gradient reaches are named before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapters import attach, trainable_parameters
from finetune.autoconfig import batch_size
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.preflight import choice_checks, gradient_probe
from finetune.recipe import loader
from finetune.training import load_data, model_setup, training_arguments
from finetune.training.run_context import RunData
from support.adapter_cells import SETUP
from support.architectures import CONFIGS
from support.paths import QUICKSTART
from support.trainers import run_context


def adapted(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONFIGS[family]))
    options["fan_in_fan_out"] = family == "gpt2"
    return get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **options))


def unreached(model: Any) -> set[str]:
    found = gradient_probe.unreached(model, trainable_parameters.trainable(model), "sdpa")
    return {gradient_probe._module_of(model, name).rpartition(".")[2] for name in found}


@pytest.mark.parametrize(
    ("family", "targets", "lost"),
    [
        ("mamba", ["in_proj", "x_proj", "dt_proj"], {"dt_proj"}),
        ("falcon_mamba", ["in_proj", "dt_proj"], {"dt_proj"}),
        ("jamba", ["q_proj", "dt_proj"], {"dt_proj"}),
        ("jamba", ["q_proj", "gate_proj"], set()),
        ("llama", ["q_proj", "down_proj"], set()),
        ("gpt2", ["c_attn"], set()),
        ("rwkv", ["key", "value"], set()),
    ],
)
def test_module_whose_weight_is_read_without_a_call_is_found(
    family: str, targets: list[str], lost: set[str]
) -> None:
    """B is 0 at the start, so that every A has a zero gradient: that is no fault."""
    assert unreached(adapted(family, target_modules=targets)) == lost


@pytest.mark.parametrize("family", ["opt", "biogpt", "xglm"])
def test_layer_that_is_dropped_at_random_is_no_fault(family: str) -> None:
    config = AutoConfig.for_model(family, **CONFIGS[family], layerdrop=0.9)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(target_modules="all-linear"))
    assert all(unreached(model) == set() for _ in range(5))


def test_expert_that_no_token_reaches_is_no_fault() -> None:
    model = adapted("qwen3_moe", target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    assert unreached(model) == set()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba", None),  # full fine-tuning
        ("bamba", None),
        ("mamba", {"target_modules": ["in_proj", "dt_proj"], "bias": "all"}),
        ("mamba", {"target_modules": ["in_proj"], "modules_to_save": ["dt_proj"]}),
        ("mamba", {"target_modules": ["in_proj"], "trainable_token_indices": [1, 2]}),
        ("jamba", {"target_modules": ["dt_proj"], "bias": "lora_only", "modules_to_save": ["lm_head"]}),
    ],
)
def test_probe_of_sharded_weights_finds_what_the_probe_of_whole_weights_finds(
    family: str, options: dict[str, Any] | None
) -> None:
    """The weight of Mamba's `dt_proj` trains although the layer is not called; an adapter there does not."""
    if options is None:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONFIGS[family]))
    else:
        model = adapted(family, **options)
    trained = trainable_parameters.trainable(model)
    found = gradient_probe._unreached_on_meta(model, trained)
    assert set(found) == set(gradient_probe.unreached(model, trained, "sdpa"))
    adapters_there = options is not None and "dt_proj" in options["target_modules"]
    assert all(".lora_" in name for name in found) and bool(found) == adapters_there


def test_probe_leaves_the_random_stream_and_gradients_as_they_were() -> None:
    model = adapted("llama", target_modules=["q_proj"], lora_dropout=0.5)
    model.train()
    before = torch.random.get_rng_state()
    assert unreached(model) == set()
    assert torch.equal(torch.random.get_rng_state(), before) and model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_layers_that_dropout_leaves_out_are_no_fault(kind: str) -> None:
    recipe = loader.load(QUICKSTART, [f"adapter.type={kind}", "adapter.module_dropout=0.9"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIGS["llama"]))
    assert unreached(attach.attach(model, recipe.adapter, 20, RunChecks())) == set()


@pytest.mark.parametrize(
    ("family", "given", "what", "change"),
    [
        (
            "deepseek_v3",
            ["adapter.type=oft", "adapter.r=4", "adapter.target_modules=all-linear"],
            "PEFT's oft does not run in kv_b_proj",
            "adapter.exclude_modules=[kv_b_proj]",
        ),
        (
            "deepseek_v2",
            ["adapter.type=gralora", "adapter.target_modules=[q_a_proj, kv_b_proj]"],
            "PEFT's gralora does not run in kv_b_proj",
            "adapter.target_modules=[q_a_proj]",
        ),
        (
            "falcon",
            ["adapter.type=prefix_tuning"],
            "does not train with this model",
            "adapter.type=prompt_tuning",
        ),
        ("jamba", ["adapter.type=cartridge"], "does not train with this model", "adapter.type=prompt_tuning"),
        (
            "rwkv",
            ["adapter.type=prefix_tuning"],
            "does not train with this model",
            "adapter.type=prompt_tuning",
        ),
    ],
)
def test_adapter_that_fails_in_the_forward_pass_is_refused_with_a_remedy(
    family: str, given: list[str], what: str, change: str
) -> None:
    with pytest.raises(UserError, match=what) as caught:
        probe(family, given)
    assert change.partition("=")[0].removeprefix("adapter.") in caught.value.problems[0].fix
    probe(family, [*given, change])


def probe(family: str, overrides: list[str]) -> None:
    recipe = loader.load(QUICKSTART, overrides)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **CONFIGS[family]), attn_implementation="eager"
    )
    made: Any = attach.attach(model, recipe.adapter, 20, RunChecks())
    gradient_probe.check(made, recipe.adapter, SETUP, RunChecks())


class FakeLaunch:
    def __init__(self, sharded: str) -> None:
        self.sharded = sharded


@pytest.mark.parametrize("sharded", ["", "FSDP"])
def test_adapter_that_no_gradient_reaches_is_refused(sharded: str) -> None:
    from types import SimpleNamespace

    model = adapted("jamba", target_modules=["q_proj", "dt_proj"])
    setup: Any = SimpleNamespace(launch=FakeLaunch(sharded), attention=SimpleNamespace(value="sdpa"))
    recipe = loader.load(QUICKSTART, ["adapter.target_modules=[q_proj, dt_proj]"])
    with pytest.raises(UserError, match="dt_proj would get no gradient") as caught:
        gradient_probe.check(model, recipe.adapter, setup, RunChecks())
    assert caught.value.problems[0].fix == "remove dt_proj from target_modules"
    fine = adapted("jamba", target_modules=["q_proj"])
    checks = RunChecks()
    gradient_probe.check(fine, recipe.adapter, setup, checks)
    assert checks.entries[-1].option == "gradients" and checks.entries[-1].passed


def test_probe_runs_in_the_precision_of_the_launch(monkeypatch) -> None:
    """Full fine-tuning keeps fp32 weights, which the flash attention of GPUs takes under autocast alone."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    seen: list[torch.dtype] = []

    def note(*given: Any) -> None:
        assert torch.is_autocast_enabled("cpu")
        seen.append(torch.get_autocast_dtype("cpu"))

    monkeypatch.setattr(gradient_probe, "check", note)
    recipe = loader.load(QUICKSTART, ["adapter.type=full", "train.learning_rate=1e-4", "train.max_steps=2"])
    setup, (tokenizer, prepared) = choice_checks.setup_of(recipe), load_data.prepare_data(recipe)
    batch = batch_size.split_batch(recipe.train, 1)
    arguments = training_arguments.training_arguments(recipe.train, recipe.data, setup, batch)
    model_setup.adapted_model(run_context(recipe, setup), RunData(tokenizer, prepared, arguments), 2)
    assert seen == [torch.bfloat16]


def test_probe_whose_forward_fails_leaves_the_run_to_its_first_step() -> None:
    """Such as a kernel that does not take so few tokens: it may take the training data's."""
    model = adapted("llama", target_modules=["q_proj"])

    def refuse(*_: Any) -> None:
        raise RuntimeError("no kernel for 16 tokens")

    model.register_forward_pre_hook(refuse)
    recipe, checks = loader.load(QUICKSTART), RunChecks()
    gradient_probe.check(model, recipe.adapter, choice_checks.setup_of(recipe), checks)
    assert checks.notes == ["finetune could not check the gradients before training: no kernel for 16 tokens"]
    assert model.training
