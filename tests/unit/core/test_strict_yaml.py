"""YAML 1.2 scalars, positions, and what is refused."""

import math
import time

import pytest

from finetune.core import strict_yaml
from finetune.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E5", 2e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("0x10", 16),
        ("0o17", 15),
        ("017", 17),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("12:30", "12:30"),  # YAML 1.1 reads 750
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-4'", "1e-4"),
        ('"null"', "null"),
        (".inf", math.inf),
    ],
)
def test_scalars_are_yaml_1_2(text: str, value: object) -> None:
    parsed = strict_yaml.parse(f"key: {text}", "a.yaml").value["key"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_every_value_has_its_place() -> None:
    document = strict_yaml.parse("a:\n  b: [1, {c: 2}]\n", "a.yaml")
    assert document.value == {"a": {"b": [1, {"c": 2}]}}
    assert document.where["a", "b"] == "a.yaml:2:3"
    assert document.where["a", "b", "1", "c"] == "a.yaml:2:11"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: 1\nb: 2\na: 3\n", "the mapping has the same key twice"),
        ("a: !!python/object/apply:os.system [ls]", "YAML tags are not allowed"),
        ("a: !local 1", "YAML tags are not allowed"),
        ("a: &x 1\nb: 2", "YAML anchors are not allowed"),
        ("? [1, 2]\n: 3", "a list or a mapping can't be a key"),
        ("a: 1\n---\nb: 2", "the file has a second YAML document"),
    ],
)
def test_refused_with_its_place(text: str, what: str) -> None:
    problems = strict_yaml.parse(text, "a.yaml").problems
    assert what in [problem.what for problem in problems]
    assert all(problem.where.startswith("a.yaml:") for problem in problems)


def test_both_places_of_a_duplicate_are_named() -> None:
    (problem,) = strict_yaml.parse("a: 1\nb: 2\na: 3\n", "a.yaml").problems
    assert problem.where == "a.yaml:3:1"
    assert "a.yaml:1:1" in problem.found


def test_an_alias_bomb_ends_at_once() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    started = time.monotonic()
    problems = strict_yaml.parse(bomb, "a.yaml").problems
    assert time.monotonic() - started < 1
    assert "YAML aliases are not allowed" in [problem.what for problem in problems]


def test_a_large_file_is_not_read(tmp_path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"#" * (strict_yaml.MAX_BYTES + 1))
    with pytest.raises(UserError, match="too large for the task") as raised:
        strict_yaml.text_of(path, "the task")
    assert raised.value.problems[0].found == "262,145 bytes"


@pytest.mark.parametrize("text", ["a: [1, 2", "a: b: c", "\ta: 1", "a: '", "[" * 5000, "a: " + "x" * 300_000])
def test_what_is_not_yaml_is_one_located_error(text: str) -> None:
    with pytest.raises(UserError) as raised:
        strict_yaml.parse(text, "a.yaml")
    assert raised.value.problems[0].where.startswith("a.yaml")
