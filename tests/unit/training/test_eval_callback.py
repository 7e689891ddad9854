"""The evaluations during training, after a resume."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from finetune.recipe.schema import Eval
from finetune.training.eval_callback import Validate


def made() -> Validate:
    metrics: Any = SimpleNamespace(screen=None)
    rows: Any = None
    return Validate(rows, rows, rows, Eval(), metrics, 0)


def test_a_checkpoint_knows_that_weights_have_changed() -> None:
    """A resumed run whose schedule has reached 0 must count evaluations, as the run without a stop does."""
    before, after = made(), made()
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.1}])
    nothing: Any = None
    before.on_step_begin(nothing, nothing, nothing, optimizer=optimizer)
    after.load_state_dict(before.state_dict())
    assert after.is_trained
