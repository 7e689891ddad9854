"""The recipes that the package ships: there are some for each model and adapter, and each is valid."""

import re

import pytest

from finetune.cli import main
from finetune.core import shipped_files
from support.adapters import ADAPTERS

RECIPES = shipped_files.recipes()


def test_there_are_recipes_for_each_model_and_adapter() -> None:
    others = {"adapters", "baselines", "gpus", "isc25", "qwen3_30b_a3b", "gpt_oss_20b"}
    models = {name.partition("/")[0] for name in RECIPES if "/" in name} - others
    assert models == {"llama3_8b", "llama3_1b", "qwen3_8b", "mistral_7b"}
    for model in models:
        kinds = {name.partition("/")[2] for name in RECIPES if name.startswith(f"{model}/")}
        assert kinds == set(ADAPTERS) - {"qdora"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_checks(name: str, capsys) -> None:
    # FlashAttention 3, which is built from source, is not in the test environment
    options = ["model.attention=auto"] if name.startswith("isc25/") else []
    assert main.main(["check", str(RECIPES[name]), *options]) == 0, capsys.readouterr().err
    first = RECIPES[name].read_text().splitlines()[0]
    schema = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert schema and (RECIPES[name].parent / schema[1]).resolve() == shipped_files.SCHEMA
    assert shipped_files.purpose(RECIPES[name])
