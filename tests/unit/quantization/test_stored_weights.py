"""Checkpoints that are quantized already: what their config says, and what `check` and a run make of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.core.errors import Exit, UserError
from finetune.models import architecture
from finetune.planning import planned_machine, planner
from finetune.preflight import checker, choice_checks
from finetune.quantization import stored_weights
from finetune.recipe import adapter_types, loader
from support import quantized_checkpoints
from support.adapters import ADAPTERS
from support.paths import MODEL, QUICKSTART

FP8_GROUPS = {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}}
INT4_GROUPS = {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}}}
DECLARED = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "int8": {"load_in_8bit": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp8": {"quant_method": "mxfp8"},
    "mxfp4": {"quant_method": "mxfp4"},
    "compressed fp8": {"quant_method": "compressed-tensors", "config_groups": FP8_GROUPS},
    "compressed int4": {"quant_method": "compressed-tensors", "config_groups": INT4_GROUPS},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "unknown": {"quant_method": "made_up"},
    "nameless": {"bits": 4},
}
# The second one is as large as the weights of the model, with 1 bit for each
UNREAD = {"model.norm.weight": torch.ones(256), "others": torch.zeros(400_000, dtype=torch.bfloat16)}
STAYS, DEQUANTIZED = ("nf4", "fp4", "int8"), ("fp8", "mxfp8", "mxfp4", "compressed fp8")


def upstream_methods() -> list[str]:
    """Every method of the installed transformers that this file does not name."""
    from transformers.quantizers import auto

    named = {one.get("quant_method") for one in DECLARED.values()} | {
        "bitsandbytes_4bit",
        "bitsandbytes_8bit",
    }
    return sorted(set(auto.AUTO_QUANTIZER_MAPPING) - named - {"finetune_fp8"})


def verdict(ask, recipe) -> tuple[int, str]:
    """The exit code and the message; 0: accepted."""
    try:
        ask(recipe)
    except UserError as error:
        return error.code, str(error)
    return 0, ""


@pytest.fixture
def model(weightless: Path) -> Path:
    """A model whose weights are not read: two tensors stand for them."""
    save_file(UNREAD, weightless / "model.safetensors")
    return weightless


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The weights of a model in each storage of bitsandbytes."""
    folder = tmp_path_factory.mktemp("quantized")
    return {
        storage: quantized_checkpoints.bitsandbytes(MODEL, folder / storage, storage) / "model.safetensors"
        for storage in STAYS
    }


def declare(model: Path, name: str, quantized: dict[str, Path]) -> None:
    """Declare the quantization of a model. Only weights of bitsandbytes are read, so they are real."""
    quantized_checkpoints.declare(model, **DECLARED[name])
    (model / "model.safetensors").unlink()
    if name in quantized:
        shutil.copy(quantized[name], model / "model.safetensors")
    else:
        save_file(UNREAD, model / "model.safetensors")


def recipe_of(folder: Path, *overrides: str):
    return loader.load(QUICKSTART, [f"model.name={folder}", *overrides])


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_check_plan_and_train_give_one_verdict_on_a_quantized_checkpoint(
    name: str, kind: str, model: Path, quantized: dict[str, Path]
) -> None:
    declare(model, name, quantized)
    recipe = recipe_of(model, f"adapter.type={kind}")
    quantizes = adapter_types.find(kind).storage != ""
    code, said = verdict(checker.check_without_examples, recipe)
    if name in STAYS:
        refused = kind == "full" or (quantizes and name == "int8")
        on_cpu = name == "int8" and kind == "dora"  # exit 3 where there is no GPU
    else:
        refused, on_cpu = name not in DEQUANTIZED or quantizes, False
    if not on_cpu:
        assert code == (Exit.INPUT if refused else 0), said
        assert verdict(choice_checks.setup_of, recipe) == (code, said)
    machine, count = planned_machine.find("h100", 1)
    assert verdict(lambda one: planner.make(one, machine, count), recipe) == (code, said)


@pytest.mark.parametrize("method", upstream_methods())
def test_every_other_method_of_transformers_is_refused_with_its_name(method: str, model: Path) -> None:
    quantized_checkpoints.declare(model, quant_method=method)
    code, said = verdict(checker.check_without_examples, recipe_of(model))
    assert code == Exit.INPUT and f"weights that {method} quantized" in said and "16-bit checkpoint" in said
    assert verdict(choice_checks.setup_of, recipe_of(model)) == (code, said)


def test_read_finds_the_declaration_wherever_transformers_does(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    inside = {"model_type": "gemma3", "text_config": {**raw, "quantization_config": DECLARED["nf4"]}}
    assert str(stored_weights.read(architecture.as_config(inside))) == "nf4 (bitsandbytes)"
    old = {**raw, "compression_config": {"config_groups": INT4_GROUPS}}
    assert str(stored_weights.read(architecture.as_config(old))) == "compressed-tensors, int4 by group"
    for nothing in (None, {}, {"quant_method": "bitsandbytes", "load_in_4bit": False}):
        assert stored_weights.read(architecture.as_config({**raw, "quantization_config": nothing})) is None
    from transformers import AutoConfig, BitsAndBytesConfig

    live = AutoConfig.for_model("llama")
    live.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert str(stored_weights.read(live)) == "nf4 (bitsandbytes)"


@pytest.mark.parametrize(
    ("name", "asked", "accepted"),
    [
        ("nf4", "nf4", True), ("nf4", "fp4", False), ("nf4", "none", False), ("nf4", "int8", False),
        ("nf4", "fp8", False), ("int8", "int8", True), ("int8", "torchao_int8", False), ("fp8", "none", True),
        ("fp8", "fp8", False), ("fp8", "nf4", False), ("mxfp4", "none", True), ("mxfp4", "nf4", False),
        ("compressed fp8", "none", True), ("gptq", "nf4", False), ("gptq", "none", False),
    ],
)  # fmt: skip
def test_check_asked_for_another_storage_than_the_checkpoint_names_both(
    name: str, asked: str, accepted: bool, model: Path, quantized: dict[str, Path]
) -> None:
    declare(model, name, quantized)
    recipe = recipe_of(model, f"model.quantization={asked}")
    code, said = verdict(checker.check_without_examples, recipe)
    assert verdict(choice_checks.setup_of, recipe) == (code, said)
    assert code == (0 if accepted else Exit.INPUT)
    assert accepted or name == "gptq" or (asked in said and f"stored in {name}" in said)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("adapter.type=loha", "model.quantization"),
        ("adapter.type=qlora adapter.init_lora_weights=loftq", "adapter.init_lora_weights"),
        ("adapter.init_lora_weights=pissa", "adapter.init_lora_weights"),
        ("adapter.modules_to_save=[q_proj]", "adapter.modules_to_save"),
        ("speed.qat={config: IntxWeightOnlyConfig}", "model.quantization"),
    ],
)  # fmt: skip
def test_check_refuses_options_that_need_whole_weights_on_a_quantized_checkpoint(
    override: str, key: str, model: Path, quantized: dict[str, Path]
) -> None:
    shutil.copy(MODEL / "model.safetensors", model)
    recipe = recipe_of(model, *(override.split() if "loftq" in override else [override]))
    assert verdict(checker.check_without_examples, recipe)[0] == 0
    declare(model, "nf4", quantized)
    code, said = verdict(checker.check_without_examples, recipe)
    assert code == Exit.INPUT and f"{key}: the checkpoint is stored in nf4" in said, said
    assert verdict(choice_checks.setup_of, recipe) == (code, said)


def test_advice_on_a_quantized_checkpoint_passes_check(model: Path, quantized: dict[str, Path]) -> None:
    """Each change that a message names is accepted in its place."""
    cases = [
        ("nf4", "adapter.type=full", "adapter.type=lora"),
        ("int8", "adapter.type=qlora", "adapter.type=lora"),
        ("fp8", "adapter.type=qdora", "adapter.type=dora"),
        ("nf4", "model.quantization=fp4", "model.quantization=auto"),
    ]
    for name, refused, advised in cases:
        declare(model, name, quantized)
        code, said = verdict(checker.check_without_examples, recipe_of(model, refused))
        assert code == Exit.INPUT and advised.replace("=", ": ") in said
        assert verdict(checker.check_without_examples, recipe_of(model, advised))[0] == 0


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_check_finds_gptq_and_awq_weights_that_only_their_old_file_declares(file: str, model: Path) -> None:
    (model / file).write_text(json.dumps({"bits": 4, "group_size": 128}))
    name = "model.layers.0.self_attn.q_proj.qweight"
    save_file({name: torch.zeros(4, 4, dtype=torch.int32)}, model / "model.safetensors")
    recipe = recipe_of(model)
    code, said = verdict(checker.check_without_examples, recipe)
    assert code == Exit.INPUT and f"{file}" in said and "16-bit checkpoint" in said
    assert verdict(choice_checks.setup_of, recipe) == (code, said)
    save_file({"model.norm.weight": torch.ones(4)}, model / "model.safetensors")
    assert "16-bit" not in verdict(checker.check_without_examples, recipe)[1]  # a file that was left behind
