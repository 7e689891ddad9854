"""Task files in lm-eval's own form, as data: what in them would run code is refused, templates are limited.

lm-eval itself reads them by a YAML loader that makes any object, imports what `!function` names, and renders
templates in an open Jinja environment (lm_eval 0.4.13, tasks/_yaml_loader.py, utils.py). That is right for
tasks that come with it, which are installed code; a file that a recipe names may be anyone's.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateSyntaxError

from finetune.core import strict_yaml
from finetune.core.errors import Problem, UserError
from finetune.data import template_sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RENDERED = ("doc_to_text", "doc_to_target", "doc_to_choice")  # what `sandboxed` renders in lm-eval's place
LOADERS = ("json", "csv", "parquet", "arrow", "text")  # of datasets' own; others open pickles or archives
LONGEST = 2**20  # characters of a prompt
DEEPEST = 5  # files that include each other


def config(path: Path) -> dict[str, Any]:
    """lm-eval's configuration of the task in a file, with what it includes.

    Raises:
        UserError: tags, anchors, groups, data by code or from an address, templates elsewhere (exit 2).
    """
    found = _read(path)
    problems = list(_problems(found, str(path)))
    if problems:
        raise UserError(*problems)
    choices = found.get("doc_to_choice") is not None
    for key in RENDERED:
        if isinstance(found.get(key), str):
            found[key] = sandboxed(found[key], key, choices, str(path))
    return found


def sandboxed(template: str, key: str, choices: bool, where: str) -> Callable[[dict[str, Any]], Any]:
    """What lm-eval makes of a template and a row (api/task.py, ConfigurableTask), in a sandbox.

    Raises:
        UserError: the template is broken (exit 2); so does what it returns where a row is not to be rendered.
    """
    try:
        Environment().parse(template)  # which computes nothing of it
    except TemplateSyntaxError as error:
        raise UserError(Problem("the template is broken", key, where, found=str(error))) from None

    def value(row: dict[str, Any]) -> Any:
        if template in row:
            return row[template]
        text, _, error = template_sandbox.render_row(template, row)
        if error:
            raise UserError(Problem(error, key, where, found=f"{row}"[:200]))
        if key == "doc_to_choice" or (choices and text.isdigit()):
            return ast.literal_eval(text)
        if key == "doc_to_target" and text[:1] == "[" and text[-1:] == "]":
            try:
                return ast.literal_eval(text)
            except (SyntaxError, ValueError):
                return text
        return text

    return value


def _read(path: Path, depth: int = 1) -> dict[str, Any]:
    """A file and what it includes, its own keys before theirs."""
    try:
        document = strict_yaml.parse(strict_yaml.text_of(path, "the task"), str(path))
    except OSError as error:
        raise UserError(Problem(f"cannot read it: {error.strerror}", "include", str(path))) from None
    if document.problems:
        raise UserError(*document.problems)
    own = document.value
    if not isinstance(own, dict):
        raise UserError(Problem("a task is a mapping of keys", where=str(path)))
    named = own.pop("include", [])
    merged: dict[str, Any] = {}
    for name in named if isinstance(named, list) else [named]:
        inside = path.parent.resolve()
        if depth == DEEPEST or not (inside / str(name)).resolve().is_relative_to(inside):
            what = f"includes a file outside of its folder, or more than {DEEPEST} in a row"
            raise UserError(Problem(what, "include", str(path), str(name)))
        merged |= {k: v for k, v in _read(path.parent / str(name), depth + 1).items() if k != "task_list"}
    return merged | own


def _problems(found: dict[str, Any], where: str) -> Iterator[Problem]:
    if "group" in found or not isinstance(found.get("task"), str):
        fix = "each of its tasks in eval.tasks, by its name or its own file"
        yield Problem("a group, or no task", where=where, expected="task: a name", fix=fix)
    for key in ("class", "unsafe_code", "use_prompt"):
        if found.get(key):
            yield Problem("takes code from elsewhere", key, where, str(found[key]))
    loader = str(found.get("dataset_path", ""))
    if loader in _loaders() and loader not in LOADERS:
        expected = f"{', '.join(LOADERS)}, or a data set on the Hub"
        yield Problem("no such data here", "dataset_path", where, loader, expected)
    for key, text in _texts({k: v for k, v in found.items() if k not in RENDERED}):
        if key.startswith("dataset_") and "://" in text:
            yield Problem("data are not fetched from an address", key, where, text, "a file, or a Hub id")
        if "{{" in text or "{%" in text:
            yield Problem("a template has no place here", key, where, text[:80], ", ".join(RENDERED))


def _loaders() -> list[str]:
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    return list(_PACKAGED_DATASETS_MODULES)


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text, by the keys that lead to it."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _texts(part, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, name)
