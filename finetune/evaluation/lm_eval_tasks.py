"""Read task files in lm-eval's form as data.

Keys that run code are not allowed, and templates have limits.

lm-eval's YAML loader can create any object, and it imports the functions that `!function` names. Its Jinja
environment has no sandbox (lm_eval 0.4.13, tasks/_yaml_loader.py, utils.py). That is acceptable for tasks
that are installed with lm-eval. But a file that a recipe names can come from anybody.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.core import strict_yaml, untrusted_files
from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.core.paths import can_be_path, similar_files
from finetune.data import template_sandbox
from finetune.data.example_errors import FIRST
from finetune.evaluation import limited_patterns, task_data, task_keys
from finetune.hub import client
from finetune.recipe import recipe_errors

# Keys that `sandboxed` renders instead of lm-eval
RENDERED = ("doc_to_text", "doc_to_target", "doc_to_choice")
LONGEST = 2**20  # characters of a prompt
DEEPEST = 5  # nested `include` files
METRICS = {  # output_type -> metrics of a task without `metric_list` (lm_eval 0.4.13, api/registry.py)
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}

MOST_CHOICES = 10_000  # of an example: values in the text of a template


def config(path: Path) -> dict[str, Any]:
    """Return lm-eval's configuration of the task in a file, including the files that it includes.

    Raises:
        UserError: `task_keys` does not list a key or value, a template is not allowed at its position, or the
            data does not exist (exit 2).
    """
    found, where = _read(path)
    problems = list(_problems(found, str(path)))
    rest = {key: value for key, value in found.items() if key not in task_keys.REFUSED}
    known = {place: frozenset(model.model_fields) for place, model in task_keys.KEYS.items()}
    try:
        task = task_keys.LmEvalTask.model_validate(rest)
    except ValidationError as error:
        explained = recipe_errors.explain(error, {"task": rest}, where, known, under=("task",))
        raise UserError(*problems, *explained) from None
    problems += _option_problems(task, str(path))
    raise_if_any(problems)
    made = task.model_dump(exclude_none=True, exclude_unset=True, exclude=set(task_keys.UNUSED))
    choices = made.get("doc_to_choice") is not None
    for key in RENDERED:
        if isinstance(made.get(key), str):
            made[key] = sandboxed(made[key], key, choices, str(path))
    _limit_patterns(made)
    made["custom_dataset"] = task_data.source(made, path)
    made.pop("dataset_kwargs", None)
    return made


def check(path: Path) -> tuple[str, tuple[str, ...]]:
    """Check a task file, and render its first local examples.

    Returns:
        The name of the task, and the names of its metrics.

    Raises:
        UserError: as `config`, or an example can't be rendered (exit 2).
    """
    made = config(path)
    files = task_data.local_files(_read(path)[0], path) or {}
    split = made.get("test_split") or made.get("validation_split")
    for row in task_data.examples(files[split])[:FIRST] if split in files else ():
        for key in (key for key in RENDERED if callable(made.get(key))):
            made[key](row)
    named = [one["metric"] for one in made.get("metric_list") or ()]
    named = named or METRICS[made.get("output_type") or "generate_until"]
    filters = [one["name"] for one in made.get("filter_list") or ({"name": "none"},)]
    return made["task"], tuple(m if name == "none" else f"{m},{name}" for name in filters for m in named)


def digest(path: Path) -> str:
    """Return a hash of a task with the files that it includes, and of its local data."""
    task = _read(path)[0]
    files = task_data.local_files(task, path)
    found = [json.dumps(task, sort_keys=True, default=str)]
    found += [task_data.commit(task)] if files is None else []
    found += [client.sha256(one) for part in (files or {}).values() for one in part]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def sandboxed(template: str, key: str, choices: bool, where: str) -> Callable[[dict[str, Any]], Any]:
    """Return a function that renders a template for an example as lm-eval does, but in a sandbox.

    It follows ConfigurableTask in lm-eval's api/task.py. It raises a UserError if an example cannot be
    rendered.

    Raises:
        UserError: the template is broken (exit 2).
    """
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment().parse(template)  # parse only, without rendering
    except (TemplateSyntaxError, RecursionError, ValueError, MemoryError) as error:  # deep, or a long number
        raise UserError(
            Problem(
                "the template is not valid Jinja",
                key,
                where=where,
                found=str(error)[:200] or type(error).__name__,
                fix=f'{key}: "{{{{question}}}}", with a column of your data',
                code="eval-task",
            )
        ) from None

    def value(row: dict[str, Any]) -> Any:
        if template in row:
            return row[template]
        text, _, error = template_sandbox.render_row(template, row)
        if error:
            raise UserError(
                Problem(
                    error,
                    key,
                    where=where,
                    found=f"{row}"[:200],
                    fix=f"correct this example, or the template of `{key}`",
                    why="lm-eval renders each example",
                    code="data-example",
                )
            )
        try:
            if text.count(",") > MOST_CHOICES and key != "doc_to_text":
                raise ValueError("too many values")
            if key == "doc_to_choice" or (choices and text.isdigit()):
                return ast.literal_eval(text)
            if key == "doc_to_target" and text[:1] == "[" and text[-1:] == "]":
                return ast.literal_eval(text)
        # MemoryError: nested too deeply for Python's parser
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if key == "doc_to_target" and not text.isdigit():
                return text
            raise UserError(
                Problem(
                    "the template gives no list of choices",
                    key,
                    where=where,
                    found=f"{row}"[:200],
                    expected=f"a list of up to {MOST_CHOICES:,} strings, such as ['yes', 'no']",
                    fix=f"{key}: \"{{{{['yes', 'no']}}}}\"",
                    code="eval-task",
                )
            ) from error
        return text

    return value


def _read(path: Path, depth: int = 1) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """Return the keys of a file and its included files, and the position of each key.

    Its own keys take precedence.
    """
    try:
        document = strict_yaml.parse(strict_yaml.text_of(path, "the task"), str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            Problem(
                "finetune can't read the task file",
                "include",
                where=str(path),
                found=getattr(error, "strerror", None) or str(error),
                fix=similar_files(path) or "correct the path",
                why="`include` names files next to the task",
                code="eval-task",
            )
        ) from None
    raise_if_any(document.problems)
    own = document.value
    if not isinstance(own, dict):
        raise UserError(
            Problem(
                "the task file is not a mapping of keys",
                where=str(path),
                found=recipe_errors.show(own),
                expected="the keys of an lm-eval task",
                fix="see docs/reference/task_files.md for all keys",
                code="eval-task",
            )
        )
    named = own.pop("include", [])
    merged: dict[str, Any] = {}
    where: dict[tuple[str, ...], str] = {}
    for name in named if isinstance(named, list) else [named]:
        inside = untrusted_files.real_path(path.parent)
        what, fix = "", "name a file in the folder of the task file"
        if not isinstance(name, str) or not can_be_path(name):
            what = "this name can't be a file name"
        elif not untrusted_files.real_path(inside / name).is_relative_to(inside):
            what = "the included file is outside the folder of the task file"
        elif depth == DEEPEST:
            what, fix = f"more than {DEEPEST} files include each other", "merge some of the files"
        elif not (path.parent / name).is_file():
            what = "the included file does not exist"
        if what:
            raise UserError(Problem(what, "include", str(path), str(name)[:200], fix=fix, code="eval-task"))
        theirs, places = _read(path.parent / name, depth + 1)
        merged |= {key: value for key, value in theirs.items() if key != "task_list"}
        where |= places
    return merged | own, where | {("task", *keys): place for keys, place in document.where.items()}


def _problems(found: dict[str, Any], where: str) -> Iterator[Problem]:
    if "group" in found or not isinstance(found.get("task"), str):
        key = "group" if "group" in found else "task"
        yield Problem(
            "a group of tasks is not supported" if key == "group" else "the task has no name",
            key,
            where=where,
            found=f"{found.get(key)}"[:200],
            expected="one task",
            fix="list each task of the group in eval.tasks" if key == "group" else "add `task: NAME`",
            code="eval-task",
        )
    for key, reason in task_keys.REFUSED.items():
        if found.get(key) not in (None, False):
            yield Problem(
                "a task file can't have this key",
                key,
                where=where,
                found=str(found[key])[:200],
                why=reason,
                fix=f"remove `{key}:`",
                code="eval-task",
            )
    for key, text in _texts({k: v for k, v in found.items() if k not in RENDERED}):
        if key.startswith("dataset_") and "://" in text:
            yield task_data.not_fetched(key, where, text)
        if "{{" in text or "{%" in text:
            yield Problem(
                "this key can't hold a template",
                key,
                where=where,
                found=text[:80],
                expected=f"templates only in {', '.join(RENDERED)}",
                fix="replace the template with plain text",
                why="lm-eval would not render it",
                code="eval-task",
            )


def _option_problems(task: task_keys.LmEvalTask, where: str) -> Iterator[Problem]:
    """Return problems of options: not supported, missing, or not a regular expression."""
    metrics = [(f"metric_list.{at}", one.metric, one) for at, one in enumerate(task.metric_list or ())]
    steps = [
        (f"filter_list.{at}.filter.{step}", one.function, one)
        for at, entry in enumerate(task.filter_list or ())
        for step, one in enumerate(entry.filter)
    ]
    for place, name, entry in [*metrics, *steps]:
        options = {key for group in task_keys.OPTIONS.values() for key in group}
        taken, given = task_keys.OPTIONS.get(name, ()), entry.model_fields_set & options
        for key in sorted(given - set(taken)):
            yield Problem(
                f"`{name}` has no option `{key}`",
                f"{place}.{key}",
                where=where,
                found=key,
                expected=", ".join(sorted(taken)) or "no options",
                fix=f"remove `{key}:`",
                why="lm-eval would ignore it, or fail later",
                code="eval-task",
            )
        for key in task_keys.NEEDED.get(name, ()):
            if getattr(entry, key) is None:
                yield Problem(
                    f"`{name}` needs the option `{key}`",
                    f"{place}.{key}",
                    where=where,
                    fix=f"add `{key}:` next to `{name}`",
                    why="lm-eval has no default for it",
                    code="missing-key",
                )
        patterns = [getattr(entry, "regex_pattern", None), *(getattr(entry, "regexes_to_ignore", None) or ())]
        for pattern in filter(None, patterns):
            yield from limited_patterns.problems(pattern, place, where)


def _limit_patterns(made: dict[str, Any]) -> None:
    """Replace lm-eval's filters and metric that use patterns by versions with a time limit for each match."""
    for entry in made.get("filter_list", ()):
        for step in entry["filter"]:
            if "regex_pattern" in step:
                step["function"] = partial(_limited_filter, step["function"])
    for metric in made.get("metric_list", ()):
        metric.pop("hf_evaluate", None)
        if patterns := metric.pop("regexes_to_ignore", None):
            options = {key: metric.pop(key) for key in task_keys.OPTIONS["exact_match"] if key in metric}
            metric["metric"] = _exact_match(
                [limited_patterns.LimitedPattern(one) for one in patterns], options
            )


def _limited_filter(name: str, **options: Any) -> Any:
    """Create an lm-eval filter whose pattern has a time limit."""
    from lm_eval.api.registry import get_filter

    made: Any = get_filter(name)(**options)
    made.regex = limited_patterns.LimitedPattern(options["regex_pattern"])
    return made


def _exact_match(
    patterns: list[limited_patterns.LimitedPattern], options: dict[str, Any]
) -> Callable[..., Any]:
    """Create lm-eval's `exact_match` with `regexes_to_ignore`."""

    def exact_match(predictions: list[str], references: list[str]) -> dict[str, Any]:
        from lm_eval.api.metrics import exact_match_hf_evaluate

        for pattern in patterns:
            predictions = [pattern.remove(text) for text in predictions]
            references = [pattern.remove(text) for text in references]
        return exact_match_hf_evaluate(predictions, references, **options)

    return exact_match


def check_registered(made: dict[str, Any]) -> None:
    """Raise a UserError for names that the installed lm-eval does not register (exit 2).

    lm-eval would look for such names on the Hub.
    """
    import lm_eval.api.metrics
    import lm_eval.filters  # noqa: F401  (imports register names)
    from lm_eval.api.registry import aggregation_registry, filter_registry, metric_registry

    named = [("metric_list", one["metric"], metric_registry) for one in made.get("metric_list", ())]
    named += [
        ("metric_list", one["aggregation"], aggregation_registry)
        for one in made.get("metric_list", ())
        if "aggregation" in one
    ]
    steps = [step for entry in made.get("filter_list", ()) for step in entry["filter"]]
    named += [("filter_list", step["function"], filter_registry) for step in steps]
    missing = [(key, name) for key, name, names in named if isinstance(name, str) and name not in names]
    if missing:
        known = {key: [*names] for key, _, names in named}
        problems = [
            Problem(
                "the installed lm-eval does not have this name",
                key,
                where=made["task"],
                found=name,
                expected=recipe_errors.choices(name, known[key]),
                fix="pip install --upgrade lm-eval, or use one of these names",
                why="lm-eval runs only what it has registered",
                code="eval-task",
            )
            for key, name in missing
        ]
        raise UserError(*problems)


def _texts(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in nested values, including keys, with the path of keys to it."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _texts(part, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, name)
