"""Lists of module names: shipped, cached on disk, or made on the meta device; all equal the model's own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from finetune.core.errors import UserError
from finetune.models import (
    architecture,
    checkpoint_headers,
    meta_forward,
    model_class,
    module_lists,
    module_names,
)
from support.architectures import CONFIGS, MULTIMODAL, config_of
from support.paths import MODEL
from support.soak import soak_except

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = sorted(json.loads(module_lists.SHIPPED.read_text())["families"])
WITHOUT_META = ("jetmoe",)  # makes a list of the numbers in a tensor
SIZES: dict[str, Any] = {
    "hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 89, "num_experts": 3, "num_local_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 18, "shared_expert_intermediate_size": 38,
    "max_position_embeddings": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def on_meta(config: Any) -> module_names.Names:
    with torch.device("meta"):
        return module_lists.of_meta_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def read(folder: Path, config: Any) -> module_lists.ModuleList:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(config.to_json_string() if hasattr(config, "to_json_string") else json.dumps(config))
    return module_lists.read(path, architecture.config_in(path))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_weights_have_the_names_that_check_looks_for(family: str, tied: bool, tmp_path) -> None:
    """Of the whole model, and of its base model, such as `layers.0` for `model.layers.0`."""
    config = AutoConfig.for_model(family, **{**CONFIGS[family], "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    names = module_lists.read(
        tmp_path / "config.json", architecture.config_in(tmp_path / "config.json")
    ).names
    stored = dict(checkpoint_headers.stored(tmp_path))
    same = module_lists.has_names_of_files(names)
    assert not checkpoint_headers.lacks(stored, names, same_names=same)
    if not same:
        return
    if tied:
        prefix = f"{model.base_model_prefix}."
        bare = {name.removeprefix(prefix): one for name, one in stored.items() if name.startswith(prefix)}
        assert not checkpoint_headers.lacks(bare, names, same_names=True)
    for name in sorted(stored)[::7]:
        assert checkpoint_headers.lacks(stored.keys() - {name}, names, same_names=True) == [name]


@pytest.mark.parametrize(
    "others", [{}, {"head_dim": 20, "tie_word_embeddings": False}], ids=["", "wide heads"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_list_of_any_size_equals_the_model(family: str, others: dict[str, Any], tmp_path) -> None:
    own = AutoConfig.for_model(family)
    known = {key for key in (*own.to_dict(), *own.attribute_map) if key in SIZES}
    if family == "olmoe":
        others = {key: value for key, value in others.items() if key != "head_dim"}
    config = AutoConfig.for_model(family, **{key: SIZES[key] for key in known}, **others)
    found = read(tmp_path / "m", config)
    assert found.source == "the list of its family" and not found.note
    assert found.names == on_meta(config)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("gpt2", {"n_inner": 50}),
        ("gpt_neox", {"attention_bias": False}),
    ],
)
def test_config_with_other_modules_than_its_family_is_built(
    family: str, changed: dict[str, Any], tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    config = AutoConfig.for_model(family, **{**CONFIGS[family], **changed})
    found = read(tmp_path / "m", config)
    assert found.source == "the model on the meta device" and "for the first time" in found.note
    assert found.names == on_meta(config)


@pytest.mark.parametrize("family", ["stablelm", "openai-gpt", "mamba"])
def test_names_of_an_unknown_family_are_built_once(family: str, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    config = AutoConfig.for_model(family, **CONFIGS[family])
    with caplog.at_level(logging.WARNING):
        first = read(tmp_path / "m", config)
    assert not caplog.records and "for the first time" in first.note
    monkeypatch.setattr(module_lists, "_build", lambda folder: pytest.fail("built again"))
    second = read(tmp_path / "m", config)
    assert second.names == first.names and not second.note
    raw = {**json.loads(config.to_json_string()), "_name_or_path": "elsewhere", "eos_token_id": 5}
    assert read(tmp_path / "moved", raw).names == first.names  # what changes no module asks for no new list


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"kinds": 3}', '{"kinds": {}, "shapes": {}}'])
def test_damaged_list_on_disk_is_built_anew(damage: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    config = AutoConfig.for_model("stablelm", **CONFIGS["stablelm"])
    first = read(tmp_path / "m", config)
    (kept,) = (tmp_path / "cache" / "modules").iterdir()
    kept.write_text(damage)
    again = read(tmp_path / "m", config)
    assert again.names == first.names and again.note
    assert json.loads(kept.read_text())["names"]["family"] == "stablelm"


@pytest.mark.filterwarnings("ignore")  # of packages that transformers imports
@pytest.mark.parametrize("family", soak_except([*CONFIGS, *MULTIMODAL][::3], [*CONFIGS, *MULTIMODAL]))
def test_a_model_runs_on_the_meta_device(family: str) -> None:
    with torch.device("meta"):
        config = config_of(family)
        model = model_class.auto_class(config).from_config(config, dtype=torch.bfloat16)
    if family in WITHOUT_META:
        assert meta_forward.inputs(model) is None
        return
    given = meta_forward.inputs(model)
    assert given is not None and meta_forward.logits(model, given).shape[-1] == 97


@pytest.mark.parametrize("family", soak_except(sorted(CONFIGS)[1::3], sorted(CONFIGS)))
def test_names_on_the_meta_device_equal_those_of_the_model(family: str, tmp_path, monkeypatch) -> None:
    """A run reads the names of the model in memory, `check` those of its config."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    config = AutoConfig.for_model(family, **CONFIGS[family])
    found = read(tmp_path / "m", config).names
    live = module_lists.of_live_model(AutoModelForCausalLM.from_config(config))
    assert found == live
    assert found.linear and found.embedding in found.modules


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("mamba", {"conv1d", "dt_proj"}),  # read, and not called
        ("qwen3_next", {"conv1d"}),  # beside experts
        ("deepseek_v32", {"weights_proj", "wk", "wq_b", "k_norm"}),  # choose the tokens of attention
        ("llama", set()),
        ("qwen3_moe", set()),
    ],
)
def test_layers_that_no_gradient_reaches_are_known_from_the_config(family: str, layers: set[str]) -> None:
    found = on_meta(AutoConfig.for_model(family, **CONFIGS[family]))
    assert {module_names.short(name) for name in found.without_gradient} == layers


def test_layers_that_a_model_does_not_call_in_training_alone_are_known() -> None:
    """Gemma 3n calls them in evaluation, and reads their weights in training."""
    found = on_meta(AutoConfig.for_model("gemma3n_text", **CONFIGS["gemma3n_text"]))
    assert {module_names.short(name) for name in found.without_gradient} == {"correction_coefs"}


def test_model_that_transformers_does_not_know_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="can't build a model from this config"):
        read(tmp_path / "m", {"model_type": "no-such-family"})
    assert not (tmp_path / "cache").exists()


def test_shipped_and_cached_lists_are_read_without_torch(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    read(tmp_path / "m", AutoConfig.for_model("stablelm", **CONFIGS["stablelm"]))
    program = (
        "import sys; from pathlib import Path; from finetune.models import architecture, module_lists\n"
        "for path in map(Path, sys.argv[1:]):\n"
        "    assert module_lists.read(path, architecture.config_in(path)).names.linear\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    )
    paths = [str(MODEL / "config.json"), str(tmp_path / "m" / "config.json")]
    subprocess.run([sys.executable, "-c", program, *paths], check=True)


def test_families_whose_files_have_other_names_are_known() -> None:
    """transformers renames tensors while it loads them; `check` must not miss them in the files."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    renamed = {
        family
        for family in FAMILIES
        for name in (family, MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]].__name__)
        if get_checkpoint_conversion_mapping(name)
    }
    assert renamed - {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"} == {*module_lists.RENAMED}
