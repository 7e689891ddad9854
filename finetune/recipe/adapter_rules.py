"""Find settings of a recipe that conflict with its adapter or have no effect, before anything is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune.core.formatting import as_yaml
from finetune.core.pattern_time import Pattern
from finetune.recipe.adapter_types import (
    CONFIGURED_INITS,
    FAST_ON_FP8,
    FOUR_BIT,
    NO_RANK_STEPS,
    PREPARED_INITS,
    QUANTIZED,
    REBASING_INITS,
    UNSERVED,
    all_types,
    no_rank_steps,
    unsupported_reason,
)
from finetune.recipe.renames import meant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from finetune.recipe.adapter_types import AdapterType
    from finetune.recipe.schema import Adapter, Eval, Speed

    Found = list[tuple[str, str, dict[str, str]]]  # dotted key, message, the other fields of the problem

OPTION, SPEED = "adapter-option", "speed-option"  # codes of problems
OFFLOADED = ("adamw_torch_fused", "adamw_torch")  # optimizers whose state can be offloaded to the CPU
INITS = ("gaussian", "orthogonal", "mica", *PREPARED_INITS)
_INIT = re.compile(rf"(pissa_niter_[0-9]+|{'|'.join(INITS)})")
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


def conflicts(raw: Mapping[str, Any]) -> Found:
    """Return the conflicts of a recipe as it was read. Values may have any type."""
    sections = {name: raw.get(name) for name in ("adapter", "speed", "data", "model", "train")}
    adapter, speed, data, model, train = (s if isinstance(s, dict) else {} for s in sections.values())
    name = adapter.get("type")
    kind = all_types().get(name) if isinstance(name, str) else None
    if kind is None or kind.refused:
        return []
    quantization = model.get("quantization")
    found = _base(str(name), kind, quantization)
    base = quantization if quantization in QUANTIZED else kind.storage
    if base and not found:
        quantized = str(name) if kind.storage else ""
        found += _on_fp8(adapter) if base == "fp8" else _coded(adapter, base, quantized)
    for key, why in UNSERVED.get(kind.peft, {}).items():
        if adapter.get(key) is not None and adapter[key] is not False:
            texts = {"found": as_yaml(adapter[key]), "fix": f"remove `{key}`", "why": why, "code": OPTION}
            found.append((f"adapter.{key}", f"finetune does not support this option of {name}", texts))
    if kind.peft:
        found += _patterns(adapter)
        found += _init(str(name), kind, adapter, quantization, bool(model.get("add_tokens")))
        found += _tokens(str(name), kind, adapter, model.get("add_tokens"))
        found += _other_files(adapter, model.get("name"))
    if kind.sets.get("use_dora") and adapter.get("lora_bias"):
        what, fix = "PEFT's DoRA does not support `lora_bias`", "remove `lora_bias`, or set `type: lora`"
        texts = {"found": as_yaml(adapter["lora_bias"]), "fix": fix, "code": OPTION}
        found.append(("adapter.lora_bias", what, texts))
    if kind.peft == "adalora":
        found += _schedule(adapter, train.get("max_steps"))
    found += _offload(kind, adapter, speed, train)
    if train.get("per_device_train_batch_size") == "auto":
        found += _searched(data, train)
    flat = [key for key in ("packing", "padding_free") if data.get(key)]
    if kind.prompt and flat:
        what, fix = f"{name} does not support this key", ", ".join(f"data.{key}: false" for key in flat)
        why = f"{name} adds its vectors before every example, but one sequence holds several examples"
        found.append((f"data.{flat[0]}", what, {"found": "true", "fix": fix, "why": why}))
    smoothing = train.get("label_smoothing_factor")
    if kind.peft in PROMPTS and smoothing:  # its vectors have logits but no labels
        what, why = f"{name} does not support label smoothing", f"the vectors of {name} have no labels"
        texts = {"found": as_yaml(smoothing), "fix": "label_smoothing_factor: 0", "why": why}
        found.append(("train.label_smoothing_factor", what, texts))
    return found


def _other_files(adapter: Mapping[str, Any], model: object) -> Found:
    """Refuse names in a recipe that would make PEFT open a pickle or another tokenizer."""
    found = []
    for key in ("corda_config", "lora_ga_config"):
        options = adapter.get(key)
        for file in ("cache_file", "covariance_file"):
            if isinstance(options, dict) and options.get(file) is not None:
                texts = {"found": as_yaml(options[file]), "fix": f"remove `{file}`", "code": "unsafe-file"}
                texts |= {"why": "a pickle can run code when PEFT opens it"}
                found.append((f"adapter.{key}.{file}", "finetune opens no pickle", texts))
    if adapter.get("tokenizer_kwargs"):
        texts = {"found": as_yaml(adapter["tokenizer_kwargs"]), "fix": "remove `tokenizer_kwargs`"}
        what = "finetune ignores this key, because it loads the tokenizer without options"
        found.append(("adapter.tokenizer_kwargs", what, {**texts, "code": OPTION}))
    named = adapter.get("tokenizer_name_or_path")
    here = str(model).removeprefix("./")
    if named is not None and str(named).removeprefix("./") != here and not here.endswith(f"/{named}"):
        texts = {"found": as_yaml(named), "expected": str(model), "fix": f"tokenizer_name_or_path: {model}"}
        what = "this tokenizer is not the model's tokenizer"
        found.append(("adapter.tokenizer_name_or_path", what, {**texts, "code": OPTION}))
    return found


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


def _patterns(adapter: Mapping[str, Any]) -> Found:
    """Refuse options that PEFT reads as regular expressions if they are invalid or slow to compile."""
    found: Found = []
    for key, most in _MOST.items():
        if isinstance(adapter.get(key), list | dict) and len(adapter[key]) > most:
            texts = {"found": f"{len(adapter[key]):,}", "expected": f"at most {most:,}"}
            found.append((f"adapter.{key}", "this key has too many entries", {**texts, "code": OPTION}))
    if found:
        return found
    for key, text, pattern in patterns(adapter):
        if not _SHORT.fullmatch(text):
            what = "this regular expression would take too long to compile"
            texts = {
                "found": text[:200],
                "expected": f"at most {_LONGEST:,} characters, only ASCII",
                "code": OPTION,
            }
            found.append((f"adapter.{key}", what, texts))
            continue
        try:
            re.compile(pattern.text)
        except (re.error, OverflowError, RecursionError) as error:
            names = re.findall(r"[^\W\d]\w*", text)
            fix = max(names, key=len, default=f"remove `{key}`")
            fix = f"{key}: [{', '.join(names)}]" if key in _WHOLE else fix
            texts = {"found": text, "fix": fix, "why": str(getattr(error, "msg", error)), "code": OPTION}
            found.append((f"adapter.{key}", "not a valid regular expression", texts))
    return found


def _base(name: str, kind: AdapterType, base: object) -> Found:
    if kind.storage and base not in (None, "auto", *FOUR_BIT):
        what, fix = f"{name} needs a 4-bit base model", f"quantization: nf4, or adapter.type: {name[1:]}"
        return [("model.quantization", what, {"found": as_yaml(base), "fix": fix})]
    if isinstance(base, str) and unsupported_reason(name, base):
        texts = {"found": f"{name} on {base}", "fix": "quantization: auto, or adapter.type: lora"}
        return [("model.quantization", unsupported_reason(name, base), texts)]
    return []


def _searched(data: Mapping[str, Any], train: Mapping[str, Any]) -> Found:
    """Refuse `per_device_train_batch_size: auto` if the longest rows or the steps of a run are not known."""
    if train.get("dataloader_drop_last"):
        what = "this key excludes `per_device_train_batch_size: auto`"
        texts = {
            "found": "true",
            "fix": "dataloader_drop_last: false",
            "why": "the size of the last batch of an epoch is not known before the search",
            "code": "batch-size",
        }
        return [("train.dataloader_drop_last", what, texts)]
    if not data.get("streaming"):
        return []
    what, fix = "`auto` excludes `data.streaming: true`", "per_device_train_batch_size: null"
    texts = {
        "found": "auto",
        "fix": fix,
        "why": "`auto` tries the longest examples, and a stream does not know them in advance",
        "code": "batch-size",
    }
    return [("train.per_device_train_batch_size", what, texts)]


def _offload(
    kind: AdapterType, adapter: Mapping[str, Any], speed: Mapping[str, Any], train: Mapping[str, Any]
) -> Found:
    """Refuse offloading that does not fit activation checkpointing, the optimizer or the adapter type."""
    offload, optim = str(speed.get("offload")), train.get("optim", OFFLOADED[0])
    found: Found = []
    again = str(speed.get("activation_checkpointing"))
    if offload.startswith(("activations", "all")) and (
        again in ("none", "norms", "False") or again.startswith(("mlp:", "mlp_int8:"))
    ):
        what = f"offloading of activations excludes `activation_checkpointing: {again}`"
        why = "finetune offloads the activations that recomputed layers keep, so it must recompute all layers"
        texts = {"found": offload, "fix": "speed.activation_checkpointing: auto", "why": why}
        found.append(("speed.offload", what, {**texts, "code": SPEED}))
    if offload not in ("optimizer", "all"):
        return found
    without = "activations" if offload == "all" else "none"
    if optim not in OFFLOADED:
        texts = {"found": as_yaml(optim), "expected": " or ".join(OFFLOADED), "fix": f"optim: {OFFLOADED[0]}"}
        found.append(("train.optim", f"`speed.offload: {offload}` supports only torch's AdamW", texts))
    if adapter.get("loraplus_lr_ratio"):
        what, why = f"LoRA+ excludes `speed.offload: {offload}`", "LoRA+ has its own optimizer"
        texts = {
            "found": as_yaml(adapter["loraplus_lr_ratio"]),
            "fix": f"speed.offload: {without}",
            "why": why,
        }
        found.append(("adapter.loraplus_lr_ratio", what, texts))
    if kind.peft == "adalora":
        what, why = "AdaLoRA excludes an offloaded optimizer", "AdaLoRA masks ranks on the GPU between steps"
        texts = {"found": offload, "fix": f"offload: {without}", "why": why, "code": SPEED}
        found.append(("speed.offload", what, texts))
    return found


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
    return "; ".join(what for _, what, _ in _on_fp8(options))


def _on_fp8(adapter: Mapping[str, Any]) -> Found:
    """Refuse options that read or train weights that an fp8 base model quantizes."""
    found: Found = []
    init = adapter.get("init_lora_weights")
    if init in ("orthogonal", "mica"):
        what = f"init_lora_weights: {init} excludes an fp8 base model"
        texts = {"found": as_yaml(init), "fix": "init_lora_weights: true, or model.quantization: none"}
        texts |= {"why": "it computes the adapter initialization from weights that fp8 quantizes"}
        found.append(("adapter.init_lora_weights", what, texts))
    return found + _coded(adapter, "fp8")


def _coded(adapter: Mapping[str, Any], base: str, quantized: str = "") -> Found:
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
        what = f"target_parameters names weights that the {base} base model quantizes"
        fix = f"remove {', '.join(lost)} from target_parameters, or set `model.quantization: none`"
        found.append(
            (
                "adapter.target_parameters",
                what,
                {"found": ", ".join(lost)[:200], "fix": fix, "why": "PEFT would add to quantized weights"},
            )
        )
    return found


def coded(whole: list[str], base: str, quantized: str = "") -> Found:
    """Return the problem of training whole layers that the base model quantizes.

    Args:
        whole: the names of these layers.
        quantized: an adapter type that implies a quantized base model, such as qlora.
    """
    what = f"modules_to_save names layers that the {base} base model quantizes"
    change = f"adapter.type: {quantized[1:]}" if quantized else "model.quantization: none"
    names = ", ".join(whole)
    texts = {"found": names, "fix": f"remove {names} from modules_to_save, or set `{change}`"}
    texts |= {"why": "quantized weights can't be trained"}
    return [("adapter.modules_to_save", what, texts)] if whole else []


def _init(name: str, kind: AdapterType, adapter: Mapping[str, Any], base: object, added: bool) -> Found:
    """Check the spelling of `init_lora_weights`, and the settings that it can't be combined with."""
    key, init = "adapter.init_lora_weights", adapter.get("init_lora_weights")
    found: Found = [
        (
            f"adapter.{its}_config",
            f"this key has no effect without `init_lora_weights: {its}`",
            {"fix": f"init_lora_weights: {its}", "code": OPTION},
        )
        for its in CONFIGURED_INITS
        if adapter.get(f"{its}_config") is not None and init != its
    ]
    if not isinstance(init, str):
        return found
    if not _INIT.fullmatch(init):
        near = meant("adapter.init_lora_weights", init, INITS)
        texts = {
            "found": init,
            "expected": "" if near else f"true, false, {', '.join(INITS)}",
            "fix": f"init_lora_weights: {near or 'true'}",
        }
        return [*found, (key, "unknown initialization", {**texts, "code": "value-choice"})]
    default, texts = "init_lora_weights: true", {"found": init, "code": OPTION}
    if init.startswith(PREPARED_INITS) and kind.peft != "lora":
        what = "this initialization supports only LoRA and DoRA"
        found.append((key, what, {**texts, "found": f"{init} with {name}", "fix": default}))
    if init == "loftq" and not (kind.storage or base in FOUR_BIT):
        what = "LoftQ needs a 4-bit base model"
        found.append(
            (
                key,
                what,
                {
                    **texts,
                    "fix": "adapter.type: qlora",
                    "why": "LoftQ corrects the error of 4-bit quantization",
                },
            )
        )
    if init == "eva" and adapter.get("rank_pattern"):
        what, why = "EVA excludes `rank_pattern`", "EVA chooses the rank of each layer itself"
        found.append(("adapter.rank_pattern", what, {"fix": "remove `rank_pattern`", "why": why}))
    if init == "eva" and (added or adapter.get("trainable_token_indices")):
        what = "PEFT's EVA can't train single tokens of the embeddings"
        found.append((key, what, {**texts, "fix": default}))
    if init.startswith(REBASING_INITS):
        found += _rebasing(init, name, kind, adapter, base, added)
    return found


def _rebasing(
    init: str, name: str, kind: AdapterType, adapter: Mapping[str, Any], base: object, added: bool
) -> Found:
    """Check an initialization that modifies the base weights.

    PEFT saves such an adapter as a difference of LoRAs and drops everything else that was trained.
    """
    key = "adapter.init_lora_weights"
    found: Found = []
    if kind.storage or base in QUANTIZED:
        what = f"{init} excludes a quantized base model"
        why = f"{init} moves a part of the base weights into the adapter, and quantized weights are not exact"
        fix = f"adapter.type: {name[1:]}" if kind.storage else "model.quantization: auto"
        fix += ", or init_lora_weights: loftq" if kind.storage or base in FOUR_BIT else ""
        found.append((key, what, {"found": init, "fix": fix, "why": why}))
    why = f"finetune saves {init} as the difference of two LoRA adapters"
    if kind.sets.get("use_dora"):
        what, fix = f"{init} excludes DoRA", "adapter.type: lora"
        found.append((key, what, {"found": f"{init} with {name}", "fix": fix, "why": why}))
    beside = [
        k for k in ("modules_to_save", "trainable_token_indices", "target_parameters") if adapter.get(k)
    ]
    beside += ["bias"] if adapter.get("bias") not in (None, "none") else []
    beside += ["model.add_tokens"] if added else []
    by_pattern = [k for k in ("rank_pattern", "alpha_pattern") if adapter.get(k)]
    beside += by_pattern if kind.sets.get("use_rslora") or adapter.get("use_rslora") else []
    if beside:
        what, fix = f"{init} excludes {', '.join(beside)}", "init_lora_weights: true"
        texts = {"found": f"{init} with {', '.join(beside)}", "fix": fix}
        found.append((key, what, {**texts, "why": f"{why}, and those hold nothing else"}))
    return found


def _tokens(name: str, kind: AdapterType, adapter: Mapping[str, Any], added: object) -> Found:
    """Check that the embeddings of new tokens can train."""
    saved = adapter.get("modules_to_save")
    saved = saved if isinstance(saved, list) else []
    names = _last(saved)
    whole = sorted(names & {*EMBEDDINGS})
    if kind.peft in PROMPTS and names & {*EMBEDDINGS}:
        what = f"PEFT's {name} can't train the embeddings"
        texts = {"found": as_yaml(saved), "fix": "adapter.type: lora"}
        texts["why"] = f"{name} reads the base model's own embeddings, not the copy that trains"
        return [("adapter.modules_to_save", what, texts)]
    if added and whole and not (names & {*HEADS} or adapter.get("ensure_weight_tying")):
        fix = _with_both(saved, whole[0], "lm_head")  # tying does not help an untied head
        texts = {"found": as_yaml(saved), "fix": f"modules_to_save: {fix}"}
        return [("adapter.modules_to_save", HEAD_STAYS, texts)]
    if not added or whole or "trainable_token_indices" in kind.keys:
        return []
    both = ", ".join(dict.fromkeys([*map(str, saved), "embed_tokens", "lm_head"]))
    fixes = [] if kind.peft in PROMPTS else [f"adapter.modules_to_save: [{both}]"]
    fixes += ["adapter.type: lora"] if not (fixes and names & {*HEADS}) else []
    texts = {"found": as_yaml(added)[:200], "fix": ", or ".join(fixes)}
    return [("model.add_tokens", f"{name} can't train the embeddings of new tokens", texts)]


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
) -> Found:
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
    texts = {"found": as_yaml(list(saved)), "fix": f"modules_to_save: {fix}"}
    return [("adapter.modules_to_save", what, texts)] if what else []


def _schedule(adapter: Mapping[str, Any], steps: object) -> Found:
    """Check AdaLoRA's schedule if the recipe sets the number of steps."""
    if type(steps) is not int:
        return []
    begin, end = adapter.get("tinit", steps // 10), adapter.get("tfinal", steps // 3)
    if type(begin) is int and type(end) is int and begin + end >= steps - 1:
        return [("adapter.tinit", NO_RANK_STEPS, no_rank_steps(begin, end, steps))]
    every = adapter.get("orth_reg_every", 1)
    if type(every) is int and every > steps:
        what = "AdaLoRA would never compute the orthogonality term"
        texts = {"found": as_yaml(every), "expected": f"at most {steps:,} steps", "fix": "orth_reg_every: 1"}
        texts |= {"why": f"the run has {steps} steps", "code": OPTION}
        return [("adapter.orth_reg_every", what, texts)]
    return []
