"""The Python API. The commands call the same functions.

Every function raises only `finetune.core.errors.UserError`. If another library raised an exception, it is the
`__cause__` of this error.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

from finetune.core.argument_types import (
    check_choice,
    check_device,
    check_gpus,
    check_items,
    check_overrides,
    check_read,
    check_recipe,
    check_types,
    wrong_values,
)
from finetune.core.library_calls import library_call
from finetune.recipe import loader
from finetune.recipe.schema import Model, Quantization, Recipe
from finetune.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, TrainerCallback

    from finetune.importers.reading import Translation
    from finetune.planning.plan import Plan

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


_NAME, _TEXT = (str, Path), (str, NoneType)
_TARGETS = ("gguf", "ollama", "vllm", "mlx", "compressed-tensors")


@library_call("read the recipe")
def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, apply `section.key=value` overrides, and check everything.

    Args:
        path: a recipe file, or the name of a shipped recipe, such as `quickstart`. A file has priority.
        overrides: overrides such as `["adapter.type=dora"]`.

    Raises:
        UserError: the recipe is wrong. The error lists every problem with its place in the file.
    """
    check_types(path=(path, _NAME))
    check_overrides(overrides)
    return loader.load(path, list(overrides))


@library_call("checked the recipe")
def check(recipe: Recipe) -> list[str]:
    """Check a recipe without loading weights, and return notes and advice.

    Raises:
        UserError: the recipe has mistakes. The error lists all of them.
    """
    from finetune.preflight import checker

    check_recipe(recipe, Recipe)
    return checker.check(recipe)


@library_call("planned the run")
def plan(recipe: Recipe, gpu: str | None = None, gpus: int | None = None) -> Plan:
    """Estimate memory, time and cost on `gpus` GPUs of a type such as "h100", or on this machine."""
    from finetune.planning import planner

    check_recipe(recipe, Recipe)
    check_types(gpu=(gpu, _TEXT), gpus=(gpus, (int, NoneType)))
    check_gpus(gpus)
    return planner.make_for(recipe, gpu, gpus)


@library_call("loaded the base model")
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

    check_types(name=(name, _NAME), quantization=(quantization, (str,)))
    check_types(revision=(revision, _TEXT), device=(device, _TEXT))
    check_choice("quantization", quantization, get_args(Quantization))
    check_device(device)
    with wrong_values():
        section = Model(name=str(name), revision=revision, quantization=quantization)
    return frozen_model.load(section, device)


@library_call("trained the model")
def train(
    recipe: Recipe,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    resume: str | None = None,
    quiet: bool = False,
) -> Run:
    """Train, save, reopen and evaluate a recipe.

    Args:
        callbacks: additional callbacks for the Trainer, as in `transformers.Trainer`. They may log, save and
            end the training. finetune evaluates by `eval.eval_steps`, not when a callback asks for it.
        resume: "newest" or "step-<n>" names a checkpoint; "auto" starts a new run if there is none.
        quiet: print errors only.

    Raises:
        UserError: the recipe can't be trained, or another run trains in this process.
    """
    from transformers import TrainerCallback

    from finetune.preflight import checker
    from finetune.training import pipeline

    check_recipe(recipe, Recipe)
    check_types(callbacks=(callbacks, (list, tuple)))
    check_types(resume=(resume, _TEXT), quiet=(quiet, (bool,)))
    check_items("callbacks", callbacks, TrainerCallback)
    checker.check_without_examples(recipe)
    verbosity = "quiet" if quiet else "normal"
    return Run(pipeline.run(recipe, verbosity=verbosity, resumes=resume, callbacks=callbacks).path)


@library_call("translated the file")
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

    check_types(path=(path, _NAME), tool=(tool, _TEXT), gpus=(gpus, (int,)))
    check_choice("tool", tool, reading.TOOLS)
    check_gpus(gpus)
    return reading.import_recipe(path, tool, gpus)


@library_call("evaluated the run")
def evaluate(run: Run | str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluate the base model and the fine-tuned model of a finished run; return the content of eval.json."""
    from finetune.evaluation import evaluator

    check_overrides(overrides)
    check_read("evaluate", list(overrides))
    return evaluator.run(_path(run), list(overrides))


@library_call("merged the adapter")
def merge(
    run: Run | str | Path, output: str | Path | None = None, *, quantize: str | None = None
) -> dict[str, Any]:
    """Merge a run's adapter into its base model; return the content of merge.json.

    Args:
        output: the new folder; `None`: `merged` in the run folder.
        quantize: int8, int4 or fp8.
    """
    from finetune.export import merging

    check_types(output=(output, (*_NAME, NoneType)), quantize=(quantize, _TEXT))
    check_choice("quantize", quantize, ("int8", "int4", "fp8"))
    return merging.run(_path(run), output=None if output is None else str(output), quantized=quantize)


@library_call("exported the run")
def export_model(
    run: Run | str | Path,
    to: str,
    output: str | Path | None = None,
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

    check_types(to=(to, (str,)), output=(output, (*_NAME, NoneType)))
    check_types(quantize=(quantize, _TEXT), adapter=(adapter, (bool,)))
    check_choice("to", to, _TARGETS)
    return exporting.run(
        _path(run), to, output=None if output is None else str(output), quantize=quantize, adapter=adapter
    )


@library_call("published the run")
def publish(run: Run | str | Path, overrides: Sequence[str] = (), *, dry_run: bool = False) -> dict[str, Any]:
    """Upload a run to the Hub; return the content of publish.json.

    A dry run uploads nothing and returns the files and the repository.
    """
    from finetune.export import publishing

    check_overrides(overrides)
    check_read("publish", list(overrides))
    check_types(dry_run=(dry_run, (bool,)))
    return publishing.run(_path(run), overrides=overrides, dry_run=dry_run)


def _path(run: Run | str | Path) -> str | Path:
    check_types(run=(run, (Run, *_NAME)))
    return run.folder if isinstance(run, Run) else run
