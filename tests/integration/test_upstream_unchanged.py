"""A run changes no class and no module of another library: its forwards are set on instances."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from support.paths import ROOT

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes")


def is_upstream(name: str | None) -> bool:
    return (name or "").partition(".")[0] in LIBRARIES


def callables(owner: Any) -> dict[str, Any]:
    """The functions, methods and classes among the attributes of a module or a class."""
    kinds = FunctionType, type, staticmethod, classmethod, property
    return {name: value for name, value in list(vars(owner).items()) if issubclass(type(value), kinds)}


def record() -> dict[str, dict[str, Any]]:
    """Each imported module and class of the libraries, with its functions, methods and classes."""
    modules = [module for name, module in list(sys.modules.items()) if is_upstream(name)]
    owners: dict[str, Any] = {one.__name__: one for one in modules if isinstance(one, ModuleType)}
    for module in list(owners.values()):
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and is_upstream(value.__module__):
                owners[f"{value.__module__}.{value.__qualname__}"] = value
    return {name: callables(owner) for name, owner in owners.items()}


def changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """What is another function or class than before, what is gone, and what was added to a class."""
    found = list[str]()
    for owner, attributes in before.items():
        now = after.get(owner, attributes)
        found += [f"{owner}.{name}" for name, value in attributes.items() if now.get(name) is not value]
        if owner not in sys.modules:  # a module gets the names that it imports when they are asked for
            found += [f"{owner}.{name}" for name in sorted(now.keys() - attributes.keys())]
    return found


def assigned_to_imports(text: str) -> Iterator[str]:
    """Assignments to an attribute of what another library exports."""
    tree, imported = ast.parse(text), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {
                (one.asname or one.name).partition(".")[0] for one in node.names if is_upstream(one.name)
            }
        elif isinstance(node, ast.ImportFrom) and is_upstream(node.module):
            imported |= {one.asname or one.name for one in node.names}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "?")]
        for target in (part for one in targets for part in getattr(one, "elts", [one])):
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in imported:
                yield ast.unparse(target)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\ntorch.nn.Linear.forward = f", ["torch.nn.Linear.forward"]),
        ("from peft import LoraConfig as C\nC.r = 1", ["C.r"]),
        ("from trl import SFTTrainer\nsetattr(SFTTrainer, 'train', f)", ["SFTTrainer.?"]),
        ("import torch\nlayer.forward = f\ntorch.save(layer, 'a')", []),
    ],
)
def test_assigned_to_imports_finds_each_kind(text: str, found: list[str]) -> None:
    assert list(assigned_to_imports(text)) == found


# Replaced within a context alone: code of a stranger would run through them, and there is no other way in
RESTORED = {
    "finetune/evaluation/task_guard.py": ["datasets.load_dataset", "datasets.load_dataset"],
    "finetune/launch/launcher.py": ["launch.env_var_path_add", "launch.env_var_path_add"],
}


def test_no_source_assigns_to_what_another_library_exports() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): list(assigned_to_imports(path.read_text()))
        for path in (ROOT / "finetune").rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == RESTORED


def test_changes_finds_another_method_a_lost_one_and_a_new_one() -> None:
    before = {"sys": {"a": 1}, "torch.nn.Linear": {"forward": 1, "reset": 2}}
    after = {"sys": {"a": 1, "lazy": 3}, "torch.nn.Linear": {"forward": 5, "more": 4}}
    assert changes(before, after) == [f"torch.nn.Linear.{name}" for name in ("forward", "reset", "more")]


def test_runs_change_no_class_and_no_module_of_another_library(train) -> None:
    """Fused adapters, activation checkpointing and compiled layers, with evaluation of what was saved."""
    import torch
    import torch._dynamo

    from finetune.training import pipeline  # noqa: F401 (imports the libraries)

    # torch itself changes these when a module is first compiled, and when an optimizer is first made
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1))
    torch.compiler.reset()
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        optimizer([torch.nn.Parameter(torch.ones(1))])
    settings, before = torch._dynamo.config.get_config_copy(), record()
    assert len(before) > 1000
    train("adapter.type=dora", "speed.activation_checkpointing=norms", "eval.eval_steps=1", name="dora")
    train("adapter.type=adalora", "speed.compile=true", name="adalora")
    assert not (found := changes(before, record())), found
    assert torch._dynamo.config.get_config_copy() == settings
