"""The weight files of a folder are those that transformers reads, and no others are counted anywhere."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import _get_resolved_checkpoint_files

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.core.untrusted_files import check_files
from finetune.core.weight_files import check_weight_files, find_weight_files
from finetune.models import architecture
from finetune.models.checkpoint_headers import tensors
from finetune.recipe.schema import Model
from support.paths import MODEL, QUICKSTART

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


def write(folder: Path, names: list[str], config: dict | None = None) -> Path:
    """Files of these names; of an index it names both shards."""
    (folder / "config.json").write_text(json.dumps(config or {}))
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        if name == INDEX:
            (folder / name).write_text(
                json.dumps({"metadata": {}, "weight_map": dict(zip("ab", SHARDS, strict=True))})
            )
        elif name.endswith(".safetensors"):
            save_file({f"t{number}.weight": torch.zeros(2, 3)}, folder / name)
        else:
            (folder / name).write_bytes(b"x")
    return folder


LAYOUTS = {
    "one file": ["model.safetensors"],
    "shards": [*SHARDS, INDEX],
    "consolidated beside": ["model.safetensors", "consolidated.safetensors"],
    "consolidated shards beside": [*SHARDS, INDEX, "consolidated-00001-of-00002.safetensors"],
    "an older save's shards beside": ["model.safetensors", *SHARDS],
    "one file and an index": ["model.safetensors", *SHARDS, INDEX],
    "a third shard that the index does not name": [*SHARDS, INDEX, "model-00003-of-00003.safetensors"],
    "variants beside": ["model.safetensors", "model.fp16.safetensors", "model.non_ema.safetensors"],
    "an adapter's weights beside": ["model.safetensors", "adapter_model.safetensors"],
    "optimizer beside": ["model.safetensors", "optimizer.safetensors", "scheduler.safetensors"],
    "original weights in a folder": ["model.safetensors", "original/model.safetensors"],
    "pickles beside": ["model.safetensors", "pytorch_model.bin", "pytorch_model-00001-of-00001.bin"],
    "gguf beside": ["model.safetensors", "model.gguf"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_find_weight_files_any_layout_finds_what_transformers_reads(layout: str, tmp_path: Path) -> None:
    folder = write(tmp_path, LAYOUTS[layout])
    theirs, _ = _get_resolved_checkpoint_files(str(folder), None, None, True, None, False)
    found = find_weight_files(folder)
    assert [str(path) for path in found] == sorted(theirs or [])
    assert set(tensors(folder)) == {name for path in found for name in load_file(path)}
    check_weight_files(folder)


def test_find_weight_files_named_by_config_finds_that_file(tmp_path: Path) -> None:
    names = ["model.safetensors", "other.safetensors"]
    folder = write(tmp_path, names, {"transformers_weights": "other.safetensors"})
    assert find_weight_files(folder) == [folder / "other.safetensors"]


def test_find_weight_files_adapter_folder_finds_the_adapters(tmp_path: Path) -> None:
    folder = write(tmp_path, ["adapter_model.safetensors", "model.safetensors", "adapter_config.json"])
    (folder / "config.json").unlink()
    assert find_weight_files(folder) == [folder / "adapter_model.safetensors"]


MISSING = {
    "no shard": ([INDEX], "2 of the 2 weight files are missing", "download"),
    "one shard": ([SHARDS[1], INDEX], "1 of the 2 weight files are missing", SHARDS[0]),
    "consolidated alone": (
        ["consolidated.safetensors"],
        "only consolidated.safetensors",
        "format of transformers",
    ),
    "shards alone": (SHARDS, f"only {SHARDS[0]}", f"download {INDEX}"),
    "a variant alone": (["model.fp16.safetensors"], "only model.fp16.safetensors", "rename"),
    "gguf alone": (["llama.gguf"], "only llama.gguf", "download"),
    "config alone": ([], "no weights", "download"),
}


@pytest.mark.parametrize("layout", MISSING)
def test_check_weight_files_that_transformers_cannot_read_are_an_error(layout: str, tmp_path: Path) -> None:
    names, found, fix = MISSING[layout]
    folder = write(tmp_path, names)
    with pytest.raises(UserError) as error:
        check_weight_files(folder)
    said = str(error.value)
    assert found in said and fix in said


def test_check_files_index_without_metadata_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path, [*SHARDS, INDEX])
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": content["weight_map"]}))
    with pytest.raises(KeyError, match="metadata"):
        _get_resolved_checkpoint_files(str(folder), None, None, True, None, False)
    with pytest.raises(UserError, match="has no metadata"):
        check_files(folder, "model.name")


def test_tensors_lfs_pointer_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\n")
    with pytest.raises(UserError, match="Git LFS pointer") as error:
        tensors(tmp_path)
    assert error.value.problems[0].fix == "git lfs pull"


def with_consolidated(folder: Path) -> Path:
    """The tiny model with the same weights once more under other names, as Mistral publishes them."""
    shutil.copytree(MODEL, folder)
    own = load_file(folder / "model.safetensors")
    save_file(
        {name.replace("q_proj", "wq"): value for name, value in own.items()},
        folder / "consolidated.safetensors",
    )
    return folder


def test_architecture_with_consolidated_beside_counts_each_parameter_once(tmp_path: Path) -> None:
    folder = with_consolidated(tmp_path / "model")
    wanted = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert architecture.read(Model(name=str(folder))).parameters == wanted


def test_check_module_of_consolidated_alone_is_unknown(tmp_path: Path, capsys) -> None:
    folder = with_consolidated(tmp_path / "model")
    said = ["check", str(QUICKSTART), f"model.name={folder}", "adapter.target_modules=[wq]"]
    assert main.main(said) == 2 and "wq" in capsys.readouterr().err
