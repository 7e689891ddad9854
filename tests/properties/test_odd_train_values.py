"""Every key of `train:` with odd values: `check` names the key, or `train` can take the value."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from finetune.autoconfig import launch_settings, machine_setup
from finetune.autoconfig.batch_size import split_batch
from finetune.core.errors import UserError
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.preflight import checker
from finetune.recipe import build, loader
from finetune.training import training_arguments
from support.paths import QUICKSTART

if TYPE_CHECKING:
    from pathlib import Path

CPU = Hardware("cpu", "CPU", 1, (0, 0), 16.0, 8)
INF = float("inf")
VALUES: tuple[Any, ...] = (
    0, 1, -1, -2, 0.5, 1.5, -0.5, 1e30, 10**30, float("nan"), INF, -INF, "x", "", [], {}, True, False, [1],
    ["x"], {"x": 1},
)  # fmt: skip
# Keys that take any text: names of a run and of its folder
FREE = {"output_dir", "project", "run_name"}
# Keys whose number may be of any size: a norm is clipped at infinity where it is only to be measured
LARGE = {
    "adam_epsilon", "effective_batch_size", "learning_rate", "max_grad_norm",
    "neftune_noise_alpha", "router_aux_loss_coef", "save_steps", "save_total_limit", "skip_nonfinite",
    "stop_at_spike", "weight_decay",
}  # fmt: skip


def refused(key: str, value: Any, folder: Path) -> list[Any]:
    """What the loader and `check` say of the quickstart with this value, or `train`'s arguments."""
    raw = yaml.safe_load(QUICKSTART.read_text())
    raw["train"][key] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    try:
        recipe = loader.load(path)
        checker.check_without_examples(recipe, with_weights=False)
    except UserError as error:
        return list(error.problems)
    setup = machine_setup.Setup(CPU, launch_settings.read(CPU), Choice("sdpa", ""), Choice("", ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an odd value may warn; only errors count here
        training_arguments.training_arguments(recipe.train, recipe.data, setup, split_batch(recipe.train, 1))
    return []


@pytest.mark.parametrize("key", sorted(build.known_keys()["train"]))
def test_odd_value_of_a_train_key_is_refused_at_its_place_or_taken(key: str, tmp_path: Path) -> None:
    taken = []
    for value in VALUES:
        try:
            problems = refused(key, value, tmp_path)
        except UserError as error:  # of the machine: tf32, settings of workers
            assert key in ("tf32", "dataloader_prefetch_factor", "dataloader_persistent_workers"), error
            assert [problem.key for problem in error.problems] == [f"train.{key}"]
            continue
        for problem in problems:
            assert problem.key.startswith("train.") or key in problem.what, (value, problem)
        taken += [] if problems else [value]
    texts = [value for value in taken if isinstance(value, str) and value]
    numbers = [v for v in taken if isinstance(v, int | float) and not isinstance(v, bool)]
    assert not texts or key in FREE, texts
    assert not [number for number in numbers if number < 0 or number != number]
    assert key in LARGE or not [number for number in numbers if number > 2**32], numbers
    assert not [v for v in taken if isinstance(v, list | dict) and v]
