"""Write the notes below the tables of a plan: what the plan assumes, and what it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.autoconfig import optimizer_choice
from finetune.autoconfig.batch_size import short_of_peak
from finetune.planning import dataset_estimate, step_time

if TYPE_CHECKING:
    from finetune.planning.planned_run import PlannedRun
    from finetune.recipe.schema import Data, Eval

IN_A_HOST = 8  # largest number of GPUs that NVLink connects in one host


def of_recipe(run: PlannedRun, *, too_large: bool) -> list[str]:
    """Return the notes on the model, the data, training and evaluation.

    Args:
        too_large: whether evaluation does not fit in memory.
    """
    found, has, rows, steps = run.model, run.adapter, run.rows, run.steps
    data, train, evaluation = run.recipe.data, run.recipe.train, run.recipe.eval
    what = f"not known: {found.unknown}; weights are counted, what backward keeps is taken for Llama's"
    said = [what] if found.unknown else []
    said += [has.unknown] if has.unknown else []
    if optimizer_choice.known_bytes(optimizer_choice.asked(train)) is None:
        said.append(f"the state of {optimizer_choice.asked(train)} is not known here; taken as AdamW's")
    if steps is None:
        said.append("not known: how many steps; the rows of the data are counted when it is prepared")
    said += short_of_peak(train, steps) if steps is not None else []
    if rows is None:
        why = "are streamed" if data.streaming else "are not on this machine"
        said.append(f"rows {why}: each is taken for {data.max_length} tokens, data.max_length")
    else:
        packed = ", packed" * data.packing
        said.append(f"rows: {rows.number:,}, of about {rows.tokens:,.0f} tokens{packed} ({rows.how})")
    said += [long] if (long := dataset_estimate.too_long(rows, data)[0]) else []
    if too_large and evaluates(data, evaluation):
        auto = evaluation.batch_size == "auto"
        many = "even one row" if auto else f"{evaluation.batch_size} rows at once"
        remedy = "" if auto else "; eval.batch_size=auto takes what fits"
        what = f"{many} of {data.max_length} tokens, all of which carry loss{remedy}"
        said.append(f"evaluation would not fit: {what}")
    if has.dropout:
        said.append("what dropout keeps is computed, not measured")
    return said


def of_merge(phases: dict[str, dict[str, float]], usable: float, device: str) -> list[str]:
    """Return a note if a merge does not fit in memory. A merge holds the weights in fp32."""
    size = sum(phases.get("merge", {}).values())
    if device == "cpu" or size <= usable:
        return []
    what = f"merging would not fit: its fp32 weights take {size:,.1f} GiB"
    return [f"{what}; on the CPU: ACCELERATE_USE_CPU=true finetune merge RUN"]


def of_machine(gone: dict[str, float], room: float | None, processes: int, device: str) -> list[str]:
    """Return the notes on CPU runs, on several hosts and on offloading to CPU memory.

    Args:
        gone: GiB that one process offloads.
        room: GiB of CPU memory that all processes may use; `None`: not known.
    """
    said = []
    if device == "cpu":
        what = "on a CPU a layer's products alone are timed: passes of few rows and packed ones take longer"
        said.append(f"{what}, and each process holds about a GiB of libraries beside")
    if processes > IN_A_HOST:
        what = (
            f"{processes} GPUs are planned as on one host; between hosts the network is slower than the link"
        )
        said.append(f"{what} taken here, and communication longer")
    if not gone:
        return said
    each = "" if processes == 1 else f" of each of {processes} processes"
    has = "a run takes half of what is free, which of another machine is not known"
    has = has if room is None else f"{room:,.0f} GiB of it may be taken, half of what is free"
    said.append(f"{sum(gone.values()):,.1f} GiB{each} go to the CPU's memory; {has}")
    if "optimizer" in gone:
        rate = f"{step_time.HOST_ADAMW / 1e9:,.0f} GB/s of the CPU's memory"
        said.append(f"the optimizer on the CPU is planned at {rate}, which is a guess")
    return said


def searched(rows: int, length: int, margin: float) -> str:
    """Return the note on `per_device_train_batch_size: auto`."""
    what = (
        f"{rows} row{'s' * (rows > 1)} of {length} tokens at once, the most that {margin:.0%} of memory holds"
    )
    return f"train.per_device_train_batch_size=auto: {what} by this plan; a run tries with its longest rows"


def evaluates(data: Data, settings: Eval) -> bool:
    """Return whether a run evaluates anything."""
    held_out = data.validation is not None or data.validation_fraction is not None
    return held_out or settings.forgetting is not False or bool(settings.tasks)
