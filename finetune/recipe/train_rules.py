"""Find settings of `train:` that the chosen schedule or optimizer refuses or ignores."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.core.errors import Problem, nearest
from finetune.core.formatting import as_yaml
from finetune.recipe import upstream_options
from finetune.recipe.schema import Train

SCHEDULED = {"lr_scheduler_type", "lr_scheduler_kwargs"}
# Arguments that the Trainer sets.
GIVEN = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
# Schedules with both options need one of them.
ONE_OF = ("min_lr", "min_lr_rate")
# Options that are learning rates, not shares of the peak.
ENDS = ("lr_end", "min_lr")
# Values of warmup_stable_decay's `decay_type` and `warmup_type`.
SHAPES = ("linear", "cosine", "1-sqrt")
# Largest learning rate in a comparison. An integer in a recipe may be larger than any float.
LARGEST = 1e300
# Schedules that follow an evaluation metric.
OF_METRICS = ("reduce_lr_on_plateau", "greedy")
# Optimizers for which the Trainer reads `optim_args` (transformers 5.22, trainer_optimizer.py).
_READS_ARGS = re.compile(
    ".*ademamix.*|adamw_anyprecision|sgd|adagrad|rmsprop.*|galore.*|apollo.*|grokadamw|adamw_torch_[48]bit"
    "|stable_adamw"
)

# Names in `optim_args` that torch's optimizers read. The names of other optimizers are not checked.
_ARGS = {
    "sgd": {"momentum", "dampening", "weight_decay", "nesterov"},
    "adagrad": {"lr_decay", "weight_decay", "eps"},
    "rmsprop": {"momentum", "alpha", "eps", "weight_decay", "centered"},
}


def conflicts(raw: Mapping[str, Any]) -> list[Problem]:
    """Return the settings that conflict with the schedule or the optimizer, in a recipe as it was read."""
    train = raw.get("train")
    if not isinstance(train, dict):
        return []
    name, given = train.get("lr_scheduler_type", "linear"), train.get("lr_scheduler_kwargs") or {}
    named = isinstance(name, str) and isinstance(given, dict) and train.keys() & SCHEDULED
    known = upstream_options.schedules().get(str(name)) if named else None
    found: list[Problem] = []
    if known:
        peak = train.get("learning_rate", Train.model_fields["learning_rate"].default)
        taken = {one: given[one] for one in given if one in known[1]}
        found += [*_of_schedule(str(name), given, *known), *_of_rates(taken, peak)]
    if isinstance(given, str):  # SFTConfig's annotation allows a string
        found.append(
            Problem(
                "a string in place of a mapping",
                "train.lr_scheduler_kwargs",
                found=given,
                expected="a mapping",
                fix="lr_scheduler_kwargs: {num_cycles: 0.5}",
                code="value-type",
            )
        )
    data = raw.get("data")
    streamed = isinstance(data, dict) and data.get("streaming")
    found += [*_of_numbers(train), *_of_order(train, streamed=bool(streamed))]
    return [*found, *_of_optimizer(str(train.get("optim") or DEFAULT), train)]


def refused(by: str, error: Exception, given: Mapping[str, Any]) -> Problem:
    """Return a library's error as a problem. Its key is the first setting that the error names."""
    said = " ".join(str(error).split())
    named = re.search(rf"\b({'|'.join(map(re.escape, given))})\b", said) if given else None
    return Problem(
        f"{by} does not accept this value",
        f"train.{named[1]}" if named else "train",
        found=said,
        code="value-range",
    )


def _of_schedule(
    name: str, given: dict[str, Any], needed: frozenset[str], taken: frozenset[str]
) -> Iterator[Problem]:
    key, options = "train.lr_scheduler_kwargs", taken - GIVEN
    if name in OF_METRICS:
        yield Problem(
            f"finetune does not support the schedule {name}",
            "train.lr_scheduler_type",
            found=name,
            fix="lr_scheduler_type: cosine",
            why="it needs the Trainer's own evaluations",
            code="value-choice",
        )
        return
    for one in sorted(given.keys() - options, key=str):
        near, expected = nearest(str(one), options), ", ".join(sorted(options)) or "no options"
        yield Problem(
            f"the schedule {name} has no such option",
            f"{key}.{one}",
            found=str(one),
            expected=expected,
            fix=f"rename it to `{near}`" if near else f"remove `{one}`",
            code="unknown-key",
        )
    missing = sorted(needed - GIVEN - given.keys())
    if missing:
        what, fix = f"the schedule {name} needs {', '.join(missing)}", f"{{{missing[0]}: 100}}"
        yield Problem(what, key, fix=f"lr_scheduler_kwargs: {fix}", code="missing-key")
    if set(ONE_OF) <= options and not any(given.get(one) is not None for one in ONE_OF):
        what, fix = f"the schedule {name} needs its last learning rate", "{min_lr_rate: 0.1}"
        yield Problem(what, key, fix=f"lr_scheduler_kwargs: {fix}", code="missing-key")


def _of_rates(given: dict[str, Any], peak: object) -> Iterator[Problem]:
    """Find options that raise the rate above its peak, or that transformers refuses after the model loads."""
    for one, number in given.items():
        key, shown = f"train.lr_scheduler_kwargs.{one}", as_yaml(number)
        if one.endswith("_type"):  # decay_type
            if number not in SHAPES:
                near = nearest(str(number), SHAPES)
                yield Problem(
                    "not one of the allowed values",
                    key,
                    found=shown,
                    expected=" or ".join(SHAPES),
                    fix=f"{one}: {near}" if near else "",
                    code="value-choice",
                )
        elif number is None:
            continue
        elif not isinstance(number, int | float) or isinstance(number, bool) or not _is_finite(number):
            yield Problem("wrong type", key, found=shown, expected="a finite number", code="value-type")
        elif "lr" in one and number < 0:
            yield Problem(
                "a learning rate can't be negative",
                key,
                found=shown,
                expected="at least 0",
                code="value-range",
            )
        elif one in ENDS and isinstance(peak, int | float) and 0 < peak <= min(number, LARGEST):
            yield Problem(
                "the last learning rate is not below the peak",
                key,
                found=shown,
                expected=f"less than {peak:g}",
                fix=f"{one}: {peak / 10:g}",
                why="it is the rate to which the schedule falls from train.learning_rate",
                code="value-range",
            )


def _is_finite(number: float) -> bool:
    return isinstance(number, int) or math.isfinite(number)  # some integers are too large for a float


def _of_numbers(train: dict[str, Any]) -> Iterator[Problem]:
    """Find values that transformers refuses when training starts and that their types allow."""
    every = train.get("logging_steps")
    if isinstance(every, float) and 1 < every < math.inf and every % 1:
        yield Problem(
            "the number of steps is not an integer",
            "train.logging_steps",
            found=f"{every:g}",
            expected="an integer, or a share of the run below 1",
            fix=f"logging_steps: {round(every)}",
            code="value-type",
        )


def _of_order(train: dict[str, Any], *, streamed: bool) -> Iterator[Problem]:
    """Find settings of the data order and of checkpoints that would be ignored."""
    strategy = train.get("train_sampling_strategy")
    if streamed and strategy not in (None, "random"):
        yield Problem(
            "this key has no effect with `data.streaming: true`",
            "train.train_sampling_strategy",
            found=as_yaml(strategy),
            fix="remove `train_sampling_strategy`",
            why="finetune reads a stream in its own order and shuffles it in `data.shuffle_buffer`",
            code="recipe-conflict",
        )
    if streamed and train.get("data_seed") is not None:
        yield Problem(
            "this key has no effect with `data.streaming: true`",
            "train.data_seed",
            found=as_yaml(train["data_seed"]),
            fix="remove `data_seed`",
            why="`train.seed` is the seed that shuffles a stream",
            code="recipe-conflict",
        )
    if train.get("dataloader_in_order") is False and train.get("dataloader_num_workers") != 0:
        yield Problem(
            "finetune needs the examples in a fixed order",
            "train.dataloader_in_order",
            found="false",
            fix="dataloader_in_order: true",
            why="a resumed run would skip some examples and repeat others",
            code="recipe-conflict",
        )
    if train.get("save_strategy") == "epoch" and train.get("save_steps") is not None:
        yield Problem(
            "this key has no effect with `save_strategy: epoch`",
            "train.save_steps",
            found=as_yaml(train["save_steps"]),
            fix="save_strategy: steps",
            why="finetune then saves a checkpoint only at the end of each epoch",
            code="recipe-conflict",
        )


def _of_optimizer(optim: str, train: dict[str, Any]) -> Iterator[Problem]:
    if optim.startswith("schedule_free"):
        yield Problem(
            "finetune does not support schedule-free optimizers",
            "train.optim",
            found=optim,
            fix=f"optim: {DEFAULT}",
            why="they train other weights than the averaged weights that must be saved",
            code="recipe-conflict",
        )
    elif train.get("optim_args") and not _READS_ARGS.fullmatch(optim):
        yield Problem(
            f"{optim} ignores `optim_args`",
            "train.optim_args",
            found=as_yaml(train["optim_args"]),
            fix=(
                "remove `optim_args`, or use adam_beta1, adam_beta2, adam_epsilon and "
                "weight_decay of `train:`"
            ),
            code="recipe-conflict",
        )
    elif optim in _ARGS and isinstance(train.get("optim_args"), str):
        for name in (part.partition("=")[0].strip() for part in train["optim_args"].split(",")):
            if name not in _ARGS[optim]:
                near, expected = nearest(name, _ARGS[optim]), ", ".join(sorted(_ARGS[optim]))
                yield Problem(
                    f"{optim} has no such option",
                    "train.optim_args",
                    found=name,
                    expected=expected,
                    fix=f"optim_args: {train['optim_args'].replace(name, near)}" if near else "",
                    code="value-choice",
                )
    if train.get("optim_target_modules") and not PROJECTS.fullmatch(optim):
        yield Problem(
            f"{optim} ignores `optim_target_modules`",
            "train.optim_target_modules",
            fix="remove `optim_target_modules`, or set `optim: galore_adamw`",
            why="it does not project gradients",
            code="recipe-conflict",
        )


DEFAULT = "adamw_torch_fused"
PROJECTS = re.compile("(galore|apollo).*")  # they project gradients, and checkpoints can't save their state
