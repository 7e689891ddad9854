"""Base against tuned from the run folder alone: `finetune evaluate RUN`.

Held-out rows (loss and greedy answers), a general text (what was forgotten?) and `eval.tasks` by lm-eval, for
base and tuned on the same rows; each difference with its 95 % interval, and one verdict.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from accelerate.utils import disable_fsdp_ram_efficient_loading
from accelerate.utils.memory import clear_device_cache
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune import (
    adapter_source,
    architecture,
    attention_choice,
    differences,
    estimate,
    hardware,
    harness,
    model,
    modules,
    plan_memory,
    qat,
    ranks,
    results,
    run_folder,
    scoring,
    shipped,
    strict_json,
    tasks,
)
from finetune.data import load, prepare
from finetune.data.rows import Example
from finetune.errors import Exit, Problem, UserError
from finetune.hardware import Start
from finetune.results import Measured
from finetune.sections import Model

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.data.prepare import HeldOut
    from finetune.hardware import Hardware, Setup
    from finetune.recipe import Recipe
    from finetune.run_folder import RunFolder
    from finetune.screen import Screen
    from finetune.sections import Eval

OTHER = "eval.other.json"  # of rows that the run did not hold out, or of another base
CHOSEN = "these rows also chose the weights (eval.every): the held-out figures flatter them a little"


def run(
    path: str | Path,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    inspect: Callable[[Any], None] | None = None,
    screen: Screen | None = None,
) -> dict[str, Any]:
    """Reopen a run folder cold, evaluate base and tuned, and write eval.json.

    Args:
        path: the run folder.
        overrides: of its recipe: `eval.tasks=[arc_easy]`, `model.name=...` where the base lies elsewhere.
        inspect: called with the reopened model before it is evaluated; may raise.
        screen: says what is asked of a model when that begins, for each may take minutes.

    Returns:
        The content of eval.json; without held-out rows `base` and `tuned` are empty.

    Raises:
        UserError: no finished run, or a folder that can't be written (exit 2).
    """
    folder = run_folder.open_run(path)
    if not os.access(folder.path, os.W_OK):
        fix = "a copy of it elsewhere: its scores are kept in it"
        raise UserError(Problem("can't be written", where=str(folder.path), fix=fix))
    recipe = run_folder.recipe_of(folder, overrides)
    ranks.joined(hardware.detect().device)
    harness.check(recipe.eval, recipe.model)
    texts = general_texts(recipe.eval)
    tuned: Any = reopen(folder, recipe)
    if inspect:
        inspect(tuned)
    tokenizer = tokenizer_of(folder)
    declared = sorted(model.declared_stops(tuned.generation_config))
    stops = {"answers": scoring.stop_ids(tuned, tokenizer), "model": declared}
    rows, notes = held_out(folder, recipe, tokenizer)
    notes += [*storage_note(recipe), *model.foreign_template(recipe.model, tokenizer)]

    def say(what: str) -> None:
        if screen and PartialState().is_main_process:
            screen.say(f"{what} ...")

    def measured(asked: Any, which: str) -> Measured:
        return measure(asked, tokenizer, rows, texts, recipe, lambda what: say(f"{which}: {what}"))

    after, before = measured(tuned, "tuned"), None
    if base_stands(tuned):
        with tuned.disable_adapter():
            before = measured(tuned, "base")
    tuned = None
    clear_device_cache(garbage_collection=True)
    if not before:
        before = measured(open_base(recipe), "base")
    if recipe.eval.engine == "vllm" and recipe.eval.tasks:
        say(f"tuned and base: tasks {', '.join(recipe.eval.tasks)}")
        before.tasks, after.tasks = by_vllm(folder, recipe, tokenizer)
    result = results.content(rows, before, after, recipe.eval, notes)
    result["settings"]["stops"] = stops
    result["settings"]["model"] = differences.named(recipe.model.name, recipe.model.revision)
    result["settings"]["storage"] = setup_of(recipe).storage.value
    apart = others(folder, recipe, result)
    result["settings"]["notes"] += apart
    name = OTHER if apart or overridden(recipe) else "eval.json"  # which stays the run's own result
    result["tasks"] = {**_earlier(folder.path / name, result), **result["tasks"]}
    result["verdict"] = results.verdict(result)
    if PartialState().is_main_process:
        folder.write(name, result)
    return result


def measure(
    asked: Any,
    tokenizer: Any,
    rows: list[HeldOut],
    texts: list[str],
    recipe: Recipe,
    say: Callable[[str], None],
) -> Measured:
    """Everything one model is asked."""
    started, settings = time.perf_counter(), recipe.eval
    score, general, found = None, None, {}
    with scoring.memory_errors():
        if rows:
            say(f"loss{' and answers' * settings.answers} of {len(rows):,} held-out rows")
            score = scoring.score(asked, tokenizer, rows, recipe.data, settings, answers=settings.answers)
        if texts:
            say(f"loss of {len(texts):,} general texts")
            general = scoring.score_texts(asked, tokenizer, texts, settings)
        if settings.tasks and settings.engine == "hf":
            say(f"tasks {', '.join(settings.tasks)}")
            found = harness.run(asked, tokenizer, settings)
    return Measured(score, general, found, time.perf_counter() - started)


def by_vllm(folder: RunFolder, recipe: Recipe, tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`eval.tasks` of base and tuned by vLLM, which serves the adapter as it was saved."""
    rank = getattr(recipe.adapter, "r", None)
    plain = recipe.adapter.type in ("lora", "rslora") and recipe.speed.base in ("auto", "bf16")
    if folder.weights != folder.adapter or not plain:
        fix = "eval.engine: hf; or merge it first"
        what = f"vLLM serves LoRA on a base in bf16, not {recipe.adapter.type} on {recipe.speed.base}"
        raise UserError(Problem(what, "eval.engine", fix=fix))
    engine = harness.vllm(recipe.model.name, recipe.model.revision, str(folder.adapter), rank or 8)
    after = harness.run(engine, tokenizer, recipe.eval)
    engine.lora_request = None
    return harness.run(engine, tokenizer, recipe.eval), after


def held_out(folder: RunFolder, recipe: Recipe, tokenizer: Any) -> tuple[list[HeldOut], list[str]]:
    """The held-out rows: from the run's folder; from the data the first time, or where it is overridden.

    Returns:
        The rows, and what is worth knowing of them.
    """
    kept, other = folder.path / run_folder.HELD_OUT, overridden(recipe)
    ends = model.declared_ends(recipe.model)
    chosen = recipe.eval.every and recipe.eval.keep_best and "/" not in recipe.eval.best
    notes = [CHOSEN] if chosen and not other else []
    if kept.exists() and not other:
        with kept.open(
            encoding="utf-8"
        ) as lines:  # str.splitlines ends one at U+2028 too, which a text may hold
            kept_rows = [json.loads(line) for line in lines]
        examples = [Example(**{**row, "trained": tuple(row["trained"])}) for row in kept_rows]
        return prepare.encode_held_out(examples, recipe.data, tokenizer, ends), notes
    notes += check_unchanged(load.fingerprints(recipe.data, held_out=True), folder, other)
    rows = prepare.held_out(recipe.data, tokenizer, recipe.train.seed, ends)
    if PartialState().is_main_process and not other:
        lines = [json.dumps(asdict(row.example), ensure_ascii=False) for row in rows]
        folder.write_text(run_folder.HELD_OUT, "".join(f"{line}\n" for line in lines))
    return rows, notes


def overridden(recipe: Recipe) -> bool:
    """Whether other data was asked for than the run's own."""
    return any(who == "override" and key.startswith("data.") for key, who in recipe.origin.set_by.items())


def others(folder: RunFolder, recipe: Recipe, result: dict[str, Any]) -> list[str]:
    """Why this is no evaluation of the run's own weights: its base is stored otherwise than while it trained,
    or, by the held-out loss, another one was named."""
    origin, now = recipe.origin.set_by, result["settings"]["storage"]
    own = differences.resolved(folder).get("speed.storage", ("", ""))[0].strip('"')
    if origin.get("speed.base") == "override" and now != own:
        return [f"the base is in {now}; the run's was in {own or 'what it does not say'}"]
    asked = any(who == "override" and key.startswith("model.") for key, who in origin.items())
    earlier = folder.found("eval.json")
    if overridden(recipe) or not asked or _same_base(earlier, result) is not False:
        return []
    losses = [one["base"]["loss"] for one in (result, earlier)]
    return ["the base is not the run's, by its held-out loss: {:.4f}, where it was {:.4f}".format(*losses)]


def _same_base(earlier: dict[str, Any], now: dict[str, Any]) -> bool | None:
    """Whether two evaluations are of one base, by its loss on as many held-out rows; None: not to be told."""
    losses = [one.get("base", {}).get("loss") for one in (earlier, now)]
    rows = [one.get("settings", {}).get("rows") for one in (earlier, now)]
    return None if None in losses or rows[0] != rows[1] else differences.near(*losses)


def _earlier(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """Tasks of an earlier evaluation on the same base that were not asked again. Of another base than the
    run's the name is not enough."""
    try:
        earlier = strict_json.scores(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
    was, same, strict = earlier.get("settings", {}), _same_base(earlier, now), path.name == OTHER
    keys = ("model", "storage") if strict else ("model",)
    alike = all(was.get(key) == now["settings"][key] for key in keys)
    if not alike or not (same if strict else same is not False):
        return {}
    gone = {*now["tasks"], results.GENERAL}  # the general text is asked each time, or not wanted
    return {name: task for name, task in earlier["tasks"].items() if name not in gone}


def general_texts(settings: Eval) -> list[str]:
    """The texts on which forgetting is measured: `eval.general`."""
    if settings.general is False:
        return []
    path = shipped.folder("examples") / "general" / "text.jsonl"
    name = str(path) if settings.general is True else settings.general
    rows = str(Path(name).absolute())  # a relative one would be looked up beside itself first
    source = tasks.Task(task=results.GENERAL, data=rows, kind="perplexity", prompt="{{ text }}")
    return [row["prompt"] for row in tasks.documents(source, name)]


def base_stands(tuned: Any) -> bool:
    """Whether the base is the tuned model with its adapter off; PEFT trains biases in place."""
    config = getattr(tuned, "peft_config", {}).get("default")
    return config is not None and getattr(config, "bias", "none") in (None, "none")


def check_unchanged(hashes: dict[str, str], folder: RunFolder, overridden: bool) -> list[str]:
    """Held-out rows must be those of the run; a changed file may mix them with rows that were trained on.

    Returns:
        A note on rows that the recipe of the run did not name.
    """
    recorded = folder.read("data_report.json")["train"]["sources"]
    other = [path for path, digest in hashes.items() if digest not in recorded.values()]
    if other and not overridden:
        fix = "put the file back as it was, or name another: data.validation=..."
        raise UserError(*(Problem("the data changed since the run", where=path, fix=fix) for path in other))
    return [f"{path} is not what the run held out" for path in other]


def setup_of(recipe: Recipe, section: Model | None = None) -> Setup:
    """How this machine opens what a run trained: the base stored as it was then, attention that takes masks
    and a cache."""
    setup = hardware.choose(
        attention=recipe.model.attention,
        base=recipe.speed.base,
        adapter_type=recipe.adapter.type,
        attends=attention_choice.read(model.read_config(section or recipe.model)),
    )
    return replace(setup, launch=replace(setup.launch, sharded=""))  # each process opens it whole


def storage_note(recipe: Recipe) -> list[str]:
    """A note where an fp8 base is opened without fp8 GEMMs."""
    value, reason = setup_of(recipe).storage
    return [f"the base is in {value}, {reason}"] if value == "fp8" and reason != "asked for" else []


def open_base(recipe: Recipe, name: str | None = None) -> PreTrainedModel:
    """The base of a recipe, loaded afresh as training loads it (`name`: other weights in the same way)."""
    section = (
        recipe.model
        if name is None
        else recipe.model.model_copy(update={"name": name, "revision": None, "add_tokens": []})
    )
    setup = setup_of(recipe, section)
    state, device = PartialState(cpu=setup.hardware.device == "cpu"), "auto"
    if not too_large(section, setup):
        device = str(state.device)
    elif state.num_processes > 1:
        what = "the base does not fit on one GPU"
        fix = "evaluate without a launcher: one process takes all GPUs"
        raise UserError(Problem(what, "model.name", found=section.name, fix=fix), code=Exit.ENVIRONMENT)
    disable_fsdp_ram_efficient_loading()  # with it, all processes but one would get empty weights
    unset_hf_deepspeed_config()  # with it, ZeRO-3 would split a model that no engine runs
    return qat.prepare(model.load(section, setup, device).eval(), recipe.speed.qat).eval()


def launch_of(run: RunFolder, overrides: list[str], machine: Hardware) -> Start:
    """The shipped config that shares the rows among all GPUs, none where one process needs them all."""
    recipe = run_folder.recipe_of(run, overrides)
    if too_large(recipe.model, setup_of(recipe)):
        reason = f"{machine.count} GPUs: none holds the base alone, so one process has all of them"
        return Start("", reason, 1)
    if recipe.eval.engine == "vllm" and recipe.eval.tasks:
        return Start("", "vLLM is one process", 1)
    reason = f"{machine.count} GPUs: each has the whole base and its share of the rows"
    return Start("ddp_8", reason, machine.count)


def too_large(section: Model, setup: Setup) -> bool:
    """Whether no single GPU of this machine holds the base, and several together may."""
    machine = setup.hardware
    if machine.device == "cpu" or machine.count < 2:
        return False
    base = plan_memory.weights(architecture.read(section), setup.storage.value, setup.launch.precision)
    return base / estimate.GIB > 0.85 * machine.memory_gib


def reopen(folder: RunFolder, recipe: Recipe) -> PreTrainedModel:
    """What was trained, cold from disk: the base as it was loaded, the adapter by plain PEFT.

    Raises:
        UserError: what was saved does not open (exit 4).
    """
    says = {"key": "", "where": str(folder.weights), "fix": "a copy of it, or train again"}
    refused = adapter_source.refusals("what was saved does not open", Exit.ARTEFACT, **says)
    if folder.weights == folder.model:
        with refused:
            return open_base(recipe, str(folder.model))
    from peft import PeftModel

    base: Any = open_base(recipe)
    with refused:
        tuned: Any = PeftModel.from_pretrained(base, str(folder.adapter))
    held = modules.tensors(folder.adapter)
    adapter_source.check_whole(tuned, list(held), str(folder.adapter))
    return qat.follow(tuned).eval()


def tokenizer_of(folder: RunFolder) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved with the weights."""
    return model.load_tokenizer(Model(name=str(folder.weights)))
