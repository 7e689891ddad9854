"""Names that tests replace exist, also in tests that only `make soak` and GPUs run."""

from __future__ import annotations

import ast
import pkgutil
from typing import TYPE_CHECKING

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PATCHES = ("setattr", "delattr", "patch")


def patched_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each name of finetune that a test patches, as a text or as a module and an attribute."""
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("finetune")
        for alias in node.names
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in (call for call in calls if ast.unparse(call.func).endswith(PATCHES)):
        match call.args:
            case [ast.Constant(value=str(name)), *_] if name.startswith("finetune."):
                yield name, call.lineno
            case [ast.Name(id=module), ast.Constant(value=str(name)), *_] if module in imported:
                yield f"{imported[module]}.{name}", call.lineno


def test_names_that_tests_patch_exist() -> None:
    missing, count = [], 0
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name, line in patched_names(ast.parse(path.read_text())):
            count += 1
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError) as error:
                missing.append(f"{path.relative_to(ROOT)}:{line}: {error}")
    assert count > 100 and not missing
