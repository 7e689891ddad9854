"""The Trainer is complete when it is constructed: no other module sets an attribute of it."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.training.trainer import Trainer
from finetune.training.trainer_parts import TrainerParts
from support.faults import Fault, injected
from support.faulty_runs import FEW
from support.paths import ROOT

OWN = ROOT / "finetune" / "training" / "trainer.py"


def targets(tree: ast.AST) -> Iterator[ast.expr]:
    """Every expression that a statement assigns to or deletes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            found = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            found = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            yield ast.Attribute(node.args[0], "?")
            continue
        else:
            continue
        yield from (part for one in found for part in getattr(one, "elts", [one]))


def set_from_outside(text: str) -> list[str]:
    """Attributes of a Trainer that this source sets."""
    attributes = [one for one in targets(ast.parse(text)) if isinstance(one, ast.Attribute)]
    owners = [(ast.unparse(one.value).rpartition(".")[2], one) for one in attributes]
    return [ast.unparse(one) for owner, one in owners if owner.endswith("trainer")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("trainer.loader = 1", ["trainer.loader"]),
        ("a, self.trainer.loader = 1, 2", ["self.trainer.loader"]),
        ("trainer.sums += 1", ["trainer.sums"]),
        ("setattr(trainer, 'a', 1)", ["trainer.?"]),
        ("self.loader = trainer.loader", []),
    ],
)
def test_set_from_outside_finds_each_kind_of_assignment(text: str, found: list[str]) -> None:
    assert set_from_outside(text) == found


def test_no_source_sets_an_attribute_of_the_trainer() -> None:
    found = {str(path): set_from_outside(path.read_text()) for path in (ROOT / "finetune").rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def test_trainer_parts_are_frozen() -> None:
    parameters: Any = getattr(TrainerParts, "__dataclass_params__")  # noqa: B009 (private to type checkers)
    assert dataclasses.is_dataclass(TrainerParts) and parameters.frozen


def test_a_run_sets_the_trainer_s_attributes_in_its_own_module_only(train, monkeypatch) -> None:
    """In a step that is made again, in a stopped run, and in the run that resumes it."""
    setters = set[str]()

    def setattr_with_origin(self: Trainer, name: str, value: object) -> None:
        setters.add(f"{sys._getframe(1).f_code.co_filename} {name}")
        object.__setattr__(self, name, value)

    monkeypatch.setattr(Trainer, "__setattr__", setattr_with_origin, raising=False)
    given = [*FEW, "adapter.type=adalora", "train.per_device_train_batch_size=2"]
    with injected(Fault("oom", step=2)):
        train(*given, "--until=3", code=75)
    train(*given, "--resume")
    ours = {text for text in setters if Path(text.split(" ")[0]).is_relative_to(ROOT / "finetune")}
    assert {text for text in ours if not text.startswith(str(OWN))} == set()
    assert len(ours) > 10
