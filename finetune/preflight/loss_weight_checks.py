"""Refuse settings that would ignore the weights of the loss in the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.core.errors import Problem, raise_if_any
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from finetune.data.audit import Report
    from finetune.recipe.schema import Recipe


def check(recipe: Recipe, report: Report) -> None:
    """Check that a run uses the weights of its examples.

    Args:
        report: the audit of the training examples.

    Raises:
        UserError: a setting computes a loss without weights (exit 2).
    """
    if not report.loss_weight:
        return
    smoothing = recipe.train.passed_on().get("label_smoothing_factor")
    init = recipe.adapter.options().get("init_lora_weights")
    conflicts = {
        "train.label_smoothing_factor": (smoothing, "label smoothing has no weights", "remove the key"),
        "adapter.init_lora_weights": (
            init == "lora_ga" and init,
            "LoRA-GA's initialization computes a loss without weights",
            "init_lora_weights: true",
        ),
        "accelerate.parallelism_config": (
            launch_environment.parallel("CP") > 1 and "context parallelism",
            "a part of a sequence has no weights",
            "a launch without context parallelism",
        ),
    }
    where = report.places["weighted"][0]
    raise_if_any(
        Problem(
            "this setting does not support the weights of the loss in the data",
            key,
            where=where,
            found=str(found),
            fix=fix,
            why=why,
            code="recipe-conflict",
        )
        for key, (found, why, fix) in conflicts.items()
        if found
    )
