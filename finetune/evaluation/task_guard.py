"""Load lm-eval's own tasks, and let them run no script and read no folder of the working directory.

The code of these tasks calls `evaluate.load(NAME)`, which runs a script of the working directory or of the
Hub. It calls `datasets.load_dataset(NAME)`, which reads a folder of the working directory in place of the
dataset on the Hub. Some tasks run code that the model writes, and not all of them say so.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from finetune.core import packages
from finetune.core.errors import Exit, Problem, UserError, first_line, raise_if_any
from finetune.data import hub_datasets
from finetune.evaluation import task_datasets, tasks

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

# Tasks that run the model's text with `exec`, `eval` or a shell, in lm-eval 0.4.13 (cruxeval/utils.py,
# longproc/metrics.py, noreval/ask_gec/errant.py), or with `parse_expr` of sympy, which calls `eval`
# (score/math/math_grader.py). Some of them lack `unsafe_code: true`.
RUN_CODE = re.compile("cruxeval_.*|longproc_countdown_.*|ask_gec_.*|(prompt|non_greedy)_robustness_math_.*")
# Tasks that fetch addresses which their dataset names: the library jsonschema follows `$ref` of a schema
FETCH = re.compile("jsonschema_bench_.*")
# The package tinyBenchmarks opens a pickle in the working directory, and downloads it if it is missing
PICKLE = re.compile("tiny(Arc|GSM8k|Hellaswag|MMLU|TruthfulQA|TruthfulQA_mc1|Winogrande)")
REFUSED = {
    RUN_CODE: "it runs code that the model writes",
    FETCH: "it asks addresses that its dataset names",
    PICKLE: "its package opens a pickle of the working directory",
}
SCRIPTS = ("evaluate", "_refuse_script")  # names of the package and of its `load` within `guarded`
# Errors that lm-eval raises for a task file that it cannot run. It validates few of the values itself
REFUSALS = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError, SyntaxError)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Load and run lm-eval's tasks without scripts and without folders of the working directory.

    The code of the tasks calls two functions by name, so both are replaced within the context.

    Raises:
        UserError: a task needs a script, or the working directory has a folder with the name of a dataset
            (exit 2).
    """
    import datasets

    scripts: Any = ModuleType("evaluate")
    scripts.__spec__, scripts.load = ModuleSpec("evaluate", None), _refuse_script
    load, evaluate = datasets.load_dataset, sys.modules.get("evaluate")
    sys.modules["evaluate"], datasets.load_dataset = scripts, _from_hub
    try:
        yield
    finally:
        datasets.load_dataset = load
        del sys.modules["evaluate"]
        if evaluate:
            sys.modules["evaluate"] = evaluate


def check_code(name: str, task: Any) -> None:
    """Refuse a loaded task that runs code of the model, or that would need a script for its scores.

    Raises:
        UserError: before the evaluation, and not after the training (exit 2).
    """
    reasons = [why for names, why in REFUSED.items() if names.fullmatch(name)]
    if getattr(task, "UNSAFE_CODE", False):
        reasons.insert(0, REFUSED[RUN_CODE])
    if reasons:
        raise UserError(
            Problem(
                f"the task `{name}` is not allowed",
                "eval.tasks",
                fix="remove the task, or run it with `lm_eval --confirm_run_unsafe_code` in a sandbox",
                why=reasons[0],
                code="eval-task",
            )
        )
    if any(map(loads_script, _functions_of(task))):
        raise _script(f"the task `{name}` needs a metric script")


def _functions_of(task: Any) -> Iterator[FunctionType]:
    """Yield the functions that a task's configuration names, and the methods of a task with its own class."""
    yield from _functions(vars(task.config))
    if type(task).__module__.startswith("lm_eval.tasks."):
        yield from _functions(vars(type(task)))


def _functions(value: object) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, partial):
        yield from _functions(value.func)
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _functions(one)


def loads_script(function: FunctionType) -> bool:
    """Return whether a function, or another function of its module that it calls, uses `evaluate.load`."""
    waiting, seen = [function], {function}
    while waiting:
        one = waiting.pop()
        names = set(_names(one.__code__))
        known = {name: one.__globals__[name] for name in names & one.__globals__.keys()}
        is_named = {"evaluate", "load"} <= names  # an import inside of the function
        if is_named or any(getattr(value, "__name__", "") in SCRIPTS for value in known.values()):
            return True
        own = {value for value in known.values() if isinstance(value, FunctionType)} - seen
        own = {value for value in own if value.__module__ == function.__module__}
        seen |= own
        waiting += own
    return False


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code uses, and the names in the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# Options of `datasets.load_dataset` that say how it downloads, and not what
HOW = (
    "cache_dir", "download_mode", "trust_remote_code", "token", "num_proc", "keep_in_memory", "streaming",
    "verification_mode",
)  # fmt: skip


def _from_hub(path: str, name: str | None = None, **options: Any) -> Any:
    """Load the dataset of a task as `datasets.load_dataset` does, with the checks of a dataset of the Hub."""
    is_reader = path in hub_datasets.packaged_readers()
    if os.path.lexists(path) and not os.path.isabs(path) and not is_reader:
        raise UserError(
            Problem(
                "the working directory has a folder with the name of a task's dataset",
                "eval.tasks",
                where=os.path.abspath(path),
                found=path,
                fix="run the command in another folder, or rename this one",
                why="`datasets` would read this folder in place of the dataset on the Hub",
                code="eval-task",
            )
        )
    given = {key: value for key, value in options.items() if key not in HOW and value is not None}
    return task_datasets.load_for_task(path, name, given)


def _refuse_script(path: str = "", *_: Any, **__: Any) -> NoReturn:
    """Refuse what `evaluate.load` would run. lm-eval itself continues if it looks for an unknown metric."""
    raise _script(f"a task needs the metric script `{path}`")


def _script(what: str) -> UserError:
    return UserError(
        Problem(
            f"{what} of the package evaluate",
            "eval.tasks",
            fix="remove the task, or run it with `lm_eval` in a sandbox",
            why="evaluate downloads such scripts and runs them, and finetune runs no code of a repository",
            code="eval-task",
        )
    )


def load(manager: TaskManager, specs: list[Any]) -> dict[str, Any]:
    """Load lm-eval's tasks by name, and convert its errors to UserErrors."""
    named = [name for name in specs if isinstance(name, str)]
    raise_if_any(tasks.unknown(named, set(manager.all_tasks)))
    try:
        return manager.load(specs)["tasks"]
    except RuntimeError as error:  # the code of some tasks puts the guard's error into its own
        raise error.__context__ if isinstance(error.__context__, UserError) else error from None
    except ImportError as error:
        raise UserError(
            Problem(
                "a task needs a package that is not installed",
                "eval.tasks",
                found=first_line(error),
                fix=packages.install_command(error.name or "'lm-eval[tasks]'"),
                code="package-missing",
            ),
            code=Exit.ENVIRONMENT,
        ) from error
    except (ConnectionError, OSError) as error:
        raise UserError(
            Problem(
                "lm-eval can't load the data of a task",
                "eval.tasks",
                found=first_line(error),
                fix="check the network, or use a local task file",
                code="hub",
            ),
            code=Exit.ENVIRONMENT,
        ) from error
    except REFUSALS as error:
        raise UserError(
            Problem(
                "lm-eval can't load a task",
                "eval.tasks",
                found=str(error)[:300],
                fix="correct the task file, or remove the task",
                code="eval-task",
            )
        ) from error
