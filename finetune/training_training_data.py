"""Prepare the training data, one rank first, and record the data's run checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate import PartialState

from finetune import adapter_source, models_tokenizer, ranks, stages, training_resume_facts
from finetune.data import bundled
from finetune.errors import Exit
from finetune.receipts import Ledger
from finetune.screen import Screen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.audit import Report
    from finetune.data.prepare import Prepared
    from finetune.hardware import Setup
    from finetune.sections import Recipe


def prepare_data(recipe: Recipe) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """The tokenizer, and the rows as it encodes them."""
    from finetune.data import prepare, stream

    template = bundled.read_template(recipe.data.chat_template) if recipe.data.chat_template else None
    tokenizer = models_tokenizer.load_tokenizer(recipe.model, template)
    adapter_source.check_tokens(recipe.adapter, recipe.model.add_tokens, tokenizer)
    build = stream.stream if recipe.data.streaming else prepare.prepare
    rows, ends = (
        models_tokenizer.vocabulary(recipe.model, tokenizer),
        models_tokenizer.declared_ends(recipe.model),
    )
    return tokenizer, build(recipe.data, tokenizer, recipe.train.seed, rows, ends)


def prepare_in_turn(recipe: Recipe, setup: Setup) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """The data, which one process of each machine prepares for the others, once all mean the same run."""
    ranks.agree(training_resume_facts.facts(recipe, setup))
    if recipe.data.streaming:
        return prepare_data(recipe)
    first = PartialState().is_local_main_process
    if not first:
        ranks.wait()  # for as long as it takes: Accelerate's own way to take turns ends after half an hour
    made = prepare_data(recipe)
    if first:
        ranks.wait()
    return made


def add_data_receipts(recipe: Recipe, tokenizer: Any, report: Report, screen: Screen, ledger: Ledger) -> None:
    """Rows that don't teach the model to stop are why it will not; rows half empty are half the speed."""
    data = recipe.data
    stages.add_template_receipt(recipe.model, tokenizer, screen, ledger)
    without, allowed = report.counts.get("no_end_of_turn", 0), data.expect.no_end_of_turn
    how, ok = "rows whose last trained token ends the turn", without <= allowed * report.kept  # as audited
    got = f"{report.kept - without} rows"
    ledger.add("end of turn trained", f"{report.kept} rows", got, how, ok=ok, code=Exit.INPUT)
    if report.packing:
        got = f"{report.packing['rows']:.0f} rows, {report.packing['fill']:.2%} full"
        how = f"tokens of the packed rows over rows x {data.max_length}"
        ledger.add("data.packing", f"rows of {data.max_length} tokens", got, how, ok=True)


def add_stream_receipt(prepared: Prepared, screen: Screen, ledger: Ledger) -> None:
    """How many rows were left out of those read while training: the audit has seen the first ones alone."""
    if prepared.read is None:
        return
    read, left_out = map(sum, zip(*ranks.gathered(prepared.read.sum(0).tolist()), strict=True))
    got = f"{left_out:,} of {read:,}"
    how = "rows that loaders read in this process, ahead of the steps by what they prefetch"
    ledger.add("rows of the stream left out", "as few as data.expect allows of the first", got, how, ok=True)
    if left_out:
        screen.say(f"note: of {read:,} rows read while training {left_out:,} were left out")
