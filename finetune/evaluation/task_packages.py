"""Find packages that lm-eval's own tasks import, without importing lm-eval or these packages.

lm-eval imports a task's code when it loads the task. Without this check, a run would find a missing package
only after loading the model, or after training.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import requires
from pathlib import Path

from finetune.core.errors import Problem
from finetune.core.packages import install_command, installed

_FUNCTION = re.compile(r"!function\s+([\w.]+)\.\w+")
_INCLUDE = re.compile(r"^include:\s*['\"]?([\w./-]+)", re.MULTILINE)
_NAME = re.compile(r"^(?:task|group):[ \t]*['\"]?([\w-]+)", re.MULTILINE)
_GROUP = re.compile(r"^group:", re.MULTILINE)


def missing(task: str, files: Iterable[Path]) -> Problem | None:
    """Return the packages that a task or group needs and that are not installed.

    Args:
        task: the name in `eval.tasks`.
        files: lm-eval's files that state this name.
    """
    modules = sorted({module for path in _task_files(files) for module in _imports(path)})
    absent = [module for module in modules if not installed(module)]
    if not absent:
        return None
    extras = sorted({extra for module in absent if (extra := _extra_of(module))})
    return Problem(
        f"the task `{task}` needs {', '.join(absent)}",
        "eval.tasks",
        found="not installed",
        fix=install_command(*([f"lm-eval[{','.join(extras)}]"] if extras else absent)),
        code="package-missing",
    )


def _task_files(files: Iterable[Path]) -> list[Path]:
    """Return the files of tasks. For a group, include the files of the tasks that it lists."""
    found: dict[Path, None] = {}
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        text = path.read_text(encoding="utf-8")
        if _GROUP.search(text):
            words = set(re.findall(r"[\w-]+", text))
            near = [
                *path.parent.rglob("*.yaml"),
                *(file for file in _all_files(_root(path)) if file.stem in words),
            ]
            names = {file: _NAME.search(file.read_text(encoding="utf-8")) for file in near}
            waiting += [file for file, name in names.items() if name and name[1] in words]
    return list(found)


@cache
def _all_files(root: Path) -> list[Path]:
    return list(root.rglob("*.yaml"))


def _root(path: Path) -> Path:
    """Return the folder of all tasks."""
    return next(parent for parent in path.parents if parent.name == "tasks")


def _imports(path: Path, depth: int = 3) -> Iterator[str]:
    """Yield the top-level modules that a task file and its included files import."""
    if not path.is_file() or not depth:
        return
    text = path.read_text(encoding="utf-8")
    waiting = [path.parent / f"{name.replace('.', '/')}.py" for name in _FUNCTION.findall(text)]
    seen: set[Path] = set()
    while waiting:
        code = waiting.pop()
        if code.is_file() and code not in seen:
            seen.add(code)
            for name in _modules(ast.parse(code.read_text(encoding="utf-8")).body):
                own = _own_files(name, code.parent)
                waiting += own
                top = name.partition(".")[0]
                if not own and top not in sys.stdlib_module_names:
                    yield top
    for included in _INCLUDE.findall(text):
        yield from _imports(path.parent / included, depth - 1)


def _modules(statements: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module imports when it loads.

    Imports in a `try:` are optional if a handler continues.
    """
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.Try) and all(
            any(isinstance(part, ast.Raise) for part in handler.body) for handler in statement.handlers
        ):
            yield from _modules(statement.body)


def _own_files(name: str, folder: Path) -> list[Path]:
    """Return the Python files of a module inside the folder of tasks. The list is empty for other modules."""
    parts = name.split(".")
    root = folder
    if parts[:2] == ["lm_eval", "tasks"]:
        root, parts = _root(folder), parts[2:]
    places = [root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return [file for file in files if file.is_file()]


def _extra_of(module: str) -> str:
    """Return lm-eval's extra that installs a module, or an empty string."""
    wanted = re.compile(rf"{module.replace('_', '[-_]')}\b.*extra == ['\"]([\w-]+)", re.IGNORECASE)
    return next((found[1] for line in requires("lm-eval") or () if (found := wanted.match(line))), "")
