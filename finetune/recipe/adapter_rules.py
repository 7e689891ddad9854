"""Find settings of a recipe that conflict with its adapter or have no effect, before anything is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem
from finetune.core.formatting import as_yaml
from finetune.core.pattern_time import Pattern
from finetune.recipe.adapter_types import (
    CONFIGURED_INITS,
    FAST_ON_FP8,
    FOUR_BIT,
    PREPARED_INITS,
    QUANTIZED,
    REBASING_INITS,
    UNSERVED,
    all_types,
    base_storage,
    no_rank_steps,
    unsupported_reason,
)
from finetune.recipe.renames import meant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from finetune.recipe.adapter_types import AdapterType
    from finetune.recipe.schema import Adapter, Eval, Speed


OPTION, SPEED = "adapter-option", "speed-option"  # codes of problems
OFFLOADED = ("adamw_torch_fused", "adamw_torch")  # optimizers whose state can be offloaded to the CPU
INITS = ("gaussian", "orthogonal", "mica", *PREPARED_INITS)
# Each iteration of PiSSA takes as long as two GEMMs with the weight. PEFT's documentation uses 16
_INIT = re.compile(rf"(pissa_niter_[0-9]{{1,3}}|{'|'.join(INITS)})")
# Names of modules that a quantized base model quantizes, and of modules that it leaves as they are. For other
# names, the live model decides.
_CODED = re.compile(r"(proj|c_attn|c_fc|query_key_value|dense|fc\d|w\d)$")
_UNCODED = re.compile("embed|head|norm|wte")
# Options that are regular expressions, with the text that PEFT puts around them. Lists of the first three
# options hold plain names. See tuners/tuners_utils.py, utils/other.py, tuners/fourierft/model.py and
# tuners/c3a/model.py in peft 0.21.2.
_WHOLE = ("target_modules", "exclude_modules", "feedforward_modules")
_PATTERNS = {
    **dict.fromkeys(_WHOLE, "{}"),
    "modules_to_save": r"(^|.*\.){}($|\..*)",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
    "lambda_pattern": r"(.*\.)?({})$",
    "n_frequency_pattern": r".*\.{}$",
    "block_size_pattern": r".*\.{}$",
}
_MOST = {
    **dict.fromkeys((*_PATTERNS, "target_parameters"), 1000),
    "modules_to_save": 100,
    "layers_pattern": 100,
}
_LONGEST = 10_000
# Sets of characters beyond ASCII, such as [\0-\U0010ffff], take 10 ms each to compile
_SHORT = re.compile(rf"(?!.*\\[uUN])[\0-\x7f]{{0,{_LONGEST}}}", re.DOTALL)
# Names of embeddings and heads in transformers' models, for rules that see only the recipe.
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings", "tokens_embed", "w")
HEADS = ("lm_head", "embed_out", "head", "output_projection")
# PEFT copies a module that it trains as a whole. A head that was tied to it keeps the old weights.
HEAD_STAYS = "the new tokens would train in the embeddings but not in the output head"
# Types that put vectors before every row. Their encoder reads the base model's own embeddings, not the copy
# that PEFT trains.
PROMPTS = ("prompt_tuning", "p_tuning")


def conflicts(raw: Mapping[str, Any]) -> list[Problem]:
    """Return the conflicts of a recipe as it was read. Values may have any type."""
    sections = {name: raw.get(name) for name in ("adapter", "speed", "data", "model", "train")}
    adapter, speed, data, model, train = (s if isinstance(s, dict) else {} for s in sections.values())
    name = adapter.get("type")
    kind = all_types().get(name) if isinstance(name, str) else None
    if kind is None or kind.refused:
        return []
    quantization = model.get("quantization")
    found = _base(str(name), kind, quantization)
    base = base_storage(str(name), quantization)
    if base and not found:
        quantized = str(name) if kind.storage else ""
        found += _on_fp8(adapter) if base == "fp8" else _coded(adapter, base, quantized)
    for key, why in UNSERVED.get(kind.peft, {}).items():
        if adapter.get(key) is not None and adapter[key] is not False:
            found.append(
                Problem(
                    f"finetune does not support this option of {name}",
                    f"adapter.{key}",
                    found=as_yaml(adapter[key]),
                    fix=f"remove `{key}`",
                    why=why,
                    code=OPTION,
                )
            )
    if kind.peft:
        found += _patterns(adapter)
        found += _init(str(name), kind, adapter, quantization, bool(model.get("add_tokens")))
        found += _tokens(str(name), kind, adapter, model.get("add_tokens"))
        found += _other_files(adapter, model.get("name"))
    if kind.sets.get("use_dora") and adapter.get("lora_bias"):
        found.append(
            Problem(
                "PEFT's DoRA does not support `lora_bias`",
                "adapter.lora_bias",
                found=as_yaml(adapter["lora_bias"]),
                fix="remove `lora_bias`, or set `type: lora`",
                code=OPTION,
            )
        )
    if kind.peft == "adalora":
        found += _schedule(adapter, train.get("max_steps"))
    found += _offload(kind, adapter, speed, train)
    if train.get("per_device_train_batch_size") == "auto":
        found += _searched(data, train)
    flat = [key for key in ("packing", "padding_free") if data.get(key)]
    if kind.prompt and flat:
        found.append(
            Problem(
                f"{name} does not support this key",
                f"data.{flat[0]}",
                found="true",
                fix=", ".join(f"data.{key}: false" for key in flat),
                why=f"{name} adds its vectors before every example, but one sequence holds several examples",
                code="recipe-conflict",
            )
        )
    smoothing = train.get("label_smoothing_factor")
    if kind.peft in PROMPTS and smoothing:  # its vectors have logits but no labels
        found.append(
            Problem(
                f"{name} does not support label smoothing",
                "train.label_smoothing_factor",
                found=as_yaml(smoothing),
                fix="label_smoothing_factor: 0",
                why=f"the vectors of {name} have no labels",
                code="recipe-conflict",
            )
        )
    return found


def _other_files(adapter: Mapping[str, Any], model: object) -> Iterator[Problem]:
    """Refuse names in a recipe that would make PEFT open a pickle or another tokenizer."""
    for key in ("corda_config", "lora_ga_config"):
        options = adapter.get(key)
        for file in ("cache_file", "covariance_file"):
            if isinstance(options, dict) and options.get(file) is not None:
                yield Problem(
                    "finetune opens no pickle",
                    f"adapter.{key}.{file}",
                    found=as_yaml(options[file]),
                    fix=f"remove `{file}`",
                    why="a pickle can run code when PEFT opens it",
                    code="unsafe-file",
                )
    if adapter.get("tokenizer_kwargs"):
        yield Problem(
            "finetune ignores this key, because it loads the tokenizer without options",
            "adapter.tokenizer_kwargs",
            found=as_yaml(adapter["tokenizer_kwargs"]),
            fix="remove `tokenizer_kwargs`",
            code=OPTION,
        )
    named = adapter.get("tokenizer_name_or_path")
    here = str(model).removeprefix("./")
    if named is not None and str(named).removeprefix("./") != here and not here.endswith(f"/{named}"):
        yield Problem(
            "this tokenizer is not the model's tokenizer",
            "adapter.tokenizer_name_or_path",
            found=as_yaml(named),
            expected=str(model),
            fix=f"tokenizer_name_or_path: {model}",
            code=OPTION,
        )


def patterns(adapter: Mapping[str, Any]) -> list[tuple[str, str, Pattern]]:
    """Return the options that PEFT reads as regular expressions: option, text, and how PEFT matches it."""
    found = []
    for key, around in _PATTERNS.items():
        value, method = adapter.get(key), "fullmatch" if key in _WHOLE else "match"
        if isinstance(value, str):
            texts: Iterable[Any] = [value]
        else:
            texts = value if isinstance(value, list | set | dict) and key not in _WHOLE else ()
        found += [
            (key, text, Pattern(method, around.replace("{}", text)))
            for text in texts
            if isinstance(text, str)
        ]
    return found


def _patterns(adapter: Mapping[str, Any]) -> list[Problem]:
    """Refuse options that PEFT reads as regular expressions if they are invalid or slow to compile."""
    found: list[Problem] = []
    for key, most in _MOST.items():
        if isinstance(adapter.get(key), list | dict) and len(adapter[key]) > most:
            found.append(
                Problem(
                    "this key has too many entries",
                    f"adapter.{key}",
                    found=f"{len(adapter[key]):,}",
                    expected=f"at most {most:,}",
                    code=OPTION,
                )
            )
    if found:
        return found
    for key, text, pattern in patterns(adapter):
        if not _SHORT.fullmatch(text):
            found.append(
                Problem(
                    "this regular expression would take too long to compile",
                    f"adapter.{key}",
                    found=text[:200],
                    expected=f"at most {_LONGEST:,} characters, only ASCII",
                    code=OPTION,
                )
            )
            continue
        try:
            re.compile(pattern.text)
        except (re.error, OverflowError, RecursionError) as error:
            names = re.findall(r"[^\W\d]\w*", text)
            fix = max(names, key=len, default=f"remove `{key}`")
            found.append(
                Problem(
                    "not a valid regular expression",
                    f"adapter.{key}",
                    found=text,
                    fix=f"{key}: [{', '.join(names)}]" if key in _WHOLE else fix,
                    why=str(getattr(error, "msg", error)),
                    code=OPTION,
                )
            )
    return found


def _base(name: str, kind: AdapterType, base: object) -> list[Problem]:
    if kind.storage and base not in (None, "auto", *FOUR_BIT):
        return [
            Problem(
                f"{name} needs a 4-bit base model",
                "model.quantization",
                found=as_yaml(base),
                fix=f"quantization: nf4, or adapter.type: {name[1:]}",
                code="recipe-conflict",
            )
        ]
    if isinstance(base, str) and unsupported_reason(name, base):
        return [
            Problem(
                unsupported_reason(name, base),
                "model.quantization",
                found=f"{name} on {base}",
                fix="quantization: auto, or adapter.type: lora",
                code="recipe-conflict",
            )
        ]
    return []


def _searched(data: Mapping[str, Any], train: Mapping[str, Any]) -> list[Problem]:
    """Refuse `per_device_train_batch_size: auto` if the longest rows or the steps of a run are not known."""
    if train.get("dataloader_drop_last"):
        return [
            Problem(
                "this key excludes `per_device_train_batch_size: auto`",
                "train.dataloader_drop_last",
                found="true",
                fix="dataloader_drop_last: false",
                why="the size of the last batch of an epoch is not known before the search",
                code="batch-size",
            )
        ]
    if not data.get("streaming"):
        return []
    return [
        Problem(
            "`auto` excludes `data.streaming: true`",
            "train.per_device_train_batch_size",
            found="auto",
            fix="per_device_train_batch_size: null",
            why="`auto` tries the longest examples, and a stream does not know them in advance",
            code="batch-size",
        )
    ]


def _offload(
    kind: AdapterType, adapter: Mapping[str, Any], speed: Mapping[str, Any], train: Mapping[str, Any]
) -> Iterator[Problem]:
    """Refuse offloading that does not fit activation checkpointing, the optimizer or the adapter type."""
    offload, optim = str(speed.get("offload")), train.get("optim", OFFLOADED[0])
    again = str(speed.get("activation_checkpointing"))
    if offload.startswith(("activations", "all")) and (
        again in ("none", "norms", "False") or again.startswith(("mlp:", "mlp_int8:"))
    ):
        yield Problem(
            f"offloading of activations excludes `activation_checkpointing: {again}`",
            "speed.offload",
            found=offload,
            fix="speed.activation_checkpointing: auto",
            why=(
                "finetune offloads the activations that recomputed layers keep, so it must "
                "recompute all layers"
            ),
            code=SPEED,
        )
    if offload not in ("optimizer", "all"):
        return
    without = "activations" if offload == "all" else "none"
    if optim not in OFFLOADED:
        yield Problem(
            f"`speed.offload: {offload}` supports only torch's AdamW",
            "train.optim",
            found=as_yaml(optim),
            expected=" or ".join(OFFLOADED),
            fix=f"optim: {OFFLOADED[0]}",
            code="recipe-conflict",
        )
    if adapter.get("loraplus_lr_ratio"):
        yield Problem(
            f"LoRA+ excludes `speed.offload: {offload}`",
            "adapter.loraplus_lr_ratio",
            found=as_yaml(adapter["loraplus_lr_ratio"]),
            fix=f"speed.offload: {without}",
            why="LoRA+ has its own optimizer",
            code="recipe-conflict",
        )
    if kind.peft == "adalora":
        yield Problem(
            "AdaLoRA excludes an offloaded optimizer",
            "speed.offload",
            found=offload,
            fix=f"offload: {without}",
            why="AdaLoRA masks ranks on the GPU between steps",
            code=SPEED,
        )


def against_fp8(adapter: Adapter, speed: Speed, evaluation: Eval) -> str:
    """Return why `model.quantization: auto` does not use fp8 in this recipe; the empty string if it may."""
    options = adapter.options()
    init = options.get("init_lora_weights")
    if adapter.type not in FAST_ON_FP8:
        return f"fp8 is not known to be faster with {adapter.type}"
    if isinstance(init, str) and init not in ("gaussian", "eva"):
        return f"init_lora_weights: {init} reads weights that are not quantized"
    if speed.qat:
        return "speed.qat rounds weights that are not quantized"
    if evaluation.tasks and evaluation.engine == "vllm":
        return "eval.engine: vllm runs the adapter on a bf16 base model"
    if not all(_UNCODED.search(name) for name in options.get("modules_to_save") or ()):
        return "modules_to_save trains layers that an fp8 base model may quantize"
    return "; ".join(problem.what for problem in _on_fp8(options))


def _on_fp8(adapter: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse options that read or train weights that an fp8 base model quantizes."""
    init = adapter.get("init_lora_weights")
    if init in ("orthogonal", "mica"):
        yield Problem(
            f"init_lora_weights: {init} excludes an fp8 base model",
            "adapter.init_lora_weights",
            found=as_yaml(init),
            fix="init_lora_weights: true, or model.quantization: none",
            why="it computes the adapter initialization from weights that fp8 quantizes",
            code="recipe-conflict",
        )
    yield from _coded(adapter, "fp8")


def _coded(adapter: Mapping[str, Any], base: str, quantized: str = "") -> list[Problem]:
    """Refuse names of layers that the base model quantizes, in `modules_to_save` and `target_parameters`.

    Routers are no linear layers, so no base model quantizes them. Quantized stacks of experts take adapters.
    """
    whole, parameters = adapter.get("modules_to_save"), adapter.get("target_parameters")
    names = map(str, whole) if isinstance(whole, list) else ()
    found = coded([name for name in names if _CODED.search(name)], base, quantized)
    weights = map(str, parameters) if isinstance(parameters, list) else ()
    linear = (one for one in weights if one.endswith(".weight"))
    lost = [one for one in linear if _CODED.search(one.removesuffix(".weight"))]
    if lost:
        found.append(
            Problem(
                f"target_parameters names weights that the {base} base model quantizes",
                "adapter.target_parameters",
                found=", ".join(lost)[:200],
                fix=f"remove {', '.join(lost)} from target_parameters, or set `model.quantization: none`",
                why="PEFT would add to quantized weights",
                code="recipe-conflict",
            )
        )
    return found


def coded(whole: list[str], base: str, quantized: str = "") -> list[Problem]:
    """Return the problem of training whole layers that the base model quantizes.

    Args:
        whole: the names of these layers.
        quantized: an adapter type that implies a quantized base model, such as qlora.
    """
    if not whole:
        return []
    change = f"adapter.type: {quantized[1:]}" if quantized else "model.quantization: none"
    names = ", ".join(whole)
    return [
        Problem(
            f"modules_to_save names layers that the {base} base model quantizes",
            "adapter.modules_to_save",
            found=names,
            fix=f"remove {names} from modules_to_save, or set `{change}`",
            why="quantized weights can't be trained",
            code="recipe-conflict",
        )
    ]


def _init(
    name: str, kind: AdapterType, adapter: Mapping[str, Any], base: object, added: bool
) -> list[Problem]:
    """Check the spelling of `init_lora_weights`, and the settings that it can't be combined with."""
    key, init = "adapter.init_lora_weights", adapter.get("init_lora_weights")
    found: list[Problem] = [
        Problem(
            f"this key has no effect without `init_lora_weights: {its}`",
            f"adapter.{its}_config",
            fix=f"init_lora_weights: {its}",
            code=OPTION,
        )
        for its in CONFIGURED_INITS
        if adapter.get(f"{its}_config") is not None and init != its
    ]
    if not isinstance(init, str):
        return found
    if not _INIT.fullmatch(init):
        near = meant("adapter.init_lora_weights", init, INITS)
        return [
            *found,
            Problem(
                "unknown initialization",
                key,
                found=init,
                expected="" if near else f"true, false, {', '.join(INITS)}",
                fix=f"init_lora_weights: {near or 'true'}",
                code="value-choice",
            ),
        ]
    default = "init_lora_weights: true"
    if init.startswith(PREPARED_INITS) and kind.peft != "lora":
        found.append(
            Problem(
                "this initialization supports only LoRA and DoRA",
                key,
                found=f"{init} with {name}",
                fix=default,
                code=OPTION,
            )
        )
    if init == "loftq" and not (kind.storage or base in FOUR_BIT):
        found.append(
            Problem(
                "LoftQ needs a 4-bit base model",
                key,
                found=init,
                fix="adapter.type: qlora",
                why="LoftQ corrects the error of 4-bit quantization",
                code=OPTION,
            )
        )
    if init == "eva" and adapter.get("rank_pattern"):
        found.append(
            Problem(
                "EVA excludes `rank_pattern`",
                "adapter.rank_pattern",
                fix="remove `rank_pattern`",
                why="EVA chooses the rank of each layer itself",
                code="recipe-conflict",
            )
        )
    if init == "eva" and (added or adapter.get("trainable_token_indices")):
        found.append(
            Problem(
                "PEFT's EVA can't train single tokens of the embeddings",
                key,
                found=init,
                fix=default,
                code=OPTION,
            )
        )
    if init.startswith(REBASING_INITS):
        found += _rebasing(init, name, kind, adapter, base, added)
    return found


def _rebasing(
    init: str, name: str, kind: AdapterType, adapter: Mapping[str, Any], base: object, added: bool
) -> Iterator[Problem]:
    """Check an initialization that modifies the base weights.

    PEFT saves such an adapter as a difference of LoRAs and drops everything else that was trained.
    """
    key = "adapter.init_lora_weights"
    if kind.storage or base in QUANTIZED:
        fix = f"adapter.type: {name[1:]}" if kind.storage else "model.quantization: auto"
        fix += ", or init_lora_weights: loftq" if kind.storage or base in FOUR_BIT else ""
        yield Problem(
            f"{init} excludes a quantized base model",
            key,
            found=init,
            fix=fix,
            why=(
                f"{init} moves a part of the base weights into the adapter, and quantized "
                "weights are not exact"
            ),
            code="recipe-conflict",
        )
    why = f"finetune saves {init} as the difference of two LoRA adapters"
    if kind.sets.get("use_dora"):
        yield Problem(
            f"{init} excludes DoRA",
            key,
            found=f"{init} with {name}",
            fix="adapter.type: lora",
            why=why,
            code="recipe-conflict",
        )
    beside = [
        k for k in ("modules_to_save", "trainable_token_indices", "target_parameters") if adapter.get(k)
    ]
    beside += ["bias"] if adapter.get("bias") not in (None, "none") else []
    beside += ["model.add_tokens"] if added else []
    by_pattern = [k for k in ("rank_pattern", "alpha_pattern") if adapter.get(k)]
    beside += by_pattern if kind.sets.get("use_rslora") or adapter.get("use_rslora") else []
    if beside:
        yield Problem(
            f"{init} excludes {', '.join(beside)}",
            key,
            found=f"{init} with {', '.join(beside)}",
            fix="init_lora_weights: true",
            why=f"{why}, and those hold nothing else",
            code="recipe-conflict",
        )


def _tokens(name: str, kind: AdapterType, adapter: Mapping[str, Any], added: object) -> list[Problem]:
    """Check that the embeddings of new tokens can train."""
    saved = adapter.get("modules_to_save")
    saved = saved if isinstance(saved, list) else []
    names = _last(saved)
    whole = sorted(names & {*EMBEDDINGS})
    if kind.peft in PROMPTS and names & {*EMBEDDINGS}:
        return [
            Problem(
                f"PEFT's {name} can't train the embeddings",
                "adapter.modules_to_save",
                found=as_yaml(saved),
                fix="adapter.type: lora",
                why=f"{name} reads the base model's own embeddings, not the copy that trains",
                code="recipe-conflict",
            )
        ]
    if added and whole and not (names & {*HEADS} or adapter.get("ensure_weight_tying")):
        fix = _with_both(saved, whole[0], "lm_head")  # tying does not help an untied head
        return [
            Problem(
                HEAD_STAYS,
                "adapter.modules_to_save",
                found=as_yaml(saved),
                fix=f"modules_to_save: {fix}",
                code="recipe-conflict",
            )
        ]
    if not added or whole or "trainable_token_indices" in kind.keys:
        return []
    both = ", ".join(dict.fromkeys([*map(str, saved), "embed_tokens", "lm_head"]))
    fixes = [] if kind.peft in PROMPTS else [f"adapter.modules_to_save: [{both}]"]
    fixes += ["adapter.type: lora"] if not (fixes and names & {*HEADS}) else []
    return [
        Problem(
            f"{name} can't train the embeddings of new tokens",
            "model.add_tokens",
            found=as_yaml(added)[:200],
            fix=", or ".join(fixes),
            code="recipe-conflict",
        )
    ]


def _last(names: Iterable[Any]) -> set[str]:
    """`model.embed_tokens` -> `embed_tokens`."""
    return {str(name).rpartition(".")[2] for name in names}


def _with_both(saved: Iterable[Any], embedding: str, head: str) -> str:
    """Return `modules_to_save` with the embeddings and the head."""
    others = [str(one) for one in saved if not _last([one]) & {embedding, head}]
    return f"[{', '.join([embedding, head, *others])}]"


def rows_beside(
    options: Mapping[str, Any],
    tied: bool,
    added: bool,
    embedding: str = "embed_tokens",
    head: str = "lm_head",
) -> list[Problem]:
    """Check that single rows of the embeddings can train with these `modules_to_save`.

    They can't if the embeddings or a tied head train as a whole module without the other.

    Args:
        options: PEFT's options, from the recipe or from an adapter's config.
        tied: whether the base model's head shares the weights of the embeddings.
        added: whether tokens are added to the base model.
        embedding: the last part of the name of the embeddings.
        head: the last part of the name of the output head.
    """
    saved, own = options.get("modules_to_save") or (), options.get("trainable_token_indices")
    whole, what, fix = _last(saved), "", ""
    both = _with_both(saved, embedding, head)
    if added and embedding in whole:
        if head not in whole and not (tied and options.get("ensure_weight_tying")):
            what, fix = HEAD_STAYS, both
    elif tied and head in whole and (added or own):
        what = "the new tokens would train in the embeddings but not in the separate copy of the tied head"
        fix = both + (", and remove `trainable_token_indices`" if own else "")
    if not what:
        return []
    return [
        Problem(
            what,
            "adapter.modules_to_save",
            found=as_yaml(list(saved)),
            fix=f"modules_to_save: {fix}",
            code="recipe-conflict",
        )
    ]


def _schedule(adapter: Mapping[str, Any], steps: object) -> list[Problem]:
    """Check AdaLoRA's schedule if the recipe sets the number of steps."""
    if type(steps) is not int:
        return []
    begin, end = adapter.get("tinit", steps // 10), adapter.get("tfinal", steps // 3)
    if type(begin) is int and type(end) is int and begin + end >= steps - 1:
        return [no_rank_steps(begin, end, steps)]
    every = adapter.get("orth_reg_every", 1)
    if type(every) is int and every > steps:
        return [
            Problem(
                "AdaLoRA would never compute the orthogonality term",
                "adapter.orth_reg_every",
                found=as_yaml(every),
                expected=f"at most {steps:,} steps",
                fix="orth_reg_every: 1",
                why=f"the run has {steps} steps",
                code=OPTION,
            )
        ]
    return []
