"""Damaged tensors of checkpoints that are quantized already: no run trains on other weights in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.models import checkpoint_headers
from finetune.quantization import stored_tensors, stored_weights
from finetune.quantization.four_bit_state import StoredTensor
from support import quantized_checkpoints
from support.paths import MODEL
from support.tiny_models import recipe

Tensors = dict[str, torch.Tensor]
SCALES = {
    "fp8": "_scale_inv",
    "compressed": ".weight_scale",
    "mxfp4": "_scales",
    "int8": ".SCB",
    "nf4": ".weight.absmax",
}
VALUES = {"mxfp4": "_blocks"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def scale_of(tensors: Tensors, storage: str) -> str:
    return min(name for name in tensors if name.endswith(SCALES[storage]))


def value_of(tensors: Tensors, storage: str) -> str:
    end = VALUES.get(storage, "q_proj.weight")
    return min(name for name in tensors if name.endswith(end))


def without_scale(tensors: Tensors, storage: str) -> None:
    del tensors[scale_of(tensors, storage)]


def without_scales(tensors: Tensors, storage: str) -> None:
    for name in [name for name in tensors if name.endswith(SCALES[storage])]:
        del tensors[name]


def without_weight(tensors: Tensors, storage: str) -> None:
    del tensors[value_of(tensors, storage)]


def with_scale(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, str], None]:
    def damage(tensors: Tensors, storage: str) -> None:
        name = scale_of(tensors, storage)
        tensors[name] = change(tensors[name]).contiguous()

    return damage


def with_value(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, str], None]:
    def damage(tensors: Tensors, storage: str) -> None:
        name = value_of(tensors, storage)
        tensors[name] = change(tensors[name]).contiguous()

    return damage


DAMAGE: dict[str, Callable[[Tensors, str], None]] = {
    "no scale of one weight": without_scale,
    "no scales": without_scales,
    "no weight of a scale": without_weight,
    "integers as a scale": with_scale(lambda scale: scale.to(torch.int64)),
    "truth values as a scale": with_scale(lambda scale: scale.float() > 0),
    "no values in a scale": with_scale(lambda scale: scale.flatten()[:0]),
    "a scale of eight dimensions": with_scale(lambda scale: scale[(None,) * 7]),
    "a plain weight with a scale": with_value(lambda value: value.float().bfloat16()),
    "integers as a weight": with_value(lambda value: value.float().nan_to_num().to(torch.int64)),
}
OF_SHAPES: dict[str, Callable[[Tensors, str], None]] = {  # bitsandbytes describes its blocks in the file
    "half a scale": with_scale(lambda scale: scale[: len(scale) // 2]),
    "a scale twice": with_scale(lambda scale: torch.cat([scale, scale])),
    "half a weight": with_value(lambda value: value[: len(value) // 2]),
    "a flat weight": with_value(lambda value: value.flatten()),
}


@pytest.fixture(scope="module")
def checkpoints(two_layers: Path, tmp_path_factory: Any) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    quantized_checkpoints.fp8_in_blocks(two_layers, folder / "fp8")
    quantized_checkpoints.fp8_by_rows(two_layers, folder / "compressed")
    quantized_checkpoints.mxfp4_of_gpt_oss(MODEL, folder / "mxfp4", 4096)
    for storage in ("int8", "nf4"):
        quantized_checkpoints.bitsandbytes(two_layers, folder / storage, storage)
    return {storage: folder / storage for storage in SCALES}


def damaged(source: Path, folder: Path, damage: Callable[[Tensors], object]) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def headers(folder: Path) -> dict[str, StoredTensor]:
    declared = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    return checkpoint_headers.check_tensors(folder, declared)


@pytest.mark.parametrize("storage", SCALES)
def test_whole_checkpoints_are_accepted(storage: str, checkpoints: dict[str, Path]) -> None:
    assert headers(checkpoints[storage])


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("storage", SCALES)
def test_weights_and_scales_that_do_not_fit_are_refused(
    storage: str, damage: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    made = damaged(checkpoints[storage], tmp_path / "model", lambda each: DAMAGE[damage](each, storage))
    with pytest.raises(UserError, match="quantized weights of the model do not fit their scales"):
        headers(made)


@pytest.mark.parametrize("damage", OF_SHAPES)
@pytest.mark.parametrize("storage", ("fp8", "compressed", "mxfp4", "int8"))
def test_shapes_that_do_not_fit_are_refused(
    storage: str, damage: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    made = damaged(checkpoints[storage], tmp_path / "model", lambda each: OF_SHAPES[damage](each, storage))
    assert main.main(["check", str(recipe(tmp_path, made))]) == 2
    assert "[model-files]" in capsys.readouterr().err


@pytest.mark.parametrize("command", ("check", "train"))
@pytest.mark.parametrize("storage", ("fp8", "compressed"))
def test_commands_refuse_a_weight_without_its_scale(
    storage: str, command: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    made = damaged(checkpoints[storage], tmp_path / "model", lambda each: without_scale(each, storage))
    assert main.main([command, str(recipe(tmp_path, made))]) == 2
    assert "has no scale" in capsys.readouterr().err


def test_later_commands_refuse_it_too(checkpoints: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    """The base model was damaged after the run."""
    shutil.copytree(checkpoints["fp8"], tmp_path / "base")
    path = recipe(tmp_path, tmp_path / "base")
    assert main.main(["train", str(path), "--quiet"]) == 0
    shutil.rmtree(tmp_path / "base")
    damaged(checkpoints["fp8"], tmp_path / "base", lambda each: without_scale(each, "fp8"))
    capsys.readouterr()
    for command in (["evaluate"], ["merge"], ["export", "--to", "vllm"]):
        assert main.main([command[0], str(tmp_path / "run"), *command[1:]]) == 2
        assert "has no scale" in capsys.readouterr().err


@pytest.mark.parametrize("storage", ("nf4", "int8"))
@pytest.mark.parametrize("skip", ("up_proj", "model.layers.1"))
def test_quantized_weights_of_modules_that_the_config_skips_are_refused(
    storage: str, skip: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints[storage], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] = [skip]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is quantized, but llm_int8_skip_modules has"):
        headers(folder)


@pytest.mark.parametrize("command", ("check", "train"))
def test_mxfp4_weights_of_fewer_experts_are_refused(
    command: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    def damage(tensors: Tensors) -> None:
        for name in [*tensors]:
            if "layers.0.mlp.experts.down_proj_" in name:
                tensors[name] = tensors[name][:-1].contiguous()

    made = damaged(checkpoints["mxfp4"], tmp_path / "model", damage)
    assert main.main([command, str(recipe(tmp_path, made))]) == 2
    assert "[model-files]" in capsys.readouterr().err


@pytest.mark.parametrize("storage", ("fp8", "compressed", "int8", "mxfp4"))
def test_quantized_weights_that_no_config_declares_are_refused(
    storage: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """transformers reads fp8 and int8 values as weights, and ignores their scales."""
    made = damaged(checkpoints[storage], tmp_path / "model", lambda _: None)
    config = json.loads((made / "config.json").read_text())
    config.pop("quantization_config")
    (made / "config.json").write_text(json.dumps(config))
    assert main.main(["check", str(recipe(tmp_path, made))]) == 2
    assert "config.json has no quantization_config" in capsys.readouterr().err


STATE = "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4"
ABSMAX = "model.layers.0.self_attn.q_proj.weight.absmax"
STATES: dict[str, Any] = {
    "larger blocks": {"blocksize": 128},
    "no blocks": {"blocksize": 0},
    "a block of other values": {"blocksize": 64.0},
    "a larger shape": {"shape": [4096, 4096]},
    "a shape of another layer": {"shape": [512, 128]},
    "no shape": {"shape": None},
    "a negative shape": {"shape": [-256, -256]},
    "an attribute of torch": {"dtype": "load"},
    "another type": {"quant_type": "fp4"},
    "scales of scales": {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1e400},
}


@pytest.mark.parametrize("case", STATES)
def test_descriptions_of_4_bit_weights_that_do_not_fit_are_refused(
    case: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """bitsandbytes would read memory outside of the tensors."""

    def damage(tensors: Tensors) -> None:
        state = json.loads(bytes(tensors[STATE].tolist())) | STATES[case]
        tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        if case == "scales of scales":
            tensors[ABSMAX.replace("absmax", "nested_absmax")] = torch.ones(1)
            tensors[ABSMAX.replace("absmax", "nested_quant_map")] = torch.ones(256)

    made = damaged(checkpoints["nf4"], tmp_path / "model", damage)
    assert main.main(["check", str(recipe(tmp_path, made))]) == 2
    assert "[model-files]" in capsys.readouterr().err


@pytest.mark.parametrize("table", ("absmax", "quant_map", "quant_state.bitsandbytes__nf4"))
def test_short_and_missing_tables_of_4_bit_weights_are_refused(
    table: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    name = ABSMAX.replace("absmax", table)
    for number, size in enumerate((None, 0, 1, -1)):

        def damage(tensors: Tensors, size: int | None = size) -> None:
            held = tensors.pop(name)
            tensors.update({} if size is None else {name: held[:size].clone()})

        with pytest.raises(UserError, match="do not fit their scales"):
            headers(damaged(checkpoints["nf4"], tmp_path / f"model-{number}", damage))


def test_nested_scales_are_accepted(two_layers: Path, tmp_path: Path) -> None:
    """As unsloth's checkpoints have them."""
    import transformers

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    made = transformers.AutoModelForCausalLM.from_pretrained(two_layers, quantization_config=config)
    made.save_pretrained(tmp_path / "nested")
    found = headers(tmp_path / "nested")
    assert any(name.endswith("nested_absmax") for name in found)
    with pytest.raises(UserError, match="nested_absmax"):
        headers(
            damaged(
                tmp_path / "nested",
                tmp_path / "short",
                lambda tensors: tensors.update(
                    {name: held[:-1] for name, held in tensors.items() if name.endswith("nested_absmax")}
                ),
            )
        )


@pytest.mark.parametrize("dtype", (torch.int64, torch.int8, torch.bool, torch.complex64))
def test_weights_that_are_no_floating_point_numbers_are_refused(
    dtype: torch.dtype, two_layers: Path, tmp_path: Path, capsys: Any
) -> None:
    """A flipped bit in a header can turn a dtype into one of these. transformers casts such a weight."""

    def damage(tensors: Tensors) -> None:
        name = value_of(tensors, "plain")
        tensors[name] = tensors[name].to(dtype)

    made = damaged(two_layers, tmp_path / "model", damage)
    assert main.main(["check", str(recipe(tmp_path, made))]) == 2
    assert "no floating-point numbers" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
@pytest.mark.parametrize("declared", (False, True))
def test_fp8_weights_without_a_scale_are_refused_in_every_format(
    dtype: torch.dtype, declared: bool, two_layers: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def damage(tensors: Tensors) -> None:
        name = "model.embed_tokens.weight"
        tensors[name] = tensors[name].float().to(dtype)

    made = damaged(checkpoints["compressed"] if declared else two_layers, tmp_path / "model", damage)
    with pytest.raises(UserError, match=r"no scales|has no scale"):
        headers(made)


DTYPES = (torch.bool, torch.int32, torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_of_another_dtype_is_no_source(
    dtype: torch.dtype, two_layers: Path, tmp_path: Path, capsys: Any
) -> None:
    tensors = {f"base_model.model.a.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    tensors["base_model.model.a.lora_A.weight"] = torch.ones(2, 2).to(dtype)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    adapter = {"type": "lora", "init_from": str(tmp_path), "from_other_base": True}
    assert main.main(["check", str(recipe(tmp_path, two_layers, adapter=adapter))]) == 2
    assert "no floating-point numbers" in capsys.readouterr().err


def test_an_adapter_of_integers_is_refused(trained: Any, capsys: Any) -> None:
    run = trained("lora")
    path = run.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    tensors[name] = (100 * tensors[name]).to(torch.int32)
    save_file(tensors, path, {"format": "pt"})
    for command in (["evaluate"], ["merge"], ["export", "--to", "vllm"]):
        assert main.main([command[0], str(run.path), *command[1:]]) == 4
        assert "no floating-point numbers" in capsys.readouterr().err


FITS = {  # dtype and shape of a weight, and the shape of its scale
    "blocks": ("F8_E4M3", [64, 96], [2, 3]),
    "one block": ("F8_E4M3", [24, 16], [1, 1]),
    "stacked experts": ("F8_E4M3", [4, 64, 96], [4, 2, 3]),
    "two fused projections of small experts": ("F8_E4M3", [4, 32, 96], [4, 2, 3]),
    "4-bit experts": ("I8", [64, 16], [64, 1]),
}
MISFITS = {
    "a block too few": ("F8_E4M3", [64, 96], [1, 3]),
    "a part of a block at the end": ("F8_E4M3", [48, 32], [2, 1]),  # transformers would take blocks of 24
    "larger blocks": ("F8_E4M3", [64, 96], [1, 1]),
    "no dimensions": ("F8_E4M3", [64, 96], []),
    "other experts": ("F8_E4M3", [4, 64, 96], [3, 2, 3]),
    "one dimension": ("F8_E4M3", [64], [2]),
}


def problems_of(declared: dict[str, Any], weight: StoredTensor, scale: list[int]) -> list[Any]:
    tensors = {"a.weight": weight, "a.weight_scale_inv": StoredTensor("F32", scale)}
    return stored_tensors.problems(stored_weights.format_of(declared), declared, tensors)


@pytest.mark.parametrize("case", FITS)
def test_scales_of_blocks_that_fit(case: str) -> None:
    dtype, shape, scale = FITS[case]
    assert not problems_of(BLOCKS, StoredTensor(dtype, shape), scale)


@pytest.mark.parametrize("case", MISFITS)
def test_scales_of_blocks_that_do_not_fit(case: str) -> None:
    dtype, shape, scale = MISFITS[case]
    assert problems_of(BLOCKS, StoredTensor(dtype, shape), scale)


def test_one_scale_for_a_weight_without_blocks() -> None:
    declared = {"quant_method": "fp8", "weight_block_size": None}
    for shape, scale in (([64, 96], []), ([64, 96], [1]), ([4, 64, 96], [4]), ([4, 64, 96], [4, 1, 1])):
        assert not problems_of(declared, StoredTensor("F8_E4M3", shape), scale)
    assert problems_of(declared, StoredTensor("F8_E4M3", [64, 96]), [3])


def test_a_parameter_named_scale_is_no_scale_of_a_plain_weight() -> None:
    tensors = {"norm.weight": StoredTensor("F32", [8]), "norm.scale": StoredTensor("F32", [8])}
    assert not stored_tensors.problems(stored_weights.format_of(BLOCKS), BLOCKS, tensors)
