"""Run `eval.tasks` with lm-eval on the same prompts for both models, and compare the results per example."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import random
import re
import statistics
import sys
from collections import Counter
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from tokenizers import processors
from transformers import GenerationConfig

from finetune.autoconfig import launch_settings, mixed_precision
from finetune.core import standard_streams, upstream_private
from finetune.core.errors import Exit, Problem, UserError
from finetune.data.template_sandbox import ChatTemplate, render
from finetune.evaluation import lm_eval_tasks, paired_differences, scoring, task_guard, tasks
from finetune.models import model_files, token_limits
from finetune.recipe import recipe_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lm_eval.api.task import Task
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.recipe.schema import Eval, Model

# Marks the end of the last turn. A template may strip the space at its end.
HERE = "WHERE_THE_TURN_GOES_ON "
# lm-eval's default seed for few-shot examples
SEED = 1234
# These warnings of lm-eval are expected, because finetune passes a loaded model and its own examples
EXPECTED = re.compile(
    r"`pretrained` model kwarg|Passed an already-initialized|Custom kwargs can be passed|"
    r"\[Task: .*\] (metric|has_)|Overwriting default num_fewshot|generation_kwargs"
)

# metric -> its value from the mean of (log-likelihood, weight) over the examples
PERPLEXITIES: dict[str, Callable[[Any], Any]] = {
    "word_perplexity": tasks.perplexity,
    "byte_perplexity": tasks.perplexity,
    "bits_per_byte": lambda mean: -mean / math.log(2),
    "perplexity": tasks.perplexity,
}


def check(settings: Eval, requested: Model | None = None) -> dict[str, Iterable[str]]:
    """Find every task and its examples before weights are loaded.

    Args:
        requested: the model section, which gives the maximum length.

    Returns:
        The names of the metrics of each task.

    Raises:
        UserError: a task does not exist, runs code, or has fewer examples than processes (exit 2). lm-eval is
            missing, or the data cannot be loaded (exit 3).
    """
    config = model_files.read_config(requested) if requested and settings.tasks else None
    longest = token_limits.positions(config) if config else None
    metrics: dict[str, Iterable[str]] = {**tasks.check(settings, longest)}
    ranks = PartialState().num_processes
    local = {name: tasks.local(name) for name in settings.tasks}
    counts: dict[str, int] = {}
    if ranks > 1:  # a single process can use any number of examples
        counts |= {task.task: len(tasks.documents(task, name)) for name, task in local.items() if task}
    theirs = [_theirs(name) for name in settings.tasks if not local[name]]
    if theirs:
        tasks.check_names(settings)  # fast, while lm-eval takes 15 s to list its tasks
        from lm_eval.tasks import TaskManager

        known = any(isinstance(spec, str) for spec in theirs)
        with heard(), task_guard.guarded():
            loaded = task_guard.load(TaskManager(include_defaults=known), theirs)
        for name, task in loaded.items():
            task_guard.check_code(name, task)
            counts[name] = len(task.eval_docs)
            metrics[name] = metric_names(task)
    few = [name for name, rows in counts.items() if min(rows, settings.limit or rows) < ranks]
    if few:
        raise UserError(
            Problem(
                "a task has fewer examples than the launch has processes",
                "eval.tasks",
                found=", ".join(few),
                expected=f"at least {ranks} examples",
                fix="run one process with CUDA_VISIBLE_DEVICES=0, or add examples",
                why="each process needs an example",
                code="eval-task",
            )
        )
    return metrics


def texts(
    settings: Eval, tokenizer: PreTrainedTokenizerBase, date: str | None
) -> list[tuple[str, list[str], int, bool]]:
    """Return the texts that lm-eval's own tasks send to a model, without loading a model.

    Returns:
        For each text: its position, the strings that the tokenizer encodes, the number of tokens generated
        after it, and whether lm-eval adds its prefix token.

    Raises:
        UserError: lm-eval cannot create the texts (exit 2).
    """
    from lm_eval.tasks import TaskManager

    specs, found = list(map(_theirs, settings.tasks)), []
    with heard(), task_guard.guarded():
        loaded = task_guard.load(
            TaskManager(include_defaults=any(isinstance(spec, str) for spec in specs)), specs
        )
        for name, task in loaded.items():
            try:
                _build_requests(task, settings, tokenizer, date)
            except task_guard.REFUSALS as error:
                raise _failure(error, name) from error
            for number, requests in groupby(task.instances, key=lambda request: request.doc_id):
                found.append(_text_of(f"{name}, example {number + 1}", list(requests)))
    return found


def _build_requests(task: Task, settings: Eval, tokenizer: PreTrainedTokenizerBase, date: str | None) -> None:
    """Build the requests of a task, as `lm_eval.evaluate` does before it calls a model."""
    from lm_eval.evaluator_utils import get_sample_size

    def render(turns: list[Any], add_generation_prompt: bool = True) -> str:
        return chat_text(tokenizer, turns, {}, goes_on=not add_generation_prompt, date=date)

    _set_fewshot(task, settings)
    chat = settings.apply_chat_template
    task.build_all_requests(
        limit=get_sample_size(task, settings.limit),
        apply_chat_template=chat,
        chat_template=render if chat else None,
        fewshot_as_multiturn=True,
    )


def _set_fewshot(task: Task, settings: Eval) -> None:
    """Set the few-shot examples of a task, as `lm_eval.simple_evaluate` does. A task with 0 keeps it."""
    own = task.get_config("num_fewshot")
    shots = own if own == 0 or settings.num_fewshot is None else settings.num_fewshot
    task.set_config(key="num_fewshot", value=shots or 0)
    task.set_fewshot_seed(seed=SEED)


def _failure(error: Exception, tasks: str) -> UserError:
    return UserError(
        Problem(
            f"lm-eval failed in {tasks}",
            "eval.tasks",
            found=str(error)[:300] or type(error).__name__,
            fix="correct the task file or the rows of the dataset, or set eval.tasks: []",
            why="lm-eval raised this error; --debug shows where",
            code="eval-task",
        )
    )


def _text_of(where: str, requests: list[Any]) -> tuple[str, list[str], int, bool]:
    """Return the text of an example: the prompt of each request, and the prompt with its answer."""
    texts = [[part for part in request.arguments[:2] if isinstance(part, str)] for request in requests]
    rolling = any(request.request_type == "loglikelihood_rolling" for request in requests)
    readings = [text for parts in texts for text in (parts[0], "".join(parts))]
    return where, readings, 0, rolling or not all(parts[0] for parts in texts)


def metric_names(task: Any) -> list[str]:
    """Return the names of the metrics of a loaded lm-eval task, as in its results."""
    filters = [one["name"] for one in task.config.filter_list or [{"name": "none"}]]
    return [_metric(f"{metric},{name}") for name in filters for metric in task.aggregation()]


def _theirs(name: str) -> str | dict[str, Any]:
    """Return the name of an lm-eval task, or the validated configuration of a file in lm-eval's form."""
    if not tasks.is_file(name):
        return name
    made = lm_eval_tasks.config(tasks.file(name))
    lm_eval_tasks.check_registered(made)
    return made


def run(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Eval,
    *,
    seeded: bool = True,
    date: str | None = None,
) -> dict[str, Any]:
    """Evaluate `eval.tasks` on one model. Return lm-eval's results with the values of each example.

    Args:
        model: the model with its adapter, or an engine of lm-eval.
        seeded: set all random generators, as lm-eval does. Training passes `False` to keep its own state.
        date: the date that chat templates get (`data.template_date`).

    Returns:
        name -> {"metrics", "higher_is_better", "main", "rows", "settings"}. The result is the same on every
        process.
    """
    results: dict[str, Any] = {}
    # If only some ranks run out of memory, the others wait forever
    several = PartialState().num_processes > 1
    size = scoring.LARGEST_BATCH if several and settings.batch_size == "auto" else settings.batch_size
    subject = Subject(model, tokenizer, settings, date)
    for texts, specs in grouped(subject).items():
        results |= scoring.fitting(partial(_evaluate, subject, specs, texts, seeded=seeded), size)
    return results


# Values of generation_config.json that lm-eval's own numbers depend on, because real models set them
GENERATION_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "repetition_penalty",
    "no_repeat_ngram_size",
)


class Subject(NamedTuple):
    """The model that lm-eval evaluates, with its settings."""

    model: Any
    tokenizer: Any
    settings: Eval
    date: str | None = None


class TextOptions(NamedTuple):
    """How lm-eval makes the texts of a task."""

    chat: bool
    """Whether it applies the chat template, which writes the BOS token, if there is one."""
    bos_before: bool = False
    """Whether lm-eval itself puts BOS before a text, so that the tokenizer's would be a second one."""
    is_local: bool = False
    """Whether finetune made the tasks of a local file in its own form."""


def grouped(subject: Subject) -> dict[TextOptions, list[Any]]:
    """Group lm-eval's task specifications by how lm-eval makes their texts."""
    model, tokenizer, settings, date = subject
    options = {}  # vLLM ignores generation_config if it gets its own parameters
    if settings.engine == "hf":
        options = {"eos_token_id": scoring.stop_ids(model, tokenizer)}
    found: dict[TextOptions, list[Any]] = {}
    for name in settings.tasks:
        task = tasks.local(name)
        if task is None:
            texts, spec = TextOptions(settings.apply_chat_template), _theirs(name)
        else:
            rows = tasks.documents(task, name)
            if task.chat and task.kind == "multiple_choice":
                lead = tasks.answer_lead(tokenizer, date)
                rows = [{**row, "choices": [f"{lead}{choice}" for choice in row["choices"]]} for row in rows]
            texts = TextOptions(task.chat, task.kind == "perplexity", is_local=True)
            spec = tasks.config(task, rows, options)
        found.setdefault(texts, []).append(spec)
    return found


def _generation_config(model: Any, texts: TextOptions) -> GenerationConfig:
    """Return the part of the model's generation_config.json that changes the answers of these tasks."""
    kept = () if texts.is_local else GENERATION_KEYS
    return GenerationConfig(**{name: getattr(model.generation_config, name, None) for name in kept})


def _evaluate(
    subject: Subject, specs: list[Any], texts: TextOptions, batch_size: int, *, seeded: bool = True
) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    model, tokenizer, settings, date = subject
    # `simple_evaluate` also runs git in the working directory, whose .git can name programs
    evaluate: Any = lm_eval.evaluate  # the decorator hides the type

    own = all(isinstance(spec, dict) for spec in specs)
    if settings.engine == "hf" and scoring.reads_padding(model):
        batch_size = 1  # lm-eval pads prompts on the left
    with heard(), contextlib.nullcontext() if own else task_guard.guarded():
        engine = model if settings.engine == "vllm" else language_model(model, tokenizer, batch_size, date)
        engine.add_bos_token = False if texts.chat or texts.bos_before else None
        with contextlib.ExitStack() as stack:
            if settings.engine == "hf":
                stack.enter_context(scoring.inference(model))
                stack.enter_context(scoring.generating_with(model, _generation_config(model, texts)))
            try:
                if seeded:
                    _seed()
                # Listing lm-eval's 14,000 tasks takes 6 s
                loaded = TaskManager(include_defaults=not own).load(specs)
                for task in loaded["tasks"].values():
                    _set_fewshot(task, settings)
                found = evaluate(
                    engine,
                    task_dict=loaded,
                    limit=settings.limit,
                    apply_chat_template=texts.chat,
                    fewshot_as_multiturn=True,
                    log_samples=True,
                    # Bootstrapping would fork one process per core while the GPU is in use; `_stderr`
                    # replaces it
                    bootstrap_iters=0,
                )
            except task_guard.REFUSALS as error:
                # A perplexity can overflow, and `max_gen_toks` can be beyond the context. Values of lm-eval's
                # task files and rows of its datasets can be odd. Otherwise it is a bug in finetune.
                own = all(tasks.is_file(name) and tasks.local(name) for name in settings.tasks)
                if own and not isinstance(error, OverflowError | AssertionError):
                    raise
                raise _failure(error, ", ".join(settings.tasks)) from error
    box = [_collected(found, settings, texts.chat, batch_size) if found else None]
    if PartialState().num_processes > 1:
        broadcast_object_list(box)
    return box[0] or {}


def _seed() -> None:
    """Set the seeds of `lm_eval.simple_evaluate`."""
    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def language_model(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    date: str | None,
) -> Any:
    """Wrap a loaded model for lm-eval, for all processes of this launch."""
    from lm_eval.models import huggingface

    HFLM: Any = huggingface.HFLM
    limit = scoring.batch_limit(model)

    class Limited(HFLM):
        """Render chats in the template sandbox, and let no long request change the others of its batch."""

        def loglikelihood(self, requests: list[Any], **options: Any) -> Any:
            split_long(self, requests, limit)
            return super().loglikelihood(requests, **options)

        def loglikelihood_rolling(self, requests: list[Any], **options: Any) -> Any:
            split_long(self, requests, limit)
            return super().loglikelihood_rolling(requests, **options)

        def generate_until(self, requests: list[Any], **options: Any) -> Any:
            split_long(self, requests, limit)
            return super().generate_until(requests, **options)

        def apply_chat_template(self, chat_history: list[Any], add_generation_prompt: bool = True) -> str:
            options = self.chat_template_args
            return chat_text(
                self.tokenizer, chat_history, options, goes_on=not add_generation_prompt, date=date
            )

    precision = launch_settings.read().precision
    wrapped: Any = Limited(
        pretrained=model,
        tokenizer=without_ending(tokenizer),
        batch_size=batch_size,
        max_length=token_limits.positions(
            model.config
        ),  # lm-eval knows only some of the config names for the maximum length
        mixed_precision_dtype=None
        if precision == "no"
        else getattr(torch, mixed_precision.DTYPES[precision]),
    )
    state = PartialState()
    if state.num_processes > 1:
        wrapped.accelerator = Accelerator()
        upstream_private.set_rank(wrapped, state.process_index, state.num_processes)
    return wrapped


def split_long(engine: Any, requests: list[Any], limit: int | None) -> None:
    """Set the batch size to 1 if a request with its answer is longer than `scoring.batch_limit`."""
    if limit is None:
        return
    for request in requests:
        text = "".join(part for part in request.args if isinstance(part, str))
        options = next((part for part in request.args if isinstance(part, dict)), None)
        room = 0 if options is None else int(options.get("max_gen_toks", engine.max_gen_toks))
        # No text has more tokens than bytes, except for special tokens
        if len(text.encode()) + room + 2 > limit and len(engine.tok_encode(text)) + room > limit:
            engine.batch_size_per_gpu = 1
            return


def without_ending(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that adds no token after a text, as in training.

    lm-eval would take such a token for a part of each prompt.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found = backend and backend.encode("x", add_special_tokens=True)
    if not found or not found.special_tokens_mask[-1]:
        return tokenizer
    size = found.special_tokens_mask.index(0)
    opening = list(zip(found.tokens[:size], found.ids[:size], strict=True))
    copied: Any = copy.deepcopy(tokenizer)
    copied.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*(token for token, _ in opening), "$A"], special_tokens=opening
    )
    return copied


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    turns: list[Any],
    options: dict[str, Any],
    *,
    goes_on: bool,
    date: str | None,
) -> str:
    """Render a chat with the tokenizer's template, in the sandbox and within its limits.

    The result equals lm-eval's and transformers' own, which would render in this process.

    Args:
        goes_on: end inside the last turn, which the model continues. Otherwise the text ends with the
            generation prompt.

    Raises:
        UserError: the template fails, also without system turns (exit 2).
    """
    if goes_on:
        turns = [*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + HERE}]
    special = {**tokenizer.special_tokens_map, **options}
    template = ChatTemplate(tokenizer.get_chat_template(), special, date)
    (made,) = render(template, [(turns, None)], prompt=not goes_on)
    without_system = [turn for turn in turns if turn["role"] != "system"]
    if made.error and len(without_system) < len(turns):
        logging.getLogger("lm_eval").warning(f"finetune removed the system messages: {made.error}")
        (made,) = render(template, [(without_system, None)], prompt=not goes_on)
    text, mark, rest = made.text.rpartition(HERE.strip())
    if made.error or (goes_on and not mark):
        raise UserError(
            Problem(
                "the chat template can't render the prompts of a task",
                "eval.tasks",
                found=made.error or "the rendered text does not contain the last turn",
                fix="eval.apply_chat_template: false",
                code="chat-template",
            )
        )
    kept = rest.startswith(" ")  # otherwise the template strips spaces at the ends of turns
    return (text if kept else text.rstrip()) if goes_on else made.text


def vllm(base: str, revision: str | None, adapter: str, rank: int) -> Any:
    """Return vLLM as lm-eval's engine.

    Its `lora_request` switches the adapter. Tests do not run this function.
    """
    from lm_eval.api.registry import get_model

    engine: Any = get_model("vllm")
    return engine(
        pretrained=base,
        revision=revision,
        tokenizer=adapter,
        lora_local_path=adapter,
        max_lora_rank=max(8, 2 ** math.ceil(math.log2(rank))),
        batch_size="auto",
    )


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Print each kind of lm-eval's warnings once with its count. Show progress bars only on a terminal."""
    logger, said = logging.getLogger("lm_eval"), Counter[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.update([re.sub(r"\d+", "N", record.getMessage().strip())])
    before, propagates = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [handler], False
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with quiet:
            yield
    finally:
        logger.handlers, logger.propagate = before, propagates
    for message, times in said.items():
        if PartialState().is_main_process and not EXPECTED.search(message):
            count = f" {times:,} times" if times > 1 else ""
            standard_streams.say(f"note: lm-eval warns{count}: {message}", error=True)


def of_task(settings: Eval, task: str) -> Eval:
    """Return the settings with this task only, or with all tasks if it is part of a group."""
    named = {name: tasks.local(name) for name in settings.tasks}
    chosen = [name for name, local in named.items() if task in (name, local.task if local else "")]
    return settings.model_copy(update={"tasks": chosen or settings.tasks})


def one(results: dict[str, Any], task: str, metric: str) -> tuple[float, bool]:
    """Return one metric of one task, and whether higher is better.

    Raises:
        UserError: the task or the metric does not exist (exit 2).
    """
    names = [f"{name}/{key}" for name, found in results.items() for key in found["higher_is_better"]]
    if f"{task}/{metric}" not in names:
        raise UserError(
            Problem(
                "no task of the evaluation has this metric",
                "eval.metric_for_best_model",
                found=f"{task}/{metric}",
                expected=recipe_errors.choices(f"{task}/{metric}", ["loss", "exact_match", *names]),
                fix="metric_for_best_model: loss",
                code="eval-setting",
            )
        )
    return float(results[task]["metrics"][metric]), results[task]["higher_is_better"][metric] is not False


def _collected(found: Mapping[str, Any], settings: Eval, chat: bool, batch_size: int) -> dict[str, Any]:
    """Return lm-eval's results by task, with scores and prompts of each example."""
    collected = {}
    for name, results in found["results"].items():
        samples = sorted(
            found["samples"].get(name, []), key=lambda sample: (sample["filter"], sample["doc_id"])
        )
        metrics = {
            _metric(key): value
            for key, value in results.items()
            if "," in key and isinstance(value, (int, float))
        }
        better = found["higher_is_better"].get(name, {})
        collected[name] = {
            "metrics": metrics,
            "higher_is_better": {
                key: better.get(key.partition(",")[0]) for key in metrics if "stderr" not in key
            },
            "rows": samples,
            "subtasks": found["group_subtasks"].get(name, []),
            "settings": {
                "limit": settings.limit,
                "num_fewshot": found["n-shot"].get(name),
                "apply_chat_template": chat,
                "engine": settings.engine,
                "batch_size": batch_size,
            },
        }
    return collected


def _metric(key: str) -> str:
    """Convert `acc,none` to `acc`, and `exact_match_stderr,strict` to `exact_match,strict_stderr`."""
    name, _, filter_name = key.partition(",")
    name, stderr, _ = name.partition("_stderr")
    return (name if filter_name == "none" else f"{name},{filter_name}") + stderr


def compare(base: dict[str, Any], tuned: dict[str, Any], forgetting: set[str]) -> dict[str, Any]:
    """Return each task's scores of both models and their difference, as in eval.json.

    Raises:
        UserError: the two models were evaluated on different prompts (exit 4).
    """
    return {name: _compared(name, base, tuned, name in forgetting) for name in tuned}


def _compared(name: str, base: dict[str, Any], tuned: dict[str, Any], forgetting: bool) -> dict[str, Any]:
    before, after = base[name], tuned[name]
    pair = _rows(base, name), _rows(tuned, name)
    document_ids = [[(row["doc_id"], row["filter"], row["prompt_hash"]) for row in rows] for rows in pair]
    if document_ids[0] != document_ids[1]:
        raise UserError(
            Problem(
                f"task {name}: the base model and the fine-tuned model got different prompts",
                found=f"{len(document_ids[0]):,} and {len(document_ids[1]):,} prompts",
                fix="run `finetune evaluate` again",
                code="eval-task",
            ),
            code=Exit.ARTIFACT,
        )
    better = after["higher_is_better"]
    sides: dict[str, Any] = {"base": dict(before["metrics"]), "tuned": dict(after["metrics"])}
    differences = {}
    for metric in better:
        found = _difference(metric, *pair, better[metric] is not False)
        change = after["metrics"][metric] - before["metrics"][metric]
        # The metric is a mean over examples
        mean = found and math.isclose(found["value"], change, rel_tol=1e-6, abs_tol=1e-9)
        if mean:
            differences[metric] = found
            for side, rows in zip(("base", "tuned"), pair, strict=True):
                sides[side][f"{metric}_stderr"] = _stderr(metric, rows)
    documents = {(row["task"], row["doc_id"]) for row in pair[1]}
    return {
        **sides,
        "difference": differences,
        "rows": len(documents),
        "higher_is_better": better,
        "main": next(iter(better), None),
        "asked": not any(name in other["subtasks"] for other in tuned.values()),
        "forgetting": forgetting,
        "settings": after["settings"],
    }


def _rows(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return every example of a task, or of all tasks of a group."""
    own = [{**row, "task": name} for row in results[name]["rows"]]
    return own + [row for part in results[name]["subtasks"] for row in _rows(results, part)]


def _values(metric: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float] | None] | None:
    """Return a metric's value and weight for each example, or `None` if it is not a mean over examples."""
    name, _, wanted = metric.partition(",")
    values = [row[name] for row in rows if name in row and row["filter"] == (wanted or "none")]
    if name in PERPLEXITIES:
        pairs = [value if isinstance(value, (tuple, list)) else (value, 1) for value in values]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if values and all(isinstance(value, (int, float)) for value in values):
        return values, None
    return None


def _difference(
    metric: str, base: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]], higher_is_better: bool
) -> dict[str, Any] | None:
    """Return the paired difference of a mean or a perplexity, or `None` for other metrics."""
    before, after = _values(metric, base), _values(metric, tuned)
    if not before or not after or len(before[0]) != len(after[0]):
        return None
    of = PERPLEXITIES.get(metric.partition(",")[0])
    return paired_differences.difference(
        before[0],
        after[0],
        higher_is_better=higher_is_better and not of,
        weights=before[1],
        groups=_groups(metric, base),
        of=of,
    )


def _groups(metric: str, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return a label for each example of a metric: its prompt, or its document if all prompts are equal."""
    name, _, wanted = metric.partition(",")
    own = [row for row in rows if name in row and row["filter"] == (wanted or "none")]
    prompts = [row["prompt_hash"] for row in own]
    return prompts if len(set(prompts)) > 1 else [row["doc_hash"] for row in own]


def _stderr(metric: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the standard error of a metric: by formula for a mean, by jackknife for a perplexity."""
    values, weights = _values(metric, rows) or ([], None)
    of = PERPLEXITIES.get(metric.partition(",")[0])
    if len(values) < 2:
        return None
    return (
        paired_differences.standard_error(values, weights, of)
        if of
        else statistics.stdev(values) / math.sqrt(len(values))
    )
