"""The result of `finetune.train`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.argument_types import check_types
from finetune.core.library_calls import library_call
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Run:
    """A run folder, with its metrics, its evaluation and its model."""

    folder: Path

    def __post_init__(self) -> None:
        check_types(folder=(self.folder, (str, Path)))
        object.__setattr__(self, "folder", Path(self.folder))  # a text is a path too

    @property
    @library_call("read metrics.jsonl")
    def metrics(self) -> list[dict[str, Any]]:
        """Return the logged training steps, each with its loss, learning rate and tokens per second.

        Raises:
            UserError: metrics.jsonl is damaged.
        """
        return RunFolder(self.folder).measured_steps()

    @property
    @library_call("read eval.json")
    def eval(self) -> dict[str, Any]:
        """Return the content of eval.json, which compares the base model with the fine-tuned model.

        Raises:
            UserError: the run is not evaluated yet, or the file is damaged.
        """
        return RunFolder(self.folder).read("eval.json")

    @library_call("loaded the model of the run")
    def load_model(self) -> PreTrainedModel:
        """Load the base model as in training, and the adapter with plain PEFT, in evaluation mode.

        Warns:
            UserWarning: the base model has changed since the run.

        Raises:
            UserError: the saved files can't be loaded, or `finetune evaluate` would refuse the folder.
        """
        from finetune.evaluation import reopen
        from finetune.models import base_identity

        folder = run_folder.open_run(self.folder)
        recipe = run_folder.recipe_of(folder, files=False)
        for note in base_identity.notes(recipe.model, folder):
            warnings.warn(note, stacklevel=3)
        return reopen.reopen(folder, recipe)
