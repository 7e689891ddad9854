"""A model's `quantization_config` whose values hang transformers, or end in an error of Python."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.evaluation import reopen
from finetune.models import loading
from finetune.recipe import loader
from support.paths import MODEL, QUICKSTART
from support.soak import soak_except

if TYPE_CHECKING:
    from pathlib import Path

SLOW = r"((\w|\.)+)+#"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BITSANDBYTES = (
    "bnb_4bit_quant_type",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "llm_int8_threshold",
)
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
GROUP = {"weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}}


def quantized(folder: Path, declared: Any, key: str = "quantization_config") -> Path:
    """A copy of the model whose config declares a quantization."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: declared}))
    return folder


SLOW_ONES = [
    {**FP8, "modules_to_not_convert": ["lm_head", SLOW]},
    {**NF4, "llm_int8_skip_modules": [SLOW]},
    {"quant_method": "mxfp4", "modules_to_not_convert": [".*" * 12 + "#"]},
]


@pytest.mark.parametrize("command", soak_except(["check"], ["check", "train"]))
@pytest.mark.parametrize("declared", SLOW_ONES, ids=lambda one: one["quant_method"])
def test_model_whose_list_of_skipped_modules_has_a_slow_pattern_is_refused(
    command: str, declared: Any, tmp_path, commands
) -> None:
    folder = quantized(tmp_path / "model", declared)
    output = [f"train.output_dir={tmp_path / 'run'}"] if command == "train" else []
    ended = commands.run(command, str(QUICKSTART), f"model.name={folder}", *output)
    assert not ended.wrong and ended.code == 2, ended
    assert "a regular expression in the quantization_config of its config.json takes too long" in ended.said


def test_model_with_a_slow_pattern_is_not_loaded(tmp_path) -> None:
    """Commands that open a run load its base model without `check`."""
    folder = quantized(tmp_path / "model", SLOW_ONES[0])
    recipe = loader.load(QUICKSTART, [f"model.name={folder}"])
    with pytest.raises(UserError, match="takes too long"):
        loading.load(recipe.model, reopen.setup_of(recipe), "cpu")


@pytest.mark.parametrize(
    "declared",
    [
        [1],
        "fp8",
        {"quant_method": {"a": 1}},
        {"load_in_4bit": "yes"},
        {**FP8, "weight_block_size": []},
        {**FP8, "weight_block_size": [0, 0]},
        {**FP8, "weight_block_size": ["a", 1]},
        {**FP8, "weight_block_size": {"a": 1}},
        {**FP8, "modules_to_not_convert": "lm_head"},
        {**FP8, "modules_to_not_convert": [5]},
        {**FP8, "modules_to_not_convert": ["("]},
        {**FP8, "modules_to_not_convert": ["[\0-\U0010ffff]"]},
        {**FP8, "modules_to_not_convert": [f"a{number}" for number in range(1001)]},
        {**NF4, "llm_int8_skip_modules": {"lm_head": 1}},
        {},
        *({**NF4, key: "x"} for key in BITSANDBYTES),
        {"quant_method": "compressed-tensors", "config_groups": [GROUP]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 5}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": [8]}}},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "key", soak_except(["quantization_config"], ["quantization_config", "compression_config"])
)
def test_quantization_with_a_value_of_another_type_is_refused(
    key: str, declared: Any, tmp_path, commands
) -> None:
    ended = commands.run(
        "check", str(QUICKSTART), f"model.name={quantized(tmp_path / 'model', declared, key)}"
    )
    assert not ended.wrong and ended.code == 2, ended
    assert "has the wrong type" in ended.said and key in ended.said


@pytest.mark.parametrize(
    "declared",
    [
        None,
        {**FP8, "modules_to_not_convert": None, "activation_scheme": "dynamic"},
        {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn", r"layers\.(0|1)\.mlp.*"]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP}, "ignore": ["re:.*lm_head"]},
    ],
    ids=str,
)
def test_usual_quantizations_are_accepted(declared: Any, tmp_path, commands) -> None:
    ended = commands.run("check", str(QUICKSTART), f"model.name={quantized(tmp_path / 'model', declared)}")
    assert not ended.wrong and ended.code == 0, ended


@pytest.mark.parametrize(
    "declared", [NF4, {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"] * 300}]
)
def test_plain_weights_that_are_declared_to_be_bitsandbytes_s_are_refused(declared, tmp_path, capsys) -> None:
    folder = quantized(tmp_path / "model", declared)
    assert main.main(["check", str(QUICKSTART), f"model.name={folder}"]) == 2
    assert "no weight is quantized" in capsys.readouterr().err
