"""Recipes of mixtures of experts: on which GPUs they fit, by the plan, and what is quantized."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from finetune.core.errors import Problem, UserError
from finetune.planning import planned_machine, planner
from finetune.preflight import checker
from finetune.recipe import loader
from support.architectures import CONFIGS as SIZES
from support.paths import MODEL, ROOT

if TYPE_CHECKING:
    from finetune.planning.plan import Plan

_PLAIN = {"tie_word_embeddings": False, "hidden_act": "silu", "max_position_embeddings": 40960}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b": {
        **_PLAIN, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151936,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "gpt_oss_20b": {
        **_PLAIN, "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip
GPUS = {"rtx4090": 24, "rtx5090": 32, "l40s": 48, "h100-80gb": 80, "h200": 141}  # and their GB
RECIPES = [path for model in CONFIGS for path in sorted((ROOT / "recipes" / model).glob("*.yaml"))]


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def loaded(path: Path, folder: Path, *more: str) -> Any:
    (folder / "config.json").write_text(json.dumps(CONFIGS[path.parent.name]))
    for name in ("tokenizer.json", "tokenizer_config.json"):  # which `check` opens
        shutil.copy(MODEL / name, folder / name)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "word " * 400}) + "\n" for _ in range(64)))
    given = [
        f"model.name={folder}",
        f"data.name={rows}",
        "data.validation_fraction=null",
        "train.max_steps=9",
    ]
    return loader.load(path, [*given, *more])


def planned(path: Path, gpu: str, folder: Path, *more: str) -> Plan:
    return planner.make(loaded(path, folder, *more), *planned_machine.find(gpu, 1))


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipe_of_experts_fits_on_the_gpus_that_its_purpose_names(
    path: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    needs = re.search(r"(\d+) GB or more", path.read_text(encoding="utf-8").splitlines()[1])
    assert needs
    for gpu, size in GPUS.items():
        found = planned(path, gpu, tmp_path)
        assert found.fits == (size >= int(needs[1])), f"{gpu}: {found.peak:.1f} of {found.usable:.1f} GiB"
        assert any("each expert gets the same number of tokens" in note for note in found.notes)
        assert (found.step_seconds is None) == path.parent.name.startswith(
            "gpt_oss"
        )  # its layers are not known


def test_qlora_on_attention_alone_fits_24_gb(tmp_path: Path, monkeypatch: Any) -> None:
    """Measured: 17.7 GiB (`nf4-full-attention-1` of benchmarks/experts.json)."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    path = ROOT / "recipes" / "qwen3_30b_a3b" / "qlora.yaml"
    assert planned(path, "rtx4090", tmp_path, "adapter.target_modules=all-linear").fits


def test_plan_and_check_say_what_fp8_quantizes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    path = ROOT / "recipes" / "qwen3_30b_a3b" / "fp8.yaml"
    experts = "mlp.experts.gate_up_proj, mlp.experts.down_proj"
    said = f"1.69 GiB of linear layers and 54.00 GiB of {experts} (in bf16) are quantized"
    assert any(said in note for note in planned(path, "h200", tmp_path).notes)
    assert any(
        said in note for note in checker.check_without_examples(loaded(path, tmp_path), with_weights=False)
    )


def refused(recipe: Any) -> Problem:
    with pytest.raises(UserError) as error:
        checker.check_without_examples(recipe, with_weights=False)
    (problem,) = error.value.problems
    return problem


def test_qlora_refuses_stacked_experts_that_it_cannot_quantize(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    given = ["adapter.type=qlora", "model.quantization=nf4"]
    monkeypatch.setitem(CONFIGS, "gpt_oss_20b", {**SIZES["lfm2_moe"], "model_type": "lfm2_moe"})
    problem = refused(loaded(ROOT / "recipes" / "gpt_oss_20b" / "lora.yaml", tmp_path, *given))
    assert problem.what == "qlora can't quantize all of lfm2_moe"
    assert "would stay in bf16" in problem.found
    assert problem.why == "the activation of lfm2_moe's experts is not known"


@pytest.mark.parametrize("stored", ["mxfp4", "bf16"])
def test_adapters_on_quantized_experts_of_gpt_oss_are_refused(
    stored: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    if stored == "bf16":
        plain = {**CONFIGS["gpt_oss_20b"], "quantization_config": None}
        monkeypatch.setitem(CONFIGS, "gpt_oss_20b", plain)
    recipe = ROOT / "recipes" / "gpt_oss_20b" / "qlora.yaml"
    problem = refused(loaded(recipe, tmp_path, "adapter.target_modules=all-linear-and-experts"))
    assert problem.what == "quantized experts of gpt_oss train without an adapter"
    assert "adapter.target_modules: all-linear" in problem.fix
    said = checker.check_without_examples(loaded(recipe, tmp_path), with_weights=False)
    kept = [note for note in said if "the experts stay as the checkpoint stores them, in mxfp4" in note]
    assert bool(kept) == (stored == "mxfp4")
    assert any("adapts both" in note and "on a base model that is not quantized" in note for note in said)
