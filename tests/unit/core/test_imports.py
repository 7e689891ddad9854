"""How modules of finetune/ and of tests/ import each other."""

import ast
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGE = ROOT / "finetune"


def package_imports(text: str, package: Path) -> list[str]:
    """Imports of a name that a package's `__init__` defines, instead of the module that defines it.

    Args:
        text: the source of a module.
        package: the folder of `finetune`.

    Returns:
        Each as `finetune.package.name`.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "finetune":
            folder = package.joinpath(*(node.module or "").split(".")[1:])
            if folder.is_dir():
                found += [
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if not (folder / f"{alias.name}.py").exists() and not (folder / alias.name).is_dir()
                ]
    return found


@pytest.mark.parametrize(
    "text, found",
    [
        ("from finetune.core import errors", []),
        ("from finetune.core.errors import UserError", []),
        ("from finetune.core import UserError, errors", ["finetune.core.UserError"]),
        ("from finetune import __version__", ["finetune.__version__"]),
    ],
)
def test_package_imports_of_a_name_are_found(text: str, found: list[str]) -> None:
    assert package_imports(text, PACKAGE) == found


def test_imports_of_each_module_name_the_defining_module() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if "examples" not in path.parts]
    assert len(modules) > 100
    found = {str(path.relative_to(ROOT)): package_imports(path.read_text(), PACKAGE) for path in modules}
    assert {path: names for path, names in found.items() if names} == {}


def test_imports_of_tests_name_no_other_test() -> None:
    """What tests share is in tests/support/."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                wrong = [name for name in names if name == "conftest" or name.startswith("test_")]
                assert not wrong, f"{path}:{node.lineno} imports {wrong}"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest imports each by its base name, and so do forked processes."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
