"""Values in messages."""

import pytest

from finetune.core.formatting import as_yaml
from finetune.recipe.recipe_errors import show


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        (1e-05, "1e-05"),
        (float("-inf"), "-.inf"),
        (float("nan"), ".nan"),
        ("a: b", "a: b"),
        (["q_proj", False, [1]], "[q_proj, false, [1]]"),
        ({"low": 0.1, "high": None}, "{low: 0.1, high: null}"),
    ],
)
def test_as_yaml_writes_a_value_as_a_recipe_does(value: object, text: str) -> None:
    assert as_yaml(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true (boolean)"),
        (None, "null"),
        ("8", '"8" (string)'),
        ([None, True], "[null, true] (list)"),
        ({"r": None}, "{r: null}"),
        ("a" * 80, f'"{"a" * 57}..." (string)'),
    ],
)
def test_show_names_the_type_of_a_value(value: object, text: str) -> None:
    assert show(value) == text
