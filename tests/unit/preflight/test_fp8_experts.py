"""`speed.fp8_experts: true` on models, quantizations and machines without such GEMMs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.core.errors import Exit, UserError
from finetune.kernels import fp8_expert_ops
from finetune.models import module_names
from finetune.planning import planned_machine, planner
from finetune.preflight import adapter_names, choice_checks
from finetune.quantization import stacked_experts
from finetune.recipe import loader
from finetune.speed import fused_experts
from support.architectures import CONFIGS
from support.paths import QUICKSTART

SIZES = {**CONFIGS["qwen3_moe"], "hidden_size": 128, "moe_intermediate_size": 64}
FP8 = ["speed.fp8_experts=true", "adapter.target_modules=all-linear-and-experts"]


def refused(options: list[str], family: str, sizes: dict[str, Any]) -> str:
    """Why `check` refuses the recipe; empty if it does not."""
    config: Any = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        names = module_names.of_model(AutoModelForCausalLM.from_config(config))
    recipe: Any = loader.load(QUICKSTART, options)
    return "; ".join(problem.why for problem in adapter_names.check_fp8_experts(recipe, names, config))


@pytest.mark.parametrize(
    ("why", "options", "family", "changed"),
    [
        ("", ["model.quantization=nf4"], "qwen3_moe", {}),
        ("", ["model.quantization=fp8"], "qwen3_moe", {}),
        ("", ["adapter.type=qlora"], "qwen3_moe", {}),
        ("not fp8, nf4 or fp4", ["model.quantization=int8"], "qwen3_moe", {}),
        ("not fp8, nf4 or fp4", ["model.quantization=none"], "qwen3_moe", {}),
        ("not fp8, nf4 or fp4", ["model.quantization=auto"], "qwen3_moe", {}),
        ("no stacked experts", ["model.quantization=nf4"], "llama", {}),
        ("their own gate", ["model.quantization=nf4"], "gpt_oss", {}),
        ("multiple of 16", ["model.quantization=fp8"], "qwen3_moe", {"moe_intermediate_size": 72}),
        ("multiples of 64", ["model.quantization=nf4"], "qwen3_moe", {"moe_intermediate_size": 96}),
    ],
)
def test_check_refuses_models_and_quantizations(
    why: str, options: list[str], family: str, changed: dict[str, int]
) -> None:
    sizes = {**SIZES, **changed} if family == "qwen3_moe" else CONFIGS[family]
    found = refused([*FP8, *options], family, sizes)
    assert why in found and bool(found) == bool(why)
    for value in ("auto", "false"):
        assert not refused([*options, f"speed.fp8_experts={value}"], family, sizes)


def test_machines_without_these_gemms_refuse_them() -> None:
    recipe = loader.load(QUICKSTART, ["speed.fp8_experts=true"])
    with pytest.raises(UserError, match="no Hopper GPU") as stopped:
        choice_checks.setup_of(recipe)
    assert stopped.value.code == Exit.ENVIRONMENT
    for gpu in ("a100-80gb", "rtx4090"):
        with pytest.raises(UserError, match="no Hopper GPU"):
            planner.make(recipe, *planned_machine.find(gpu, 1))


def quantized(storage: str, dtype: torch.dtype = torch.float32) -> Any:
    """A PEFT model with quantized experts."""
    torch.manual_seed(0)
    whole: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES), dtype=dtype)
    for name in stacked_experts.names(whole):
        owner, _, leaf = name.rpartition(".")
        values = stacked_experts.quantize(whole.get_parameter(name).detach(), storage)
        setattr(whole.get_submodule(owner), leaf, values)
    stacked_experts.parametrize_experts(whole)
    with stacked_experts.plain_parameters(whole):
        parameters = ["experts.gate_up_proj", "experts.down_proj"]
        model = get_peft_model(whole, LoraConfig(r=4, target_modules=[], target_parameters=parameters))
    fused_experts.install_quantized(model)
    return model


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_a_model_on_a_cpu_keeps_its_gemms(storage: str) -> None:
    """A run on a Hopper GPU is evaluated anywhere."""
    model, ids = quantized(storage), torch.arange(12)[None]
    before = model(input_ids=ids).logits
    assert "float32" in fused_experts.choose_fp8(model, True)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert fused_experts.choose_fp8(torch.nn.Linear(2, 2), "auto") == "the experts are not quantized"


def test_gemms_follow_the_recipe_where_a_gpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators run in plain torch here."""
    monkeypatch.setattr(fp8_expert_ops, "has_kernel", lambda device: True)
    ids = torch.arange(12)[None]
    for storage, alone in (("nf4", False), ("fp8", True)):
        model = quantized(storage, torch.bfloat16)
        assert [one.fp8 for one in held(model)] == [alone] * len(held(model))
        logits = {}
        for value in (False, True, "auto"):
            assert not fused_experts.choose_fp8(model, value)
            logits[value] = model(input_ids=ids).logits.detach().float()
            in_fp8 = alone if value == "auto" else value
            assert all(one.fp8 == in_fp8 for one in held(model))
        assert torch.equal(logits["auto"], logits[alone])
        assert all(0 < fused_experts.difference(one) < one.allowed_difference() / 2 for one in held(model))
        apart = float((logits[True] - logits[False]).norm() / logits[False].norm())
        assert 0 < apart < 0.05
    monkeypatch.setattr(fused_experts, "ALLOWED_IN_FP8", 1e-6)
    model = quantized("nf4", torch.bfloat16)
    assert "differ" in fused_experts.choose_fp8(model, True) and not any(one.fp8 for one in held(model))


def held(model: torch.nn.Module) -> list[Any]:
    found = [vars(module).get("finetune_experts") for module in model.modules()]
    return [one for one in found if one]
