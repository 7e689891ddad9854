"""No function has more than six parameters, so that a call says what it hands over."""

from __future__ import annotations

import ast

from support.paths import ROOT

MOST = 6
APART = "finetune/kernels/"  # operators, whose arguments are those of one launch of a kernel


def is_autograd(node: ast.AST) -> bool:
    """Whether a class is an autograd function, whose `forward` takes what its `apply` gets."""
    return isinstance(node, ast.ClassDef) and any("Function" in ast.unparse(base) for base in node.bases)


def count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return sum(one is not None and one.arg not in ("self", "cls") for one in every)


def test_functions_have_six_parameters_at_most() -> None:
    found = set[str]()
    for path in sorted((ROOT / "finetune").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        autograd = {part for node in ast.walk(tree) if is_autograd(node) for part in ast.walk(node)}
        functions = (
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        wide = [one for one in functions if one not in autograd and count(one) > MOST]
        found |= {f"{name} {one.name}" for one in wide if not name.startswith(APART)}
    assert found == set(), f"more than {MOST} parameters"
