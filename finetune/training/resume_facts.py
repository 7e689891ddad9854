"""Collect the facts that must be equal on all ranks and in a resumed run."""

from __future__ import annotations

from typing import Any

from finetune.adapters import continue_from
from finetune.autoconfig.batch_size import Batch
from finetune.autoconfig.machine_setup import Setup
from finetune.checkpointing import resume_contract
from finetune.checkpointing.checkpoints import VerifiedCheckpoint
from finetune.distributed import collectives, launch_environment
from finetune.evaluation import results
from finetune.models import base_identity
from finetune.recipe.schema import Recipe
from finetune.training import environment_of_run
from finetune.training.run_context import RunData

SPLIT = ("per_device", "accumulation")  # parts of the batch that the machine may decide


def recipe_facts(recipe: Recipe, *, finished: bool = False) -> dict[str, str]:
    """Return every value of the recipe, and whether the run is finished. All processes must agree on them."""
    own = ("output_dir", "cache_dir")  # paths of a machine
    rank_facts = {"the run's state": "finished" if finished else "not finished"}
    for section in type(recipe).model_fields:
        values = getattr(recipe, section).model_dump()
        rank_facts |= {f"{section}.{key}": str(value) for key, value in values.items() if key not in own}
    return rank_facts


def facts(recipe: Recipe, setup: Setup) -> dict[str, str]:
    """Return further facts: versions, precision, sharding, quantization and the date of the template."""
    environment = environment_of_run.describe(setup.hardware, setup.launch)
    rank_facts = {name: str(environment[name]) for name in ("python", "git")} | {"base": setup.storage.value}
    rank_facts |= {name: str(number) for name, number in environment["packages"].items()}
    keys = ("precision", "sharded", "splitter", "sharing", "fp8")
    rank_facts |= {
        f"launch.{key}": str(getattr(setup.launch, key)) for key in keys
    } | launch_environment.ways()
    return rank_facts | {"data.template_date": str(recipe.data.template_date)}


def contract_of(
    recipe: Recipe,
    setup: Setup,
    data: RunData,
    batch: Batch,
    steps: int,
    checkpoint: VerifiedCheckpoint | None,
) -> dict[str, Any]:
    """Return the facts that a resumed run must share with the checkpoint's run, and ranks with each other.

    Allowed differences from `checkpoint` become its notes.

    Raises:
        UserError: a fact differs from the checkpoint's run (exit 4), or between ranks.
    """
    reports = data.prepared.report
    counts = {
        "steps": steps,
        "rows": reports["train"].kept,
        **batch._asdict(),
        "data: token ids": reports["train"].token_ids,
        "validation: token ids": reports["validation"].token_ids,
        **_config_facts(recipe),
        **results.metric_files(recipe.eval),
    }
    if recipe.train.per_device_train_batch_size == "auto":  # the chosen size is among the choices
        counts = {name: value for name, value in counts.items() if name not in SPLIT}
    if recipe.data.streaming:  # each worker reads its own shards, so their number decides the order
        # The number depends on the machine's cores
        workers = collectives.gathered(data.arguments.dataloader_num_workers)
        counts["train.dataloader_num_workers"] = workers[0] if len({*workers}) == 1 else workers
    contract = resume_contract.contract(
        recipe.model_dump(mode="json"), setup, counts, data.tokenizer, data.prepared.content
    )
    collectives.agree({name: str(fact) for name, fact in contract["facts"].items() if name != "hardware"})
    if checkpoint:
        checkpoint.notes.extend(resume_contract.compare(checkpoint.contract, contract, checkpoint.path))
    return contract


def _config_facts(recipe: Recipe) -> dict[str, Any]:
    """Return the values in the configs of base model and source adapter that change the result."""
    base, source = base_identity.config_values(recipe.model), continue_from.config_values(recipe.adapter)
    found = {f"{resume_contract.CONFIG}{key}": value for key, value in base.items()}
    return found | {f"{resume_contract.SOURCE}{key}": value for key, value in source.items()}
