"""The result of `finetune.train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.argument_types import check_types
from finetune.core.library_calls import library_call
from finetune.recipe.loader import load as load_recipe
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

        Raises:
            UserError: the saved files can't be loaded.
        """
        from finetune.evaluation import reopen

        folder = RunFolder(self.folder)
        return reopen.reopen(folder, load_recipe(folder.recipe))
