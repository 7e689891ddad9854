"""Names of experts: what `check` says, `plan` counts and `train` adapts, over families and spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from finetune.adapters import attach, expert_targets, trainable_parameters
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.models import architecture, model_class, module_lists
from finetune.models.module_names import Names, short
from finetune.planning import adapter_size
from finetune.preflight import adapter_names
from finetune.recipe import loader
from finetune.speed import fused_experts
from finetune.speed.live_model_spec import decoder_layers
from support.expert_families import BY_TYPE, FAMILIES, SAMPLE, config_of
from support.paths import ROOT
from support.soak import soak_except

if TYPE_CHECKING:
    from finetune.core.errors import Problem

SHORT = ["o_proj", "gate_proj", "up_proj", "down_proj"]
# What a recipe may say, and whether experts get an adapter; `None`: `check` and `train` refuse it
SPELLINGS: tuple[tuple[Any, bool | None], ...] = (
    ("all-linear", False),
    ("all-linear-and-experts", True),
    (SHORT, True),
    (["w1", "w2", "w3"], True),
    (["gate_up_proj", "down_proj"], True),
    (["experts.gate_up_proj"], True),
    (r".*layers\.1\..*\.(gate_proj|up_proj|down_proj)", True),
    (["gate_proj"], None),
    (["w1"], None),
    (["no_such_proj"], None),
)


def names_of(model_type: str) -> Names:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(model_type), dtype=torch.bfloat16)
        return module_lists.of_meta_model(model)


def problems_of(recipe: Any, names: Any) -> list[Problem]:
    """What `check` says of the adapter."""
    config = architecture.config_in(Path(recipe.model.name) / "config.json")
    return adapter_names.check_names(recipe, names, config)


def recipe_of(folder: Path, model_type: str, **adapter: Any) -> Any:
    (folder / "config.json").write_text(config_of(model_type).to_json_string(use_diff=False))
    excluded = {"exclude_modules": ["dt_proj"]} if model_type == "jamba" else {}  # Mamba reads its weight
    section = {"type": "lora", "r": 4, "lora_alpha": 8, **excluded, **adapter}
    raw = {"model": {"name": str(folder)}, "data": {"name": "data.jsonl"}, "adapter": section}
    (folder / "recipe.yaml").write_text(json.dumps(raw))
    return loader.load(folder / "recipe.yaml", ["train.max_steps=20"])


def trained(model: Any) -> int:
    return sum(parameter.numel() for parameter in trainable_parameters.trainable(model).values())


# PEFT looks among modules for patterns that it makes for experts' weights (peft 0.21.2, tuners_utils.py)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("model_type", soak_except(SAMPLE, [one.model_type for one in FAMILIES]))
def test_names_of_experts_check_and_plan_say_what_train_does(model_type: str, tmp_path: Path) -> None:
    names = names_of(model_type)
    for targets, adapts in SPELLINGS:
        recipe = recipe_of(tmp_path, model_type, target_modules=targets)
        found, checks = problems_of(recipe, names), RunChecks()
        model = AutoModelForCausalLM.from_config(config_of(model_type))
        assert (adapts is None) == bool(found), (targets, found)
        if adapts is None:
            with pytest.raises(UserError) as refused:
                attach.attach(model, recipe.adapter, 20, checks)
            assert list(refused.value.problems) == found
            continue
        adapted: Any = attach.attach(model, recipe.adapter, 20, checks)
        planned = adapter_size.adapted(recipe.adapter, recipe.model, architecture.read(recipe.model), 20)
        assert planned.trained == trained(adapted), targets
        assert bool(planned.experts) == adapts == bool(getattr(adapted, "targeted_parameter_names", ())), (
            targets
        )
        routers = {name for name, kind in names.kinds.items() if "Router" in kind}
        assert not [n for n in trainable_parameters.trainable(adapted) if any(r in n for r in routers)], (
            targets
        )
        assert all(check.passed for check in checks.entries), targets
        assert checks.notes == expert_targets.notes(recipe.adapter.options(), names, "lora")
        # PEFT's own config gives the same model in plain PEFT
        saved = {**adapted.peft_config["default"].to_dict(), "base_model_name_or_path": None}
        again = get_peft_model(AutoModelForCausalLM.from_config(config_of(model_type)), LoraConfig(**saved))
        assert again.targeted_module_names == adapted.targeted_module_names
        assert again.targeted_parameter_names == adapted.targeted_parameter_names
        assert trained(again) == trained(adapted)


@pytest.mark.parametrize("model_type", soak_except(SAMPLE, [one.model_type for one in FAMILIES]))
def test_router_trains_only_if_it_is_named(model_type: str, tmp_path: Path) -> None:
    names = names_of(model_type)
    routers = [name for name, kind in names.kinds.items() if "Router" in kind]
    recipe = recipe_of(tmp_path, model_type, target_modules=[short(names.linear[0]), short(routers[0])])
    assert problems_of(recipe, names) == []
    model = AutoModelForCausalLM.from_config(config_of(model_type))
    adapted: Any = attach.attach(model, recipe.adapter, 20, RunChecks())
    assert set(adapted.targeted_parameter_names) == {f"{name}.weight" for name in routers}
    ids = torch.arange(12)[None]
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    planned = adapter_size.adapted(recipe.adapter, recipe.model, architecture.read(recipe.model), 20)
    assert planned.trained == trained(adapted)


def test_note_of_all_linear_has_both_counts_of_qwen3_30b_a3b() -> None:
    names = names_of("qwen3_moe")
    sizes = {"q_proj": (4096, 2048), "k_proj": (512, 2048), "v_proj": (512, 2048), "o_proj": (2048, 4096)}
    layer: dict[str, tuple[int, ...]] = {
        f"model.layers.1.self_attn.{name}.weight": size for name, size in sizes.items()
    }
    layer["model.layers.1.mlp.experts.gate_up_proj"] = (128, 1536, 2048)
    layer["model.layers.1.mlp.experts.down_proj"] = (128, 2048, 768)
    kinds = {name: kind for name, kind in names.kinds.items() if ".layers.1." in name}
    one = Names(kinds, layer, "qwen3_moe")
    (note,) = expert_targets.notes({"target_modules": "all-linear", "r": 16}, one, "lora")
    assert "(278,528 trainable parameters)" in note and "(13,385,728 trainable parameters)" in note


@pytest.mark.parametrize("kind", ["dora", "adalora", "ia3"])
def test_types_without_experts_say_so_or_refuse_them(kind: str, tmp_path: Path) -> None:
    names = names_of("qwen3_moe")
    adapter = {"type": kind, "r": 4} if kind != "ia3" else {"type": kind, "r": None, "lora_alpha": None}
    adapter = {key: value for key, value in adapter.items() if value is not None}
    (tmp_path / "config.json").write_text(config_of("qwen3_moe").to_json_string(use_diff=False))
    for targets, refused in (("all-linear", False), ("all-linear-and-experts", True)):
        raw: dict[str, Any] = {"model": {"name": str(tmp_path)}, "data": {"name": "data.jsonl"}}
        raw["adapter"] = {**adapter, "target_modules": targets}
        (tmp_path / "recipe.yaml").write_text(json.dumps(raw))
        recipe = loader.load(tmp_path / "recipe.yaml", ["train.max_steps=20"])
        found, checks = problems_of(recipe, names), RunChecks()
        assert bool(found) == refused
        model = AutoModelForCausalLM.from_config(config_of("qwen3_moe"))
        if refused:
            assert "target_modules: all-linear" in found[0].fix
            with pytest.raises(UserError):
                attach.attach(model, recipe.adapter, 20, checks)
        else:
            attach.attach(model, recipe.adapter, 20, checks)
            assert "PEFT adapts experts only with LoRA" in " ".join(checks.notes)


def test_model_without_experts_refuses_all_linear_and_experts(tmp_path: Path) -> None:
    with torch.device("meta"):
        from transformers import LlamaConfig, LlamaForCausalLM

        small = LlamaConfig(
            vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        names = module_lists.of_meta_model(LlamaForCausalLM(small))
    recipe = recipe_of(tmp_path, "qwen3_moe", target_modules="all-linear-and-experts")
    (found,) = problems_of(recipe, names)
    assert found.what == "the model has no experts" and found.fix == "target_modules: all-linear"


def test_shared_expert_that_peft_would_take_for_experts_is_named(tmp_path: Path) -> None:
    names = names_of("deepseek_v3")
    recipe = recipe_of(tmp_path, "deepseek_v3", target_modules="all-linear")
    notes = expert_targets.notes(recipe.adapter.options(), names, "lora")
    assert "shared_experts.gate_proj, shared_experts.up_proj" in notes[1]
    offered = notes[1].rpartition("[")[2].partition("]")[0].split(", ")
    recipe = recipe_of(tmp_path, "deepseek_v3", target_modules="all-linear", target_parameters=offered)
    assert problems_of(recipe, names) == []
    model = AutoModelForCausalLM.from_config(config_of("deepseek_v3"))
    adapted: Any = attach.attach(model, recipe.adapter, 20, RunChecks())
    every = {
        *adapted.targeted_module_names,
        *(n.removesuffix(".weight") for n in adapted.targeted_parameter_names),
    }
    assert every == set(names.linear)


def test_rank_of_experts_can_be_set_by_a_pattern(tmp_path: Path) -> None:
    pattern = {"mlp.experts.gate_up_proj": 2}
    recipe = recipe_of(tmp_path, "qwen3_moe", target_modules="all-linear-and-experts", rank_pattern=pattern)
    names = names_of("qwen3_moe")
    assert problems_of(recipe, names) == []
    planned = adapter_size.adapted(recipe.adapter, recipe.model, architecture.read(recipe.model), 20)
    model = AutoModelForCausalLM.from_config(config_of("qwen3_moe"))
    with pytest.warns(RuntimeWarning, match="rank_pattern keys did not match"):
        adapted = attach.attach(model, recipe.adapter, 20, RunChecks())
    assert planned.trained == trained(adapted)


def row_of(model_type: str) -> list[str]:
    """A family's row of the table in docs/guides/mixtures_of_experts.md, from its model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(model_type)).requires_grad_(False)
    names = names_of(model_type)
    router = min(name for name, kind in names.kinds.items() if "Router" in kind)
    obstacles = [
        fused_experts.unsupported_reason(*one)
        for layer in decoder_layers(model)
        for one in fused_experts.stacked(layer)
    ]
    return [
        BY_TYPE[model_type].name,
        f"`{short(router)}`",
        "yes" if any("shared_expert" in name for name in names.linear) else "no",
        "yes" if any(name.endswith("experts.down_proj_bias") for name in names.shapes) else "no",
        "no: " if any(obstacles) else "yes",
        "no: " if model_class.unsupported(model.config) else "yes",
    ]


def test_table_of_families_in_the_guide_is_true_of_the_models() -> None:
    assert len(FAMILIES) == len(BY_TYPE) == 13
    lines = (ROOT / "docs/guides/mixtures_of_experts.md").read_text(encoding="utf-8").splitlines()
    for one in FAMILIES:
        (line,) = [line for line in lines if line.startswith(f"| {one.name} |")]
        shown = [part.strip() for part in line.strip("|").split("|")]
        for said, true in zip(shown, row_of(one.model_type), strict=True):
            assert said.startswith(true), line
