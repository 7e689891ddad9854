"""Check the trackers of `train.report_to` before any weight is loaded."""

from __future__ import annotations

import os
from collections.abc import Collection

from finetune.core import packages
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.core.privacy import masked
from finetune.recipe import upstream_options
from finetune.recipe.renames import meant
from finetune.recipe.schema import Recipe

MOST_TRACKERS = 100
TRACKERS = {  # name in train.report_to -> module, package; other trackers have one name for all three
    "azure_ml": ("azureml", "azureml-core"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "flyte": ("flytekit", "flytekit"),
    "kubeflow": ("transformers", "transformers"),  # needs none: it is a server that the job runs under
}


def check(recipe: Recipe) -> list[str]:
    """Check that the trackers in `train.report_to` exist and are installed."""
    key, trackers = "train.report_to", recipe.train.passed_on().get("report_to", "none")
    trackers = trackers if isinstance(trackers, list) else [trackers]
    if trackers in (["none"], []):
        return []
    if len(trackers) > MOST_TRACKERS:
        raise UserError(
            Problem(
                "the list of trackers is too long",
                key,
                found=f"{len(trackers):,}",
                expected=f"at most {MOST_TRACKERS}",
                fix="train.report_to: tensorboard",
                code="value-range",
            )
        )
    known = upstream_options.trackers()
    if trackers == ["all"]:
        found = sorted(name for name in known if name != "kubeflow" and _tracker_installed(name))
        said = f"{key}: all means the installed trackers: {', '.join(found) or 'none'}"
        return [said, *(_remote_tensorboard() if "tensorboard" in found else [])]
    unknown = [str(name) for name in trackers if name not in known]
    if unknown:
        raise UserError(*(_unknown_tracker(name, known) for name in unknown))
    missing = [name for name in trackers if not _tracker_installed(name)]
    if missing:
        raise UserError(
            Problem(
                "a tracker is not installed",
                key,
                found=", ".join(missing),
                fix=packages.install_command(*(TRACKERS.get(name, (name, name))[1] for name in missing)),
                code="package-missing",
            ),
            code=Exit.ENVIRONMENT,
        )
    return _remote_tensorboard() if "tensorboard" in trackers else []


def _remote_tensorboard() -> list[str]:
    """Check that TensorBoard's folder can be on another machine (TENSORBOARD_LOGGING_DIR), and tell where."""
    where = os.environ.get("TENSORBOARD_LOGGING_DIR", "")
    protocol, mark, _ = where.partition("://")
    if not mark:
        return []
    import fsspec  # 0.1 s; TensorBoard writes through it

    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise UserError(
            Problem(
                "TensorBoard can't write to this place",
                "train.report_to",
                found=f"TENSORBOARD_LOGGING_DIR={masked(where)}",
                why=first_line(error),
                fix="set TENSORBOARD_LOGGING_DIR to a local folder, or unset it",
                code="package-missing",
            ),
            code=Exit.ENVIRONMENT,
        ) from None
    return [f"train.report_to: TensorBoard writes to {masked(where)} (TENSORBOARD_LOGGING_DIR)"]


def _unknown_tracker(name: str, known: Collection[str]) -> Problem:
    near, what = meant("train.report_to", name, known), "Transformers has no such tracker"
    return Problem(
        what,
        "train.report_to",
        found=name,
        expected="" if near else "none, all, or a tracker such as tensorboard, wandb or mlflow",
        fix=f"train.report_to: {near}" if near else "train.report_to: none",
        code="value-choice",
    )


def _tracker_installed(name: str) -> bool:
    return packages.installed(TRACKERS.get(name, (name, name))[0])
