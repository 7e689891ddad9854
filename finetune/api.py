"""The Python API. The commands call the same functions.

Every function raises only `finetune.core.errors.UserError`. If another library raised an exception, it is the
`__cause__` of this error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core.errors import only_user_errors
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Model, Recipe
from finetune.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel, TrainerCallback

    from finetune.importers.translation import Translation
    from finetune.planning.plan import Plan
    from finetune.recipe.schema import Quantization

__all__ = [
    "Recipe",
    "Run",
    "check",
    "evaluate",
    "export_model",
    "import_recipe",
    "load_model",
    "load_recipe",
    "merge",
    "plan",
    "publish",
    "train",
]


@only_user_errors("checked the recipe")
def check(recipe: Recipe) -> list[str]:
    """Check a recipe without loading weights, and return notes and advice.

    Raises:
        UserError: the recipe has mistakes. The error lists all of them.
    """
    from finetune.preflight import checker

    return checker.check(recipe)


@only_user_errors("planned the run")
def plan(recipe: Recipe, gpu: str | None = None, gpus: int | None = None) -> Plan:
    """Estimate memory, time and cost on `gpus` GPUs of a type such as "h100", or on this machine."""
    from finetune.planning import planner

    return planner.make_for(recipe, gpu, gpus)


@only_user_errors("loaded the base model")
def load_model(
    name: str | Path,
    *,
    quantization: Quantization = "auto",
    revision: str | None = None,
    device: str | None = None,
) -> PreTrainedModel:
    """Load a base model as `finetune train` does, for TRL's SFTTrainer or your own training loop.

    The weights have the dtype bf16 on a GPU that supports it, and fp32 on a CPU. `quantization` stores linear
    layers and stacked experts in fewer bits. All weights are frozen: add an adapter with
    `peft.get_peft_model`. `finetune.train` also adapts quantized experts. Attention is `sdpa`,
    or `eager` for models that do not support `sdpa` in transformers.

    Args:
        name: Hub id or local folder.
        quantization: the value of `model.quantization` in a recipe.
        revision: branch, tag or commit of a Hub model.
        device: a device such as "cuda:1". By default, the GPU of this process, or the CPU.

    Raises:
        UserError: the model can't be read, or this machine does not support the quantization.
    """
    from finetune.speed import frozen_model

    return frozen_model.load(Model(name=str(name), revision=revision, quantization=quantization), device)


@only_user_errors("trained the model")
def train(
    recipe: Recipe,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    resume: str | None = None,
    quiet: bool = False,
) -> Run:
    """Train, save, reopen and evaluate a recipe.

    Args:
        callbacks: additional callbacks for the Trainer, as in `transformers.Trainer`.
        resume: "newest" or "step-<n>" names a checkpoint; "auto" starts a new run if there is none.
        quiet: print errors only.

    Raises:
        UserError: the recipe can't be trained, or another run trains in this process.
    """
    from finetune.preflight import checker
    from finetune.training import pipeline

    checker.check_without_examples(recipe)
    verbosity = "quiet" if quiet else "normal"
    return Run(pipeline.run(recipe, verbosity=verbosity, resumes=resume, callbacks=callbacks).path)


@only_user_errors("translated the file")
def import_recipe(path: str | Path, tool: str | None = None, gpus: int = 1) -> Translation:
    """Translate a config of axolotl, LLaMA-Factory or TRL.

    Args:
        path: a YAML config, or a file with a `trl sft` command line.
        tool: axolotl, llamafactory or trl. By default, the keys of the file decide.
        gpus: the number of GPUs that the other tool trained on, for the effective batch size.

    Returns:
        A translation with `recipe`, a dict from dotted keys of finetune to values, and `entries`, one for
        each key of the tool.

    Raises:
        UserError: the file can't be read, or it is not for supervised fine-tuning.
    """
    from finetune.importers import reading

    return reading.import_recipe(path, tool, gpus)


@only_user_errors("evaluated the run")
def evaluate(run: Run | str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluate the base model and the fine-tuned model of a finished run; return the content of eval.json."""
    from finetune.evaluation import evaluator

    return evaluator.run(_path(run), list(overrides))


@only_user_errors("merged the adapter")
def merge(run: Run | str | Path, output: str | None = None, *, quantize: str | None = None) -> dict[str, Any]:
    """Merge a run's adapter into its base model; return the content of merge.json.

    Args:
        output: the new folder; `None`: `merged` in the run folder.
        quantize: int8, int4 or fp8.
    """
    from finetune.export import merging

    return merging.run(_path(run), output=output, quantized=quantize)


@only_user_errors("exported the run")
def export_model(
    run: Run | str | Path,
    to: str,
    output: str | None = None,
    *,
    quantize: str | None = None,
    adapter: bool = False,
) -> dict[str, Any]:
    """Export a run or an adapter for a server, and return a report.

    finetune checks that the exported model reads and answers prompts as the trained model does.

    Args:
        run: a run, a run folder, a folder of PEFT, or the name of a run or an adapter on the Hub.
        to: gguf, ollama, vllm, mlx or compressed-tensors.
        output: the new folder. By default, a folder such as `export-gguf-f16` in the run folder.
        quantize: the quantization of the weights. By default, the target's own default.
        adapter: export only the adapter instead of merged weights.
    """
    from finetune.export import exporting

    return exporting.run(_path(run), to, output=output, quantize=quantize, adapter=adapter)


@only_user_errors("published the run")
def publish(run: Run | str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> dict[str, Any]:
    """Upload a run to the Hub; return the content of publish.json.

    A dry run uploads nothing and returns the files and the repository.
    """
    from finetune.export import publishing

    return publishing.run(_path(run), overrides=overrides, dry_run=dry_run)


def _path(run: Run | str | Path) -> str | Path:
    return run.folder if isinstance(run, Run) else run
