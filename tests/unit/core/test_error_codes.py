"""Every problem has a code that `finetune explain` describes."""

from __future__ import annotations

import ast

import pytest

from finetune.core.error_codes import CODES
from support.paths import ROOT

PACKAGES = (
    "adapters",
    "autoconfig",
    "checkpointing",
    "cli",
    "core",
    "data",
    "distributed",
    "evaluation",
    "experiments",
    "export",
    "hardware",
    "hub",
    "importers",
    "launch",
    "models",
    "planning",
    "preflight",
    "quantization",
    "profiling",
    "recipe",
    "reporting",
    "run_folder",
    "speed",
    "training",
)


def _codes(package: str) -> list[tuple[str, ast.expr | None]]:
    """The place and the code of each call of `Problem` in a package."""
    found = []
    for path in sorted((ROOT / "finetune" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem":
                code = next((word.value for word in node.keywords if word.arg in ("code", None)), None)
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", code))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_problems_of_a_package_have_known_codes(package: str) -> None:
    codes = _codes(package)
    assert [place for place, code in codes if code is None] == []
    assert [
        place for place, code in codes if isinstance(code, ast.Constant) and code.value not in CODES
    ] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_codes_in_dictionaries_are_known(package: str) -> None:
    for path in sorted((ROOT / "finetune" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if (
                        isinstance(key, ast.Constant)
                        and key.value == "code"
                        and isinstance(value, ast.Constant)
                    ):
                        assert value.value in CODES, f"{path.name}:{node.lineno}"
