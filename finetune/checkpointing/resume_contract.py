"""Decide which settings a resumed run must keep, and which settings it may change."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune.autoconfig import loss_support
from finetune.autoconfig.compilation import GRAPHS
from finetune.autoconfig.machine_setup import Setup
from finetune.checkpointing.checkpoints import VerifiedCheckpoint
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.formatting import as_yaml, shortened
from finetune.core.visible_text import visible
from finetune.distributed import launch_environment
from finetune.recipe.schema import Speed
from finetune.run_folder import run_folder

# Keys of a recipe and facts that may change in a resumed run. A name that ends with a dot is a prefix.
MAY_CHANGE = (
    "data.expect",
    "eval.generate",
    "eval.apply_chat_template",
    "eval.batch_size",
    "eval.engine",
    "eval.forgetting",
    "eval.limit",
    "eval.max_new_tokens",
    "eval.min_loss_difference",
    "eval.min_score_difference",
    "eval.num_fewshot",
    "eval.samples",
    "eval.tasks",
    "hardware",
    "publish.",
    "train.dataloader_persistent_workers",
    "train.dataloader_pin_memory",
    "train.dataloader_prefetch_factor",
    "train.dataloader_timeout",
    "train.logging_first_step",
    "train.logging_steps",
    "train.project",
    "train.report_to",
    "train.run_name",
    "train.save_steps",
    "train.save_strategy",
    "train.save_total_limit",
    "train.skip_nonfinite",
    "train.stop_at_spike",
    "train.trackio_space_id",
    "versions.",
)
# Keys that are only a place or a name. The content behind them must match.
IGNORED = (
    "data.cache_dir",
    "data.max_example_bytes",
    "data.max_uncompressed_bytes",
    "data.chat_template",
    "data.name",
    "data.validation",
    "model.name",
    "model.revision",
    "train.output_dir",
)
TOKEN_IDS = ("data: token ids", "validation: token ids")
CONFIG = "config.json: "  # before the keys of the base model's config
SOURCE = "config of adapter.init_from: "  # before the keys of the saved adapter's config
METRIC_FILES = "task of eval.metric_for_best_model: "  # before the names of tasks
# Keys of `MAY_CHANGE` that may not change if this metric selects the weights or the last step
OF_EXACT_MATCH = ("eval.generate", "eval.max_new_tokens")
OF_TASK_METRIC = ("eval.apply_chat_template", "eval.engine", "eval.limit", "eval.num_fewshot")
# What checkpoints of earlier releases lack
NEW = ("data.template_date", "speed.fp8_experts", CONFIG, SOURCE, METRIC_FILES, *TOKEN_IDS)
ANEW = "or start a new run with another train.output_dir (adapter.init_from continues an adapter)"
SHOWN = 80  # largest number of characters of a value in the table


def contract(
    recipe: dict[str, Any],
    setup: Setup,
    counts: dict[str, Any],
    tokenizer: Any,
    content: list[Any],
) -> dict[str, Any]:
    """Return the contract of this run, its recipe's keys and facts, which a resumed run must match.

    Args:
        recipe: the sections of the recipe from `model_dump`.
        counts: the batch and the steps.
        content: digests that identify the data: sources in order with their weights, and validation examples.
    """
    hardware, launch = setup.hardware, setup.launch
    text = tokenizer.backend_tokenizer.to_str() + json.dumps(tokenizer.special_tokens_map, default=str)
    facts = {
        **counts,
        "data: content": _digest(json.dumps(content)),
        "tokenizer": _digest(text),
        "chat template": _digest(str(tokenizer.chat_template)),
        "processes": launch.processes,
        **({"weights split by": launch.sharded} if launch.sharded else {}),
        **({"moments split by": _zero()} if launch.splitter == "DeepSpeed" else {}),
        "precision": launch.precision,
        "device": hardware.device,
        "base model weights": setup.storage.value,
        "attention": setup.attention.value,
        "hardware": hardware.name,
        **{f"versions.{name}": installed for name, installed in run_folder.packages().items() if installed},
        "versions.python": platform.python_version(),
    }
    return {"recipe": keys(recipe), "facts": facts, "chosen": {}}


def _zero() -> str:
    """Return the version and the settings that decide how ZeRO shards the moments, and which Adam runs."""
    where = " with offload" if launch_environment.offloads_to("cpu") else ""
    return f"DeepSpeed {version('deepspeed')}, ZeRO-{launch_environment.zero_stage()}{where}"


def compare(
    saved: dict[str, Any], now: dict[str, Any], path: Path, ignored: tuple[str, ...] = IGNORED
) -> list[str]:
    """Compare this run with the contract of a checkpoint.

    Returns:
        A line for each difference that is allowed, to be printed.

    Raises:
        UserError: some differences are not allowed. The error lists all of them in a table (exit 4).
    """
    then, today = ({**one["recipe"], **one["facts"]} for one in (saved, now))
    unknown = [key for key in TOKEN_IDS if key in today and key not in then]
    if unknown and today.get("data.validation_fraction") is not None:
        raise UserError(
            Problem(
                "finetune can't verify the validation set, because an older version started the run",
                "data.validation_fraction",
                where=str(path),
                found="no hash",
                expected="a hash of the token ids of both sets in the checkpoint",
                fix=f"install that version ({_versions(then)}), {ANEW}",
                why="training examples could be in the validation set",
                code="resume-mismatch",
            ),
            code=Exit.ARTIFACT,
        )
    chosen = saved["chosen"]
    differing = [
        (key, then.get(key), today.get(key))
        for key in sorted(then.keys() | today.keys())
        # a recipe that states the value chosen by `auto` is the same recipe
        if then.get(key) != today.get(key) and not (key in chosen and chosen[key] == today.get(key))
        if not any(key.startswith(new) and not any(one.startswith(new) for one in then) for new in NEW)
    ]
    kept = _keys_of_metric(saved["recipe"])
    may_change = (*(key for key in MAY_CHANGE if key not in kept), *ignored)
    wrong = [row for row in differing if not _among(row[0], may_change) and not _moved(*row)]
    if wrong:
        changed = [(visible(key), _short(was), _short(value)) for key, was, value in wrong]
        rows = [("", "checkpoint", "now"), *changed]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows]
        what, (head, *table) = "the settings differ from those of the run to resume", lines
        settings = [_override(key, was) for key, was, _ in wrong if key in saved["recipe"] | now["recipe"]]
        same = (
            f"add {' '.join(settings)} to the command" if settings else "use the settings of the checkpoint"
        )
        if {key for key, *_ in wrong} <= {*TOKEN_IDS}:
            same = f"install the versions that wrote the checkpoint ({_versions(then)})"
        of_base = all(key.startswith(CONFIG) for key, *_ in wrong)
        raise UserError(
            Problem(
                what,
                where=str(path),
                found=head,
                why="the result would differ from a run without a stop",
                code="resume-mismatch",
                fix=_restore_base(then) if of_base else f"{same}, {ANEW}",
                more="\n".join(table),
            ),
            code=Exit.ARTIFACT,
        )
    return [
        *[
            f"{key}: finetune can't compare them, because an older version wrote the checkpoint"
            for key in unknown
        ],
        *[
            f"{key}: {_short(was)} in the checkpoint, now {_short(value)}{_remark(key)}"
            for key, was, value in differing
        ],
    ]


def _keys_of_metric(recipe: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys that define the metric which selects the weights or the last step of this recipe."""
    decides = recipe.get("eval.load_best_model_at_end") or recipe.get("eval.early_stopping_patience")
    if not decides or recipe.get("eval.eval_steps") is None:
        return ()
    metric = recipe.get("eval.metric_for_best_model", "")
    return OF_EXACT_MATCH if metric == "exact_match" else OF_TASK_METRIC if "/" in metric else ()


def _versions(facts: dict[str, Any]) -> str:
    names = ("finetune-toolkit", "tokenizers")
    return ", ".join(f"{name} {facts.get(f'versions.{name}', '(unknown)')}" for name in names)


def check_base(saved: dict[str, Any], fingerprint: str, path: Path, *, decomposed: bool) -> None:
    """Check that the frozen weights equal the weights of the checkpoint's run (exit 4).

    Args:
        decomposed: whether the adapter's initialization modified the base weights. The result depends on the
            number of CPU threads.
    """
    if saved["base"] != fingerprint:
        then, why = saved["recipe"].get("model.revision"), ""
        fix = _restore_base(saved["recipe"])
        if decomposed:
            why = "adapter.init_lora_weights changes the base model, and its result depends on the hardware"
            fix = f"use the earlier hardware and OMP_NUM_THREADS{f', or {fix}' if then else ''}"
        raise UserError(
            Problem(
                "the base model differs from that of the checkpoint",
                "model.name",
                where=str(path),
                found=f"hash {fingerprint}",
                expected=f"hash {saved['base']}",
                fix=fix,
                why=why,
                code="resume-mismatch",
            ),
            code=Exit.ARTIFACT,
        )


def _restore_base(recipe: dict[str, Any]) -> str:
    commit = recipe.get("model.revision")
    return f"model.revision={commit}" if commit else "restore the files of the base model"


def as_chosen(
    requested: Speed, checkpoint: VerifiedCheckpoint | None, hardware: str
) -> tuple[Speed, set[str]]:
    """Replace `auto` with the checkpoint's loss, activation checkpointing, offloading and CUDA graphs.

    A new choice would depend on the memory that is free today, or on this version of finetune. It could store
    gate and up of other layers in int8, or compute the loss with an fp8 GEMM, and thus change gradients.

    Args:
        hardware: this machine's name, as in `contract`. On other hardware, or if the recipe asks for another
            activation checkpointing or offloading, `auto` chooses again.

    Returns:
        The section, and its keys that come from the checkpoint.
    """
    if not checkpoint or checkpoint.contract["facts"].get("hardware") != hardware:
        return requested, set()
    chosen, chosen_values = checkpoint.contract["chosen"], dict[str, Any]()
    if requested.loss == "auto" and chosen.get("speed.loss") in loss_support.CHUNKED:
        chosen_values["loss"] = chosen["speed.loss"]
    now = {key: getattr(requested, key) for key in ("activation_checkpointing", "offload")}
    if any(checkpoint.contract["recipe"].get(f"speed.{key}") != value for key, value in now.items()):
        # each of the other choices depends on these two
        return requested.model_copy(update=chosen_values), set(chosen_values)
    auto = [key for key, value in now.items() if value == "auto"]
    chosen_values |= {key: chosen[f"speed.{key}"] for key in auto if f"speed.{key}" in chosen}
    if requested.compile in ("auto", True) and chosen.get("speed.compile") and "speed.graphs" in chosen:
        chosen_values["compile"] = GRAPHS[0] if chosen["speed.graphs"] == "on" else "default"
    return requested.model_copy(update=chosen_values), set(chosen_values)


def with_choices(contract: dict[str, Any], choices: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return a contract with the values that a run chose, by key."""
    chosen = {key: value for key, (value, _) in choices.items()}
    return {**contract, "chosen": json.loads(json.dumps(chosen, default=str))}


def chosen_anew(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each `auto` that chose another value than in the checkpoint's run."""
    then, today, recipe = saved["chosen"], now["chosen"], now["recipe"]
    both = sorted(then.keys() & today.keys() - set(IGNORED))
    return [
        f"{key}: auto chose {_short(then[key])} before and {_short(today[key])} now"
        f"{_consequence(key, then, today)}"
        for key in both
        if then[key] != today[key] and (saved["recipe"].get(key) == recipe.get(key))
    ]


def _consequence(key: str, then: dict[str, Any], today: dict[str, Any]) -> str:
    """Return the consequence of another choice by `auto`."""
    if key == "speed.offload":
        return "; the results are equal"
    if key == "speed.activation_checkpointing" and any(
        str(one[key]).startswith("mlp_int8") for one in (then, today)
    ):
        return "; other layers store gate and up in int8, which changes their gradients by about 1%"
    if key == "speed.loss" and "chunked_fp8" in (then[key], today[key]):
        return "; one of them computes a gradient in fp8, which changes gradients by about 3%"
    return "; results can differ by rounding"


def keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a recipe that have a value: dotted key -> value."""
    flat = {f"{s}.{key}": value for s, keys in recipe.items() for key, value in keys.items()}
    return json.loads(json.dumps({k: v for k, v in flat.items() if v is not None}, default=str))


def _remark(key: str) -> str:
    if key == "hardware" or key.startswith("versions."):
        return "; results can differ by rounding"
    return "; the content is equal" if key in IGNORED and key != "train.output_dir" else ""


def _among(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def _moved(key: str, then: object, now: object) -> bool:
    """Return whether only the offloading of activations differs. Offloading returns the same bits."""
    optimizer = [value in ("optimizer", "all") for value in (then, now)]
    return key == "speed.offload" and optimizer[0] == optimizer[1]


def _override(key: str, value: object) -> str:
    """Return the override that sets a key of the recipe, as it can be pasted."""
    return shlex.quote(f"{key}={as_yaml(value)}")


def _short(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False), SHOWN)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
