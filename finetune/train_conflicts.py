"""Settings of `train:` that the schedule or the optimizer named beside them would refuse, or never read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune import optimizers, upstream
from finetune.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Found = tuple[str, str, dict[str, str]]  # key, what is wrong, the problem's other texts
SCHEDULED = {"lr_scheduler_type", "lr_scheduler_kwargs"}
GIVEN = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}  # by the Trainer
ONE_OF = ("min_lr", "min_lr_rate")  # the floor that schedules with one in their name want
OF_METRICS = ("reduce_lr_on_plateau", "greedy")
# Whose options the Trainer makes of `optim_args` (transformers 5.22, trainer_optimizer.py)
_READS_ARGS = re.compile(
    ".*ademamix.*|adamw_anyprecision|sgd|adagrad|rmsprop.*|galore.*|apollo.*|grokadamw|adamw_torch_[48]bit"
    "|stable_adamw"
)


def conflicts(raw: Mapping[str, Any]) -> list[Found]:
    """What contradicts the schedule or the optimizer, in a recipe as it was read."""
    train = raw.get("train")
    if not isinstance(train, dict):
        return []
    name, given = train.get("lr_scheduler_type", "linear"), train.get("lr_scheduler_kwargs") or {}
    named = isinstance(name, str) and isinstance(given, dict) and train.keys() & SCHEDULED
    known = upstream.schedules().get(str(name)) if named else None
    found = list(_of_schedule(str(name), given, *known)) if known else []
    return [*found, *_of_optimizer(str(train.get("optim") or optimizers.DEFAULT), train)]


def _of_schedule(
    name: str, given: dict[str, Any], needed: frozenset[str], taken: frozenset[str]
) -> Iterator[Found]:
    key, options = "train.lr_scheduler_kwargs", taken - GIVEN
    if name in OF_METRICS:
        what = "follows the Trainer's own evaluations, which `eval.every` stands in for here"
        yield "train.lr_scheduler_type", what, {"found": name, "fix": "cosine"}
        return
    for one in sorted(given.keys() - options, key=str):
        expected = ", ".join(sorted(options)) or "none: it takes no options"
        texts = {"found": one, "expected": expected, "fix": nearest(str(one), options)}
        yield f"{key}.{one}", f"is no option of {name}", texts
    missing = sorted(needed - GIVEN - given.keys())
    if missing:
        yield key, f"{name} needs {', '.join(missing)}", {"fix": f"{{{missing[0]}: 100}}"}
    if set(ONE_OF) <= options and not any(given.get(one) is not None for one in ONE_OF):
        yield key, f"{name} needs the rate that it ends at", {"fix": "{min_lr_rate: 0.1}"}


def _of_optimizer(optim: str, train: dict[str, Any]) -> Iterator[Found]:
    if optim.startswith("schedule_free"):
        what = "what it trains is not what is to be saved, but an average that it keeps: not made here"
        yield "train.optim", what, {"found": optim, "fix": f"optim: {optimizers.DEFAULT}"}
    elif train.get("optim_args") and not _READS_ARGS.fullmatch(optim):
        fix = "train.adam_beta1, adam_beta2, adam_epsilon, weight_decay"
        yield "train.optim_args", f"{optim} reads none", {"found": str(train["optim_args"]), "fix": fix}
    if train.get("optim_target_modules") and not optimizers.PROJECTS.fullmatch(optim):
        what = f"{optim} reads none: it projects no gradients"
        yield "train.optim_target_modules", what, {"fix": "drop it; or optim: galore_adamw"}
