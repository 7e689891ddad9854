"""A plan describes a model that is not there as a run describes the live one, over families and adapters."""

from __future__ import annotations

import json
import logging
import random
import warnings
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapters import attach
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.hardware import detection
from finetune.models import architecture
from finetune.planning import planned_run, planned_spec, sharding_cost, step_time
from finetune.preflight import gradient_probe
from finetune.recipe import loader
from finetune.speed import apply_to_model
from finetune.speed.fused_layers import Fused
from finetune.speed.live_model_spec import decoder_layers, live_model_spec
from support.adapter_cells import SETUP, TYPES
from support.architectures import CONFIGS

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.autoconfig.decisions import ModelSpec
    from finetune.recipe.schema import Recipe

ADAPTERS: dict[str, dict[str, Any]] = {
    **{kind: {"type": kind, **TYPES[kind]} for kind in ("lora", "dora", "adalora", "ia3", "loha", "full")},
    "dropout": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "dora with dropout": {"type": "dora", "r": 4, "lora_dropout": 0.1},
    "attention only": {"type": "lora", "r": 4, "target_modules": r".*self_attn\.(q_proj|v_proj)"},
    "experts": {"type": "lora", "r": 4, "target_modules": "all-linear-and-experts"},
    "head": {"type": "lora", "r": 4, "modules_to_save": ["lm_head"]},
}
SAMPLE = 20  # in CI; `make soak` takes all
COUNTED = architecture.KNOWN  # families whose FLOPs a plan counts
CELLS = [(family, adapter) for family in CONFIGS for adapter in ADAPTERS]


def recipe_of(family: str, adapter: str, folder: Path) -> Recipe:
    place = folder / family
    place.mkdir(exist_ok=True)
    config = AutoConfig.for_model(family, **CONFIGS[family])
    (place / "config.json").write_text(config.to_json_string(use_diff=False))
    raw = {
        "model": {"name": str(place)},
        "data": {"name": str(folder / "data.jsonl")},
        "adapter": ADAPTERS[adapter],
    }
    (folder / "data.jsonl").write_text('{"text": "one"}\n')
    (folder / "recipe.yaml").write_text(json.dumps(raw))
    return loader.load(folder / "recipe.yaml", ["train.max_steps=20", "train.learning_rate=1e-4"])


def both(family: str, adapter: str, folder: Path) -> tuple[ModelSpec, ModelSpec, str] | None:
    """The model as a plan and as a run describe it, and why its layers did not fuse; `None`: refused."""
    recipe = recipe_of(family, adapter, folder)
    try:
        run, _ = planned_run.planned_run(recipe, detection.detect(), 1, sharding_cost.ONE)
        config = AutoConfig.for_model(family, **CONFIGS[family])
        model = AutoModelForCausalLM.from_config(config, attn_implementation=run.attention).train()
        adapted: Any = attach.attach(model, recipe.adapter, 20, RunChecks())
        if adapter == "full":  # a run freezes the parameters that no gradient reaches
            gradient_probe.check(adapted, recipe.adapter, SETUP, RunChecks())
    except UserError:
        return None
    served, left = False, ""
    flops = step_time.flops(run.model, run.adapter, run.full), apply_to_model.flops_per_token(adapted)
    if family in COUNTED and not run.adapter.unknown:
        assert flops[0] == pytest.approx(flops[1], rel=0.1), (family, adapter)  # DoRA has vectors
    if hasattr(adapted, "peft_config") and (layers := decoder_layers(adapted)):
        fused = Fused(adapted, layers)
        served, left = bool(fused.served or fused.experts.served), fused.left_out()
    planned, live = planned_spec.model_spec(run, fused=served), live_model_spec(adapted)
    counted = not run.adapter.unknown or bool(run.adapter.experts)
    return planned if counted else replace(planned, trained=live.trained), live, left


def differences(family: str, adapter: str, folder: Path) -> list[str]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's warnings of unusual targets are not compared
            found = both(family, adapter, folder)
    finally:
        logging.disable(logging.NOTSET)
    if found is None:
        return []
    planned, live, left = found
    ours, theirs = asdict(planned), asdict(live)
    names = ours.keys() - {"config", "unfused", "unsupported_reason"}
    return [
        f"{family}, {adapter}: {name} is {ours[name]} in a plan, {theirs[name]} in a run ({left})"
        for name in sorted(names)
        if ours[name] != theirs[name]
    ]


def test_planned_models_match_live_ones_in_sampled_cells(tmp_path: Path) -> None:
    found = [text for cell in random.Random(0).sample(CELLS, SAMPLE) for text in differences(*cell, tmp_path)]
    assert "\n".join(found) == ""


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_planned_models_match_live_ones(family: str, tmp_path: Path) -> None:
    found = [text for adapter in ADAPTERS for text in differences(family, adapter, tmp_path)]
    assert "\n".join(found) == ""


@pytest.mark.parametrize("adapter", ["experts", "attention only"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_planned_experts_match_live_ones(family: str, adapter: str, tmp_path: Path) -> None:
    assert "\n".join(differences(family, adapter, tmp_path)) == ""


@pytest.mark.parametrize("family", ["hrm_text", "deepseek_v32", "llama"])
def test_planned_parameters_of_full_are_those_that_a_gradient_reaches(family: str, tmp_path: Path) -> None:
    assert "\n".join(differences(family, "full", tmp_path)) == ""
