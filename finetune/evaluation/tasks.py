"""Local tasks: a small YAML file next to its data, which lm-eval evaluates without network access.

    task: arc_easy                    # its name in eval.json (default: the name of the file)
    data: test.jsonl                  # in the folder of this file: json, jsonl, csv, parquet
    kind: multiple_choice
    prompt: "Question: {{ question }}\\nAnswer:"
    choices: "{{ choices }}"
    answer: "{{ gold }}"

`eval.tasks` accepts these files, YAML files in lm-eval's form, the names of lm-eval's tasks, and
`general_knowledge`, which is part of finetune. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from finetune.core import packages, paths, shipped_files, strict_json, strict_yaml
from finetune.core.errors import Exit, Problem, UserError, nearest, raise_if_any
from finetune.data import source_loading, template_sandbox
from finetune.data.encoding import without_thinking
from finetune.data.examples import BadRow
from finetune.evaluation import limited_patterns, lm_eval_tasks, task_packages
from finetune.recipe import recipe_errors
from finetune.recipe.schema import Eval, Section, Source

SUFFIXES = (".yaml", ".yml")
GENERAL = "general_text"  # task name in eval.json for the texts of `eval.forgetting`
# For lm-eval's files: the names of a task, group or tag, the separators of names, and comments
_NAMES_OF_TASKS = re.compile(
    r"^['\"]?(?:task|group|tag)['\"]?[ \t]*:[ \t]*(.*(?:\n[ \t]*[-#].*)*)", re.MULTILINE
)
_BETWEEN_NAMES = re.compile(r"[\[\],\n]|^[ \t]*-[ \t]+", re.MULTILINE)
_COMMENT = re.compile(r"(?:^|\s)#.*")
MOST_TASKS = 200  # maximum for one recipe
MOST_COMPARED = 10  # unknown names for which a similar task is searched, which takes 0.1 s each
SLOWEST = 0.2  # seconds; largest average time of the templates for one example
PATIENCE = 5.0  # seconds that the templates of a task may take before their average counts
MOST_BAD = 1000  # bad examples of a task after which finetune stops reading
SHIPPED = {"general_knowledge": shipped_files.folder("examples") / "general" / "knowledge.yaml"}


class Task(Section):
    """A local task."""

    task: str = Field(min_length=1)
    data: str = Field(min_length=1)
    """File with one example per question."""
    kind: Literal["multiple_choice", "exact_match", "regex_match", "json_match", "perplexity"]
    """`multiple_choice`: the choice with the highest likelihood.

    `exact_match`: a greedy answer that equals `answer` as text. `regex_match`: the same for the first match
    of `pattern`. `json_match`: the same as JSON. `perplexity`: the likelihood of the text in `prompt`.
    """
    prompt: str
    """Jinja template over the columns of an example."""
    answer: str | None = None
    """The correct answer. For multiple_choice, the choice or its index from 0."""
    choices: str | list[str] | None = None
    """A Jinja template that gives a list, or a list of Jinja templates."""
    pattern: str | None = None
    """Regular expression. Its first match, or the first group of that match, is the answer."""
    delimiter: str = " "
    """Text between prompt and choice. With `chat`, the text that the chat template writes there is used."""
    chat: bool = False
    """Send the prompt as a user message in the model's chat template."""
    max_new_tokens: int = Field(default=32, ge=1)
    stop: list[str] = Field(default=[])
    """Texts that end an answer."""
    forgetting: bool = False
    """The task measures general abilities. A worse score counts as forgetting."""


NEEDS = {  # required keys of each kind, besides `prompt`
    "multiple_choice": ("choices", "answer"),
    "exact_match": ("answer",),
    "regex_match": ("pattern", "answer"),
    "json_match": ("answer",),
    "perplexity": (),
}
METRICS = {  # metrics of each kind, as lm-eval names them
    "multiple_choice": ("acc", "acc_norm"),
    "perplexity": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    **dict.fromkeys(("exact_match", "regex_match", "json_match"), ("exact_match",)),
}
GENERATED = ("exact_match", "regex_match", "json_match")
READ_BY = {  # keys -> the only kinds that read them
    "choices": ("multiple_choice",),
    "delimiter": ("multiple_choice",),
    "pattern": ("regex_match",),
    "stop": GENERATED,
    "max_new_tokens": GENERATED,
    "answer": (*GENERATED, "multiple_choice"),
}


def check(settings: Eval, longest: int | None = None) -> dict[str, tuple[str, ...]]:
    """Check the task files of `eval.tasks`, each of their examples, and the packages they need.

    Args:
        longest: maximum tokens of the model, for prompt and answer together.

    Returns:
        The metrics of each local task.

    Raises:
        UserError: the tasks have problems (exit 2), or a package is missing (exit 3).
    """
    if len(settings.tasks) > MOST_TASKS:
        raise UserError(
            Problem(
                "the list has too many tasks",
                "eval.tasks",
                found=f"{len(settings.tasks):,} tasks",
                expected=f"at most {MOST_TASKS} tasks",
                fix="split the tasks between several runs of `finetune evaluate`",
                code="value-range",
            )
        )
    problems, held = [], {name: [name] for name in settings.tasks if not is_file(name)}
    metrics: dict[str, tuple[str, ...]] = {}
    for name in filter(is_file, dict.fromkeys(settings.tasks)):
        try:
            if task := read(name):
                documents(task, name)
                problems += _too_long(task, name, longest)
                title, metrics[task.task] = task.task, METRICS[task.kind]
            else:
                title, its = lm_eval_tasks.check(file(name))
                metrics[title] = its
            held.setdefault(title, []).append(name)
        except UserError as error:
            problems += error.problems
    for name, named in held.items():
        if len({file(one).resolve() for one in named}) > 1:
            problems.append(
                Problem(
                    "two task files have the same task name",
                    "eval.tasks",
                    found=name,
                    fix="change `task:` in one of the files",
                    why="eval.json stores results by task name",
                    code="eval-task",
                )
            )
        elif len(named) > 1:
            problems.append(
                Problem(
                    "the list names one task file several times",
                    "eval.tasks",
                    found=", ".join(named),
                    fix=f"keep only `{named[0]}`",
                    code="eval-task",
                )
            )
    raise_if_any(problems)
    lacking = None
    if settings.tasks and find_spec("lm_eval") is None:
        lacking = Problem(
            "evaluation tasks need the package lm-eval",
            "eval.tasks",
            found="not installed",
            fix=packages.install_extra("eval"),
            code="package-missing",
        )
    elif settings.tasks and settings.engine == "vllm" and find_spec("vllm") is None:
        lacking = Problem(
            "the engine needs the package vllm",
            "eval.engine",
            found="not installed",
            fix=f"eval.engine: hf, or {packages.install_command('vllm')}",
            code="package-missing",
        )
    raise_if_any([lacking], code=Exit.ENVIRONMENT)
    return metrics


def check_metric(settings: Eval, metrics: Mapping[str, Iterable[str]]) -> None:
    """Raise a UserError if `eval.metric_for_best_model` names a metric that its task does not have (exit 2).

    Args:
        metrics: the known metric names of each task. Only lm-eval knows the metrics of its own tasks, and
            those of a group only after it has run.
    """
    best, entries = settings.metric_for_best_model, dict.fromkeys(settings.tasks)
    task, _, metric = best.rpartition("/")
    complete = all(map(is_file, entries)) and len(metrics) == len(entries)
    if not task or metric in metrics.get(task, ()) or not (task in metrics or complete):
        return
    names = [f"{name}/{one}" for name, its in metrics.items() for one in its]
    near = nearest(best, names)
    raise UserError(
        Problem(
            f"the task `{task}` has no metric `{metric}`",
            "eval.metric_for_best_model",
            found=best,
            expected="" if near else recipe_errors.choices(best, ["loss", "exact_match", *names]),
            fix=f"metric_for_best_model: {near}" if near else "",
            code="eval-setting",
        )
    )


def _too_long(task: Task, name: str, longest: int | None) -> list[Problem]:
    """Return a problem if an answer can take all tokens of a model. lm-eval would fail at once."""
    if not isinstance(longest, int) or task.kind not in GENERATED or task.max_new_tokens < longest:
        return []
    return [
        Problem(
            "the answer leaves no room for a prompt",
            "max_new_tokens",
            where=str(file(name)),
            found=f"{task.max_new_tokens:,} tokens",
            code="token-limit",
            expected=f"fewer than {longest:,} tokens",
            why=f"the model has {longest:,} positions for prompt and answer",
            fix=f"max_new_tokens: {max(1, longest // 2)}",
        )
    ]


def check_names(settings: Eval) -> None:
    """Find lm-eval's own tasks in its files: first in files with the task's name, then in all files.

    Raises:
        UserError: a task does not exist (exit 2), or needs a missing package (exit 3).
    """
    package = find_spec("lm_eval")
    roots = [Path(place, "tasks") for place in (package and package.submodule_search_locations) or ()]
    names = [name for name in settings.tasks if not is_file(name)]
    files = {name: [path for root in roots for path in _files_of(root, name)] for name in names}
    if unseen := [name for name in names if not files[name]]:
        known = frozenset[str]().union(*map(stated_names, roots))
        raise_if_any(unknown(unseen, known))
    raise_if_any((task_packages.missing(name, files[name]) for name in names), code=Exit.ENVIRONMENT)


def _files_of(root: Path, name: str) -> list[Path]:
    """Return the files that state a task's name, among those whose file or folder has this name."""
    states = re.compile(rf"^(task|group|tag):\s*['\"]?{re.escape(name)}['\"]?\s*$", re.MULTILINE)
    files = _files_by_name(root).get(name, ())
    return [path for path in files if states.search(path.read_text(encoding="utf-8"))]


@cache
def _files_by_name(root: Path) -> dict[str, list[Path]]:
    """Return the YAML files below a folder, by their names without suffix and by their folders' names."""
    found: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.yaml")):
        for name in {path.stem, *path.relative_to(root).parts[:-1]}:
            found.setdefault(name, []).append(path)
    return found


@cache
def stated_names(root: Path) -> frozenset[str]:
    """Return the names of tasks, groups and tags in lm-eval's files.

    `TaskManager` parses each file as YAML, which takes 15 s. This function reads only the lines with names,
    which takes 1 s.
    """
    found: set[str] = set()
    for folder, _, files in os.walk(root):
        for file_name in files:
            # YAML files include the files without suffix
            if file_name.endswith(".yaml") or "." not in file_name:
                text = Path(folder, file_name).read_text(encoding="utf-8")
                for lines in _NAMES_OF_TASKS.findall(text):
                    parts = (_COMMENT.sub("", part) for part in _BETWEEN_NAMES.split(lines))
                    found.update(part.strip().strip("'\"") for part in parts)
    return frozenset(name for name in found - {"", "null"} if ":" not in name)


def unknown(names: Iterable[str], known: Collection[str]) -> list[Problem]:
    """Return the problems of task names that lm-eval does not have."""
    other = "run `lm_eval ls tasks` to list all tasks; the name of a task file ends in .yaml"
    missing = [name for name in names if name not in known]
    fixes = [nearest(name, known) for name in missing[:MOST_COMPARED]]
    return [
        Problem("lm-eval has no such task", "eval.tasks", found=name, fix=fix or other, code="eval-task")
        for name, fix in zip_longest(missing, fixes, fillvalue="")
    ]


def is_file(name: str) -> bool:
    """Return whether an entry of `eval.tasks` is a file and not the name of an lm-eval task."""
    return name.endswith(SUFFIXES) or name in SHIPPED


def local(name: str) -> Task | None:
    """Return the local task of an entry, or `None` for a task that lm-eval reads itself."""
    return read(name) if is_file(name) else None


def file(name: str) -> Path:
    """Return the file of an entry that is a file."""
    return SHIPPED.get(name, Path(name))


def rows_file(task: Task, name: str) -> Path:
    """Return the data file of a task: next to the task file, or relative to the working directory."""
    beside = file(name).parent / task.data
    return (beside if beside.exists() or not Path(task.data).exists() else Path(task.data)).absolute()


def read(path: str) -> Task | None:
    """Read the local task in a YAML file. Return `None` if the file is in lm-eval's form.

    Raises:
        UserError: the file does not exist or has problems. Each problem has its position (exit 2).
    """
    path = str(file(path))
    try:
        text = strict_yaml.text_of(Path(path), "the task")
    except OSError as error:
        raise UserError(
            Problem(
                "finetune can't read the task file",
                "eval.tasks",
                where=path,
                found=str(error.strerror),
                fix=paths.similar_files(Path(path))
                or "name a task file, such as examples/general/knowledge.yaml",
                code="eval-task",
            )
        ) from None
    if re.search(r"^(dataset_path|output_type|include|group|custom_dataset)\s*:", text, re.MULTILINE):
        return None
    document = strict_yaml.parse(text, path)
    raw, problems = document.value, list(document.problems)
    if not isinstance(raw, dict):
        raise UserError(
            Problem(
                "the task file is not a mapping of keys",
                where=path,
                found=recipe_errors.show(raw),
                expected="the keys task, data, kind and prompt",
                fix="see examples/general/knowledge.yaml for an example",
                code="eval-task",
            )
        )
    raw.setdefault("task", Path(path).stem)
    known = {"task": frozenset(Task.model_fields)}
    try:
        task = Task.model_validate(raw)
    except ValidationError as error:
        where = {("task", *key): place for key, place in document.where.items()}
        problems += recipe_errors.explain(error, {"task": raw}, where, known, under=("task",))
        raise UserError(*problems) from None
    needed = [key for key in NEEDS[task.kind] if getattr(task, key) is None]
    problems += [
        Problem(
            f"a task of the kind `{task.kind}` needs this key",
            key,
            path,
            fix=f"add `{key}:`",
            code="missing-key",
        )
        for key in needed
    ]
    problems += [
        Problem(
            f"a task of the kind `{task.kind}` does not use this key",
            key,
            path,
            fix=fix,
            code="recipe-conflict",
        )
        for key, kinds in READ_BY.items()
        for fix in [f"remove `{key}:`, or set `kind: {kinds[0]}`"]
        if key in task.model_fields_set and getattr(task, key) is not None and task.kind not in kinds
    ]
    if not paths.can_be_path(task.data):
        problems.append(
            Problem(
                "this name can't be a file name",
                "data",
                where=path,
                found=task.data[:200],
                fix="name a file next to the task file",
                code="data-not-found",
            )
        )
    if task.pattern is not None:
        problems += limited_patterns.problems(task.pattern, "pattern", path)
    raise_if_any(problems)
    return task


def documents(task: Task, path: str) -> list[dict[str, Any]]:
    """Return the rendered examples of a task: {"prompt", "choices", "answer"}.

    Raises:
        UserError: an example cannot be read, a column is missing, or an answer is not a choice (exit 2).
    """
    name, seconds = str(rows_file(task, path)), 0.0
    found, problems = [], []
    for row in source_loading.read(Source(name=name), f"task {task.task}"):
        if len(problems) == MOST_BAD:
            raise UserError(
                *problems[:5],
                Problem(
                    f"finetune stopped reading task {task.task} after {MOST_BAD:,} examples with problems",
                    where=name,
                    code="data-example",
                ),
            )
        if seconds > max(PATIENCE, SLOWEST * (len(found) + len(problems))):
            raise UserError(
                Problem(
                    f"the templates of task {task.task} are too slow",
                    where=name,
                    found=f"{seconds:.0f} s for {len(found) + len(problems)} examples",
                    expected=f"at most {SLOWEST} s for an example",
                    fix=f"change the templates in {file(path)}",
                    code="data-example",
                )
            )
        if isinstance(row, BadRow):
            problems.append(row.problem)
            continue
        begun = time.monotonic()
        try:
            found.append(_document(task, row.value))
        except (ValueError, TypeError) as error:
            columns = ", ".join(f"{key} (null)" if value is None else key for key, value in row.value.items())
            problems.append(
                Problem(
                    f"task {task.task}: {error}",
                    where=row.where,
                    found=f"columns {columns}",
                    fix=f"change the example, or the templates in {file(path)}",
                    code="data-example",
                )
            )
            if str(error).startswith(template_sandbox.BROKEN):
                break  # the template itself is broken, so all examples fail
        seconds += time.monotonic() - begun
    if not found and not problems:
        problems.append(
            Problem(
                f"the data of task {task.task} has no examples",
                where=name,
                found="0 examples",
                fix="add examples to the file",
                code="data-empty",
            )
        )
    more = len(problems) - 5
    if more > 0:
        problems[5:] = [
            Problem(
                f"{more:,} more examples of task {task.task} have problems", where=name, code="data-example"
            )
        ]
    raise_if_any(problems)
    return found


def general_texts(settings: Eval) -> list[str]:
    """Return the texts that measure forgetting (`eval.forgetting`).

    Raises:
        UserError: the file does not exist, or an example has no `text` (exit 2).
    """
    if settings.forgetting is False:
        return []
    if isinstance(settings.forgetting, str) and not Path(settings.forgetting).is_file():
        raise UserError(
            Problem(
                "the file with general texts does not exist",
                "eval.forgetting",
                found=settings.forgetting,
                fix=paths.similar_files(Path(settings.forgetting)) or "eval.forgetting: true",
                code="data-not-found",
            )
        )
    if settings.forgetting is True:
        path = shipped_files.folder("examples") / "general" / "text.jsonl"
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        return [json.loads(line)["text"] for line in lines]
    # a relative path would be tried next to the task file first
    rows = str(Path(settings.forgetting).absolute())
    source = Task(task=GENERAL, data=rows, kind="perplexity", prompt="{{ text }}")
    try:
        return [row["prompt"] for row in documents(source, settings.forgetting)]
    except UserError as error:
        raise UserError(*(replace(one, key="eval.forgetting") for one in error.problems)) from None


def _document(task: Task, row: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {"prompt": _text(task.prompt, row)}
    if not document["prompt"] and task.kind in GENERATED and not task.chat:
        raise ValueError("the prompt is empty, so there is no token to continue")
    if len(document["prompt"]) > lm_eval_tasks.LONGEST:
        raise ValueError(f"the prompt has more than {lm_eval_tasks.LONGEST:,} characters")
    template = task.answer or ""  # its spaces count where choices can have spaces
    template = template if task.kind == "multiple_choice" else template.strip()
    answer = _value(template, row) if template else ""
    if answer is None:
        raise ValueError("the answer is null")
    if task.kind == "json_match":
        try:
            wanted = json.loads(answer) if isinstance(answer, str) else answer
            strict_json.check_depth(wanted)
        except (ValueError, RecursionError):
            wanted = None
        if not isinstance(wanted, (dict, list)):
            raise ValueError(f"the answer is {repr(answer)[:80]} and not a JSON object or list")
        document["answer"] = json.dumps(wanted)
    elif task.answer is not None:
        document["answer"] = answer if isinstance(answer, str) else json.dumps(answer)
    if task.kind == "multiple_choice":
        listed = (
            _value(task.choices.strip(), row)
            if isinstance(task.choices, str)
            else [_text(text, row) for text in task.choices or ()]
        )
        if not isinstance(listed, list) or len(listed) < 2:
            raise ValueError(f"`choices` gives {listed!r} and not a list with two or more choices")
        if None in listed:
            raise ValueError("a choice is null")
        document["choices"] = [str(choice) for choice in listed]
        if "" in document["choices"]:
            raise ValueError("a choice is empty, so it has no likelihood")
        document["answer"] = _index(answer, document["choices"])
        if document["choices"].count(document["choices"][document["answer"]]) > 1:
            raise ValueError(f"`choices` gives the right answer twice: {listed!r}")
    return document


def _index(answer: object, choices: list[str]) -> int:
    """Return the index of the correct choice. A number is an index, and a text is a choice or its index."""
    if type(answer) is int and 0 <= answer < len(choices):
        # ambiguous: a .csv file would store the choice as text
        if str(answer) in choices and choices[answer] != str(answer):
            both = f"answer {answer} is the index of one choice and the text of another"
            raise ValueError(f"{both}; write the correct choice as text")
        return answer
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, str) and answer.isdecimal() and int(answer) < len(choices):
        return int(answer)
    raise ValueError(f"answer {answer!r} is not one of the choices and not an index of one")


def _text(template: str, row: dict[str, Any]) -> str:
    """Render a template for an example.

    Raises:
        ValueError: the template is broken, writes a null, uses undefined names, or exceeds the limits of time
            or memory.
    """
    found = template_sandbox.render_row(template, row, way="without nulls")
    if found.error:
        raise ValueError(found.error)
    return found.text


def _value(template: str, row: dict[str, Any]) -> Any:
    """Return the value of a single `{{ expression }}` with its type, or the text of another template.

    A line break after the expression does not count, because a text of several lines in YAML ends with one.

    Raises:
        ValueError: as `_text`.
    """
    whole = re.fullmatch(r"\{\{[-+]?((?:(?!\}\}).)*?)[-+]?\}\}\n*", template, re.DOTALL)
    if not whole:
        return _text(template, row)
    found = template_sandbox.render_row(whole[1], row, way="expression")
    if found.error:
        raise ValueError(found.error)
    return json.loads(found.text)


def config(task: Task, rows: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """Return lm-eval's configuration of a local task.

    Args:
        options: options of the engine's `generate` for a greedy answer.
    """
    from datasets import Dataset

    common = {
        "task": task.task,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": lambda row: row["prompt"],
        "doc_to_target": lambda row: row.get("answer", row["prompt"]),
    }
    if task.kind == "perplexity":
        metrics = {
            "word_perplexity": _weighted,
            "byte_perplexity": _weighted,
            "bits_per_byte": "bits_per_byte",
        }
        return {
            **common,
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": lambda row: row["prompt"],
            "metric_list": [
                {"metric": name, "aggregation": how, "higher_is_better": False}
                for name, how in metrics.items()
            ],
        }
    if task.kind == "multiple_choice":
        return {
            **common,
            "output_type": "multiple_choice",
            "doc_to_choice": lambda row: row["choices"],
            "target_delimiter": "" if task.chat else task.delimiter,
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": True}
                for name in METRICS[task.kind]
            ],
        }
    return {
        **common,
        "output_type": "generate_until",
        "generation_kwargs": {
            "until": task.stop,
            "max_gen_toks": task.max_new_tokens,
            "do_sample": False,
            "temperature": 0.0,
            **options,
        },
        "process_results": lambda row, answers: {"exact_match": right(task, answers[0], row["answer"])},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def answer_lead(tokenizer: Any, date: str | None) -> str:
    """Return the text that the chat template writes between the generation prompt and an answer.

    It is a space in some templates, and an empty block of reasoning in others.

    Args:
        date: the date that the template gets (`data.template_date`).
    """
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "FOUR"}]
    template = template_sandbox.ChatTemplate(
        tokenizer.get_chat_template(), tokenizer.special_tokens_map, date
    )
    (whole,) = template_sandbox.render(template, [(turns, None)])
    (prompt,) = template_sandbox.render(template, [(turns[:1], None)], prompt=True)
    lead, answer, _ = whole.text.removeprefix(prompt.text).partition("FOUR")
    return lead if answer and whole.text.startswith(prompt.text) else ""


def perplexity(mean: float) -> Any:
    """Return the perplexity of a mean log-likelihood. The result is infinite instead of an OverflowError.

    lm-eval's own `math.exp` overflows for a text without spaces, such as Chinese or base64, which it counts
    as one word.
    """
    import numpy as np

    with np.errstate(over="ignore"):
        return np.exp(-mean)


def _weighted(rows: list[tuple[float, int]]) -> float:
    """Return lm-eval's weighted perplexity of (log-likelihood, weight) pairs."""
    likelihoods, weights = zip(*rows, strict=True)
    return float(perplexity(sum(likelihoods) / sum(weights)))


def right(task: Task, said: str, wanted: str) -> float:
    """Return whether a generated answer is correct: 1.0 or 0.0."""
    said = without_thinking(said)
    if task.kind == "json_match":
        found = _first_json(said), json.loads(wanted, parse_float=_number)
        texts = {json.dumps(value, sort_keys=True) for value in found}  # Python's True equals 1
        return float(len(texts) == 1)
    if task.kind == "regex_match":
        found = limited_patterns.LimitedPattern(str(task.pattern)).search(said)
        said = (found[1] if found.groups() else found[0]) if found else ""
    return float((said or "").strip() == wanted.strip())


def _number(text: str) -> int | float:
    """Parse a number with a fraction or an exponent. 1.0 is 1, as in JSON."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _first_json(text: str) -> Any:
    """Return the first JSON object or list in a text, or `None`."""
    decoder = json.JSONDecoder(parse_float=_number)
    for start in (match.start() for match in re.finditer(r"[\[{]", text)):
        try:
            return decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):  # nested too deeply to be an answer
            continue
    return None
