"""Prepare the training data, one rank first, and record the data's run checks."""

from __future__ import annotations

from itertools import chain

from transformers import PreTrainedTokenizerBase

from finetune.autoconfig.machine_setup import Setup
from finetune.checkpointing import checkpoints
from finetune.core.errors import Exit
from finetune.data import preparation
from finetune.data.preparation import Prepared
from finetune.distributed import collectives
from finetune.models import tokenizer_setup
from finetune.preflight import token_checks
from finetune.recipe.schema import Recipe
from finetune.run_folder.run_folder import RunFolder
from finetune.training import load_data, resume_facts
from finetune.training.run_context import RunContext, RunData


def with_template_date(recipe: Recipe, folder: RunFolder, resumes: str | None) -> Recipe:
    """Return the recipe with the date for this run's chat template, if the template uses a date.

    A resumed run keeps the date of its checkpoints.
    """

    def find_date() -> str | None:
        if resumes and (folder.checkpoints / checkpoints.CONTRACT).exists():
            saved_date = checkpoints.read_contract(folder.checkpoints)["recipe"].get("data.template_date")
            if saved_date and not recipe.data.template_date:
                return saved_date
        return preparation.dated(recipe.data, token_checks.load_with_template(recipe)).template_date

    date = collectives.from_main(find_date)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"template_date": date})})


def prepare_in_turn(recipe: Recipe, setup: Setup) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """Prepare the data in one process per machine, after all processes agree on the run.

    If another process finds damaged data and prepares it again, all processes open the data again.
    """
    collectives.agree(resume_facts.facts(recipe, setup))
    if recipe.data.streaming:
        return load_data.prepare_data(recipe)
    from accelerate import PartialState

    first = PartialState().is_local_main_process
    if not first:
        collectives.wait()  # without a time limit, because Accelerate's own waits end after 30 minutes
    tokenizer, prepared = load_data.prepare_data(recipe)
    if first:
        collectives.wait()
    collectives.wait()  # for a process that has found damage
    notes = collectives.gathered(prepared.report["train"].notes)
    if collectives.any_of(not first and not prepared.cached)[0]:
        tokenizer, prepared = load_data.prepare_data(recipe)
    report = prepared.report["train"]
    report.notes = list(dict.fromkeys(chain(*notes, report.notes)))
    return tokenizer, prepared


def add_data_checks(run: RunContext, data: RunData) -> None:
    """Add run checks that examples train the end of a turn, and that packed sequences are full."""
    report, section, checks = data.prepared.report["train"], run.recipe.data, run.checks
    add_template_check(run, data.tokenizer)
    without, allowed = report.counts.get("no_end_of_turn", 0), section.expect.no_end_of_turn
    ok = without <= allowed * report.kept  # as audited
    checks.add(
        "end-of-turn token trained",
        expected=f"{report.kept} examples",
        actual=f"{report.kept - without} examples",
        how="examples of the prepared data whose last trained token ends the turn",
        ok=ok,
        code=Exit.INPUT,
    )
    if report.packing:
        checks.add(
            "data.packing",
            expected=f"sequences of {section.max_length} tokens",
            actual=f"{report.packing['rows']:.0f} sequences, {report.packing['fill']:.2%} full",
            how=f"tokens of the packed sequences, divided by sequences x {section.max_length}",
            ok=True,
        )


def add_stream_check(run: RunContext, prepared: Prepared) -> None:
    """Add a run check of the examples skipped while streaming. The audit saw only the first examples."""
    if prepared.read is None:
        return
    read, left_out = map(sum, zip(*collectives.gathered(prepared.read.sum(0).tolist()), strict=True))
    run.checks.add(
        "skipped examples of the stream",
        expected="as few as data.expect allows",
        actual=f"{left_out:,} of {read:,}",
        how="examples that the data loaders read, including prefetched ones",
        ok=True,
    )
    if left_out:
        run.console.say(f"note: training skipped {left_out:,} of {read:,} streamed examples")


def add_template_check(run: RunContext, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add a run check of the chat template, and note a template that differs from the base model's."""
    if tokenizer.chat_template is None:
        return
    section = run.recipe.model
    own, used = (
        tokenizer_setup.digest(text) if text else "none"
        for text in (tokenizer_setup.own_template(section), tokenizer.chat_template)
    )
    run.checks.add(
        "chat template",
        own,
        used,
        "sha256 of the base repository's template, and of the template in use",
        ok=True,
    )
    run.console.say(*(f"note: {said}" for said in tokenizer_setup.foreign_template(section, tokenizer)))
