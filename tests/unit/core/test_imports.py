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


def used_modules(text: str, package: Path) -> set[str]:
    """The modules of `finetune` whose names a source uses, also in its types."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "finetune":
            module = node.module or ""
            folder = package.joinpath(*module.split(".")[1:])
            inner = {a.name for a in node.names if (folder / f"{a.name}.py").exists()}
            found |= {f"{module}.{name}" for name in inner}
            found |= {module} if len(inner) < len(node.names) else set()
    return found


def test_used_modules_counts_a_module_once_and_those_of_types() -> None:
    text = "from finetune.core import errors\nfrom finetune.core.errors import Exit\n"
    text += "if TYPE_CHECKING:\n    from finetune.recipe.schema import Recipe\n"
    assert used_modules(text, PACKAGE) == {"finetune.core.errors", "finetune.recipe.schema"}


def test_only_the_three_entry_points_use_many_modules() -> None:
    """The commands, the checks and the run. All other modules use fifteen others at most."""
    modules = (path for path in PACKAGE.rglob("*.py") if "examples" not in path.parts)
    many = {
        path.relative_to(PACKAGE).as_posix()
        for path in modules
        if len(used_modules(path.read_text(), PACKAGE)) > 15
    }
    assert many <= {"cli/main.py", "preflight/checker.py", "training/pipeline.py"}


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
