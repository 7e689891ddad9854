"""Write the notes below the tables of a plan: what the plan assumes, and what it does not know."""

from __future__ import annotations

from finetune.adapters import expert_targets
from finetune.autoconfig import memory_estimate, optimizer_choice
from finetune.autoconfig.batch_size import few_steps, short_of_peak
from finetune.planning import dataset_estimate, step_time
from finetune.planning.planned_run import PlannedRun
from finetune.recipe import adapter_types
from finetune.recipe.schema import Data, Eval

IN_A_HOST = 8  # largest number of GPUs that NVLink connects in one host


def of_recipe(run: PlannedRun, *, too_large: bool) -> list[str]:
    """Return the notes on the model, the data, training and evaluation.

    Args:
        too_large: whether evaluation does not fit in memory.
    """
    found, has, rows, steps = run.model, run.adapter, run.rows, run.steps
    data, train, evaluation = run.recipe.data, run.recipe.train, run.recipe.eval
    what = f"{found.unknown}, so the plan assumes the saved activations of a Llama"
    said = [what] if found.unknown else []
    said += [has.unknown] if has.unknown else []
    if memory_estimate.widths(found.config).routed:
        said.append("the plan assumes that each expert gets the same number of tokens")
    kind, adapter = adapter_types.find(run.recipe.adapter.type), run.recipe.adapter.options()
    said += expert_targets.notes({**adapter, **kind.sets}, found.names, kind.peft)
    quantized = run.storage in adapter_types.QUANTIZED
    if run.storage == "int8":
        said.append("the plan does not know the speed of bitsandbytes' int8 kernels; a step may take longer")
    stays = expert_targets.storage_note(found.names, found.config, run.storage) if quantized else ""
    said += [f"model.quantization: {stays}"] if stays else []
    if optimizer_choice.known_bytes(optimizer_choice.asked(train)) is None:
        optimizer = optimizer_choice.asked(train)
        said.append(f"the plan does not know the state of {optimizer}, and assumes the state of AdamW")
    if steps is None:
        said.append("the number of steps is not known before the data is prepared")
    said += [*short_of_peak(train, steps), *few_steps(train, steps)] if steps is not None else []
    if rows is None:
        why = "are streamed" if data.streaming else "are not on this machine"
        said.append(
            f"the examples {why}, so the plan assumes {data.max_length} tokens each (data.max_length)"
        )
    else:
        kind = "packed sequences" if data.packing else "examples"
        said.append(f"the data has {rows.number:,} {kind} of about {rows.tokens:,.0f} tokens ({rows.how})")
    said += [long] if (long := dataset_estimate.too_long(rows, data)[0]) else []
    if too_large and evaluates(data, evaluation):
        auto = evaluation.batch_size == "auto"
        many = "even one example" if auto else f"a batch of {evaluation.batch_size} examples"
        remedy = "" if auto else "; set `eval.batch_size: auto`"
        what = f"{many} of {data.max_length} tokens needs too much memory{remedy}"
        said.append(f"evaluation would not fit: {what}")
    if has.dropout:
        said.append("the memory of dropout masks is computed, not measured")
    return said


def of_merge(phases: dict[str, dict[str, float]], usable: float, device: str) -> list[str]:
    """Return a note if a merge does not fit in memory. A merge holds the weights in fp32."""
    size = sum(phases.get("merge", {}).values())
    if device == "cpu" or size <= usable:
        return []
    what = f"merging would not fit on the GPU, because the fp32 weights need {size:,.1f} GiB"
    return [f"{what}; on the CPU, run `ACCELERATE_USE_CPU=true finetune merge RUN`"]


def of_machine(gone: dict[str, float], room: float | None, processes: int, device: str) -> list[str]:
    """Return the notes on CPU runs, on several hosts and on offloading to CPU memory.

    Args:
        gone: GiB that one process offloads.
        room: GiB of CPU memory that all processes may use; `None`: not known.
    """
    said = []
    if device == "cpu":
        said.append("the time on a CPU comes from one layer; packed sequences and small batches take longer")
        said.append("each process on a CPU needs about 1 GiB more for libraries")
    if processes > IN_A_HOST:
        what = f"the plan assumes that all {processes} GPUs are in one host"
        said.append(f"{what}; the network between hosts is slower, so communication takes longer")
    if not gone:
        return said
    each = "" if processes == 1 else f" in each of {processes} processes"
    has = "a run may use half of the free CPU memory, which is not known for another machine"
    has = has if room is None else f"a run may use {room:,.0f} GiB, half of the free CPU memory"
    said.append(f"the run offloads {sum(gone.values()):,.1f} GiB{each} to CPU memory; {has}")
    if "optimizer" in gone:
        rate = f"{step_time.HOST_ADAMW / 1e9:,.0f} GB/s"
        said.append(f"the plan assumes a CPU memory bandwidth of {rate} for the optimizer, a rough guess")
    return said


def searched(rows: int, length: int, margin: float) -> str:
    """Return the note on `per_device_train_batch_size: auto`."""
    what = f"the plan expects {rows} of {length} tokens, the largest that fits in {margin:.0%} of memory"
    return f"train.per_device_train_batch_size=auto: {what}; a run tries its longest examples"


def evaluates(data: Data, settings: Eval) -> bool:
    """Return whether a run evaluates anything."""
    held_out = data.validation is not None or data.validation_fraction is not None
    return held_out or settings.forgetting is not False or bool(settings.tasks)
