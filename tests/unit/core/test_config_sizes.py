"""Sizes of configs that no model has."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING, logging

from finetune.core import config_sizes, untrusted_files


@pytest.mark.filterwarnings("ignore")  # some defaults are deprecated
def test_config_sizes_accept_the_defaults_of_every_family() -> None:
    before, count = logging.get_verbosity(), 0
    logging.set_verbosity_error()
    try:
        for family in CONFIG_MAPPING:
            try:
                config = CONFIG_MAPPING[family]().to_dict()
            except Exception:
                continue
            count += 1
            assert not list(config_sizes.problems(untrusted_files._entries(config), family, "model.name"))
    finally:
        logging.set_verbosity(before)
    assert count > 500
