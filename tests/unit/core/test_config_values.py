"""Sizes of configs that no model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig, logging

from finetune.core import config_values, untrusted_files


def test_config_values_accept_the_defaults_of_every_family() -> None:
    before, count = logging.get_verbosity(), 0
    logging.set_verbosity_error()
    try:
        for family in CONFIG_MAPPING:
            try:
                config = CONFIG_MAPPING[family]().to_dict()
            except Exception:  # families whose config has no defaults
                continue
            count += 1
            assert not list(untrusted_files.problems_of_config(config, Path(family), "model.name"))
    finally:
        logging.set_verbosity(before)
    assert count > 500


def test_the_axes_of_a_quantization_are_no_sizes_of_the_model(tmp_path) -> None:
    config = {"hidden_size": 8, "quantization_config": {"quant_type": {"granularity": {"dim": -1}}}}
    for added, count in ({}, 0), ({"dim": -1}, 1):
        (tmp_path / "config.json").write_text(json.dumps(config | added))
        found = list(untrusted_files._model_config(tmp_path / "config.json", "model.name"))
        assert len(found) == count


def test_a_key_that_replaces_a_method_of_transformers_is_refused() -> None:
    """With `save_pretrained: 3`, full fine-tuning would fail when it saves the model."""
    members = {name: getattr(PreTrainedConfig, name, None) for name in dir(PreTrainedConfig)}
    fixed = {
        name
        for name, member in members.items()
        if callable(member) or (isinstance(member, property) and member.fset is None)
    }
    assert {name for name in fixed if not name.startswith("__")} | {"attribute_map"} == config_values.MEMBERS
    for name in (*sorted(config_values.MEMBERS), "__class__"):
        for config in ({name: 3}, {"text_config": {name: "x"}}):
            (problem,) = untrusted_files.problems_of_config(config, Path("config.json"), "model.name")
            assert problem.found == name
    labels = {"label2id": {"update": 1}, "quantization_config": {"update": 1}}
    assert not list(untrusted_files.problems_of_config(labels, Path("config.json"), "model.name"))


@pytest.mark.parametrize("value", [5, True, "x", [5]])
@pytest.mark.parametrize(
    "name", ["base_model_tp_plan", "base_model_pp_plan", "sub_configs", "keys_to_ignore_at_inference"]
)
def test_an_attribute_of_a_config_class_with_another_type_is_refused(name: str, value: Any) -> None:
    """Other checks take a number of an unknown key for a size."""
    (problem,) = untrusted_files.problems_of_config({name: value}, Path("config.json"), "model.name")
    assert problem.found.startswith(f"{name}: ") and problem.code == "model-config"


@pytest.mark.parametrize(
    ("name", "value"),
    [("return_dict", False), ("return_dict", None), ("fusion_config", {"x": 1}), ("fusion_config", 1)],
)
def test_a_value_that_changes_what_a_model_returns_is_refused(name: str, value: Any) -> None:
    for config in ({name: value}, {"text_config": {name: value}}):
        (problem,) = untrusted_files.problems_of_config(config, Path("config.json"), "model.name")
        assert problem.fix == f"remove {name} from the file"
    supported = {"return_dict": True, "fusion_config": None}
    assert not list(untrusted_files.problems_of_config(supported, Path("config.json"), "model.name"))
