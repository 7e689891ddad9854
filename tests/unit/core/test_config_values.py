"""Sizes of configs that no model has."""

from __future__ import annotations

import json

import pytest
from transformers import CONFIG_MAPPING, logging

from finetune.core import config_values, untrusted_files


@pytest.mark.filterwarnings("ignore")  # some defaults are deprecated
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
            assert not list(config_values.problems(untrusted_files._entries(config), family, "model.name"))
    finally:
        logging.set_verbosity(before)
    assert count > 500


def test_the_axes_of_a_quantization_are_no_sizes_of_the_model(tmp_path) -> None:
    config = {"hidden_size": 8, "quantization_config": {"quant_type": {"granularity": {"dim": -1}}}}
    for added, count in ({}, 0), ({"dim": -1}, 1):
        (tmp_path / "config.json").write_text(json.dumps(config | added))
        found = list(untrusted_files._model_config(tmp_path / "config.json", "model.name"))
        assert len(found) == count
