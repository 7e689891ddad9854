"""Find settings of a recipe that conflict with its adapter or have no effect, before anything is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune.core.errors import nearest
from finetune.core.pattern_time import Pattern
from finetune.recipe.adapter_types import (
    CONFIGURED_INITS,
    FAST_ON_FP8,
    FOUR_BIT,
    PREPARED_INITS,
    QUANTISED,
    REBASING_INITS,
    UNSERVED,
    all_types,
    obstacle,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from finetune.recipe.adapter_types import AdapterType
    from finetune.recipe.schema import Adapter, Eval, Speed

    Found = list[tuple[str, str, dict[str, str]]]  # dotted key, message, the other fields of the problem

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
HEAD_STAYS = "the new tokens' rows train in the embeddings, and those of the output head do not"
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
    base = quantization if quantization in QUANTISED else kind.storage
    if base and not found:
        quantized = str(name) if kind.storage else ""
        found += _on_fp8(adapter) if base == "fp8" else _coded(adapter, base, quantized)
    for key, why in UNSERVED.get(kind.peft, {}).items():
        if adapter.get(key) is not None and adapter[key] is not False:
            found.append((f"adapter.{key}", why, {"found": str(adapter[key]), "fix": "drop it"}))
    if kind.peft:
        found += _patterns(adapter)
        found += _init(str(name), kind, adapter, quantization, bool(model.get("add_tokens")))
        found += _tokens(str(name), kind, adapter, model.get("add_tokens"))
        found += _other_files(adapter, model.get("name"))
    if kind.sets.get("use_dora") and adapter.get("lora_bias"):
        what, fix = "PEFT's DoRA has no biases of its own", "drop it, or adapter.type: lora"
        found.append(("adapter.lora_bias", what, {"found": str(adapter["lora_bias"]), "fix": fix}))
    if kind.peft == "adalora":
        found += _schedule(adapter, train.get("max_steps"))
    found += _offload(kind, adapter, speed, train)
    if train.get("per_device_train_batch_size") == "auto":
        found += _searched(data, train)
    flat = [key for key in ("packing", "padding_free") if data.get(key)]
    if kind.prompt and flat:
        what = f"excludes adapter.type: {name}, which puts its vectors before every row"
        fix = ", ".join(f"{key}: false" for key in flat)
        found.append((f"data.{flat[0]}", what, {"found": "true", "fix": fix}))
    smoothing = train.get("label_smoothing_factor")
    if kind.peft in PROMPTS and smoothing:  # its vectors have logits but no labels
        what = f"excludes adapter.type: {name}: upstream wants a label for each of its vectors"
        found.append(("train.label_smoothing_factor", what, {"found": str(smoothing), "fix": "drop it"}))
    return found


def _other_files(adapter: Mapping[str, Any], model: Any) -> Found:
    """Refuse names in a recipe that would make PEFT open a pickle or another tokenizer."""
    found = []
    for key in ("corda_config", "lora_ga_config"):
        options = adapter.get(key)
        for file in ("cache_file", "covariance_file"):
            if isinstance(options, dict) and options.get(file) is not None:
                what = "names a pickle, which can run code when it is opened"
                found.append((f"adapter.{key}.{file}", what, {"found": str(options[file]), "fix": "drop it"}))
    if adapter.get("tokenizer_kwargs"):
        texts = {"found": str(adapter["tokenizer_kwargs"]), "fix": "drop it"}
        found.append(("adapter.tokenizer_kwargs", "finetune loads the tokenizer without options", texts))
    named = adapter.get("tokenizer_name_or_path")
    here = str(model).removeprefix("./")
    if named is not None and str(named).removeprefix("./") != here and not here.endswith(f"/{named}"):
        texts = {"found": str(named), "expected": str(model), "fix": f"tokenizer_name_or_path: {model}"}
        found.append(("adapter.tokenizer_name_or_path", "is not the model's tokenizer", texts))
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
            found.append((f"adapter.{key}", "has too many entries", texts))
    if found:
        return found
    for key, text, pattern in patterns(adapter):
        if not _SHORT.fullmatch(text):
            what, expected = "takes too long to compile", f"at most {_LONGEST:,} characters, all of ASCII"
            found.append((f"adapter.{key}", what, {"found": text[:200], "expected": expected}))
            continue
        try:
            re.compile(pattern.text)
        except (re.error, OverflowError, RecursionError) as error:
            names = re.findall(r"[^\W\d]\w*", text)
            fix = f"[{', '.join(names)}]" if key in _WHOLE else max(names, key=len, default="drop it")
            what = f"not a regular expression: {getattr(error, 'msg', error)}"
            found.append((f"adapter.{key}", what, {"found": text, "fix": fix}))
    return found


def _base(name: str, kind: AdapterType, base: Any) -> Found:
    if kind.storage and base not in (None, "auto", *FOUR_BIT):
        fix = f"drop model.quantization, or adapter.type: {name[1:]}"
        what = f"excludes adapter.type: {name}, which means a 4-bit base"
        return [("model.quantization", what, {"found": str(base), "fix": fix})]
    if isinstance(base, str) and obstacle(name, base):
        texts = {
            "found": f"{name} on {base}",
            "fix": "quantization: auto, or adapter.type: lora",
        }
        return [("model.quantization", obstacle(name, base), texts)]
    return []


def _searched(data: Mapping[str, Any], train: Mapping[str, Any]) -> Found:
    """Refuse `per_device_train_batch_size: auto` if the longest rows or the steps of a run are not known."""
    if train.get("dataloader_drop_last"):
        what = "with auto, how many rows the last batch of an epoch has is not known"
        return [("train.dataloader_drop_last", what, {"found": "true", "fix": "false, or a number of rows"})]
    if not data.get("streaming"):
        return []
    what = "auto tries the longest rows, and of streamed data these are not known"
    return [("train.per_device_train_batch_size", what, {"found": "auto", "fix": "a number, or null"})]


def _offload(
    kind: AdapterType, adapter: Mapping[str, Any], speed: Mapping[str, Any], train: Mapping[str, Any]
) -> Found:
    """Refuse offloading that does not fit activation checkpointing, the optimizer or the adapter type."""
    asked, optim = str(speed.get("offload")), train.get("optim", OFFLOADED[0])
    found: Found = []
    again = str(speed.get("activation_checkpointing"))
    if asked.startswith(("activations", "all")) and (
        again in ("none", "norms", "False") or again.startswith(("mlp:", "mlp_int8:"))
    ):
        what = "keeps in the CPU's memory what recomputed layers leave, and not all are recomputed"
        found.append(("speed.offload", what, {"found": asked, "fix": "speed.activation_checkpointing: auto"}))
    if asked not in ("optimizer", "all"):
        return found
    without = "activations" if asked == "all" else "none"
    if optim not in OFFLOADED:
        texts = {"found": str(optim), "expected": " or ".join(OFFLOADED)}
        found.append(("train.optim", f"speed.offload: {asked} is for torch's AdamW", texts))
    if adapter.get("loraplus_lr_ratio"):
        what = f"has an optimizer of its own, which excludes speed.offload: {asked}"
        found.append(("adapter.loraplus_lr_ratio", what, {"fix": f"speed.offload: {without}"}))
    if kind.peft == "adalora":
        what = "AdaLoRA masks ranks between steps, which weights that step on the CPU do not see"
        found.append(("speed.offload", what, {"found": asked, "fix": without}))
    return found


def against_fp8(adapter: Adapter, speed: Speed, evaluation: Eval) -> str:
    """Return why `model.quantization: auto` does not use fp8 in this recipe; the empty string if it may."""
    options = adapter.options()
    init = options.get("init_lora_weights")
    if adapter.type not in FAST_ON_FP8:
        return f"under {adapter.type} it is not known to pay"
    if isinstance(init, str) and init not in ("gaussian", "eva"):
        return f"init_lora_weights: {init} wants the weights themselves"
    if speed.qat:
        return "speed.qat rounds whole weights"
    if evaluation.tasks and evaluation.engine == "vllm":
        return "eval.engine: vllm serves the adapter on a base in bf16"
    if not all(_UNCODED.search(name) for name in options.get("modules_to_save") or ()):
        return "modules_to_save trains whole layers, which on the fp8 base may be codes"
    return "; ".join(f"{key} {what}" for key, what, _ in _on_fp8(options))


def _on_fp8(adapter: Mapping[str, Any]) -> Found:
    """Refuse options that read or train weights that an fp8 base model quantizes."""
    found: Found = []
    init = adapter.get("init_lora_weights")
    if init in ("orthogonal", "mica"):
        what = "takes the dtype of its first weights, or these themselves, from weights that are codes in fp8"
        texts = {"found": str(init), "fix": "true, or model.quantization: none"}
        found.append(("adapter.init_lora_weights", what, texts))
    if adapter.get("target_parameters"):
        what = "adds to weights themselves, which are codes in fp8"
        texts = {"fix": "drop it, or model.quantization: none"}
        found.append(("adapter.target_parameters", what, texts))
    return found + _coded(adapter, "fp8")


def _coded(adapter: Mapping[str, Any], base: str, quantized: str = "") -> Found:
    """Refuse names in `modules_to_save` that look like layers that the base model quantizes."""
    whole = adapter.get("modules_to_save")
    names = map(str, whole) if isinstance(whole, list) else ()
    return coded([name for name in names if _CODED.search(name)], base, quantized)


def coded(whole: list[str], base: str, quantized: str = "") -> Found:
    """Return the problem of training whole layers that the base model quantizes.

    Args:
        whole: the names of these layers.
        quantized: an adapter type that implies a quantized base model, such as qlora.
    """
    what = f"trains whole layers, which on the {base} base are codes"
    change = f"adapter.type: {quantized[1:]}" if quantized else "model.quantization: none"
    texts = {"found": ", ".join(whole), "fix": f"drop {', '.join(whole)}, or {change}"}
    return [("adapter.modules_to_save", what, texts)] if whole else []


def _init(name: str, kind: AdapterType, adapter: Mapping[str, Any], base: Any, added: bool) -> Found:
    """Check the spelling of `init_lora_weights`, and the settings that it can't be combined with."""
    key, init = "adapter.init_lora_weights", adapter.get("init_lora_weights")
    found: Found = [
        (f"adapter.{its}_config", f"has no effect without init_lora_weights: {its}", {"fix": "drop it"})
        for its in CONFIGURED_INITS
        if adapter.get(f"{its}_config") is not None and init != its
    ]
    if not isinstance(init, str):
        return found
    if not _INIT.fullmatch(init):
        texts = {
            "found": init,
            "expected": f"true, false, {', '.join(INITS)}",
            "fix": nearest(init.lower(), INITS),
        }
        return [*found, (key, "no such initialisation", texts)]
    if init.startswith(PREPARED_INITS) and kind.peft != "lora":
        texts = {"found": f"{init} with {name}", "fix": "true"}
        found.append((key, "is prepared for LoRA and DoRA only", texts))
    if init == "loftq" and not (kind.storage or base in FOUR_BIT):
        what = "makes good what a 4-bit base loses; this base is not stored in 4 bits"
        found.append((key, what, {"found": init, "fix": "adapter.type: qlora"}))
    if init == "eva" and adapter.get("rank_pattern"):
        found.append(("adapter.rank_pattern", "EVA chooses the ranks itself", {"fix": "drop one of the two"}))
    if init == "eva" and (added or adapter.get("trainable_token_indices")):
        what = "PEFT's EVA does not know rows of embeddings that train"
        found.append((key, what, {"found": init, "fix": "true"}))
    if init.startswith(REBASING_INITS):
        found += _rebasing(init, name, kind, adapter, base, added)
    return found


def _rebasing(
    init: str, name: str, kind: AdapterType, adapter: Mapping[str, Any], base: Any, added: bool
) -> Found:
    """Check an initialization that modifies the base weights.

    PEFT saves such an adapter as a difference of LoRAs and drops everything else that was trained.
    """
    key = "adapter.init_lora_weights"
    found: Found = []
    if kind.storage or base in QUANTISED:
        what = "takes its first weights out of the base's, which a quantised base can't give exactly"
        fix = f"adapter.type: {name[1:]}" if kind.storage else "model.quantization: auto"
        fix += ", or init_lora_weights: loftq" if kind.storage or base in FOUR_BIT else ""
        found.append((key, what, {"found": init, "fix": fix}))
    if kind.sets.get("use_dora"):
        what = "is saved as a difference of LoRAs, which DoRA's magnitudes don't allow"
        found.append((key, what, {"found": f"{init} with {name}", "fix": "adapter.type: lora"}))
    beside = [
        k for k in ("modules_to_save", "trainable_token_indices", "target_parameters") if adapter.get(k)
    ]
    beside += ["bias"] if adapter.get("bias") not in (None, "none") else []
    beside += ["model.add_tokens"] if added else []
    by_pattern = [k for k in ("rank_pattern", "alpha_pattern") if adapter.get(k)]
    beside += by_pattern if kind.sets.get("use_rslora") or adapter.get("use_rslora") else []
    if beside:
        what = "is saved as a difference of LoRAs, which has no place for what else trains"
        found.append((key, what, {"found": f"{init} with {', '.join(beside)}", "fix": "drop one of them"}))
    return found


def _tokens(name: str, kind: AdapterType, adapter: Mapping[str, Any], added: Any) -> Found:
    """Check that the embeddings of new tokens can train."""
    saved = adapter.get("modules_to_save")
    saved = saved if isinstance(saved, list) else []
    names = _last(saved)
    whole = sorted(names & {*EMBEDDINGS})
    if kind.peft in PROMPTS and names & {*EMBEDDINGS}:
        what = f"PEFT's {name} passes by embeddings that train, and they would stay as they are"
        return [("adapter.modules_to_save", what, {"found": str(saved), "fix": "adapter.type: lora"})]
    if added and whole and not (names & {*HEADS} or adapter.get("ensure_weight_tying")):
        fix = _with_both(saved, whole[0], "lm_head")  # tying does not help an untied head
        return [("adapter.modules_to_save", HEAD_STAYS, {"found": str(saved), "fix": fix})]
    if not added or whole or "trainable_token_indices" in kind.keys:
        return []
    both = ", ".join(dict.fromkeys([*map(str, saved), "embed_tokens", "lm_head"]))
    fixes = [] if kind.peft in PROMPTS else [f"adapter.modules_to_save: [{both}]"]
    fixes += ["adapter.type: lora"] if not (fixes and names & {*HEADS}) else []
    fix = ", or ".join(fixes)
    return [("model.add_tokens", f"{name} has no way to train them", {"found": str(added), "fix": fix})]


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
        what = "a head of its own has no part in rows of the embeddings that train"
        fix = both + (" without trainable_token_indices" if own else "")
    return [("adapter.modules_to_save", what, {"found": str(list(saved)), "fix": fix})] if what else []


def _schedule(adapter: Mapping[str, Any], steps: Any) -> Found:
    """Check AdaLoRA's schedule if the recipe sets the number of steps."""
    if type(steps) is not int:
        return []
    begin, end = adapter.get("tinit", steps // 10), adapter.get("tfinal", steps // 3)
    if type(begin) is int and type(end) is int and begin + end >= steps - 1:
        what, found = "no step is left in which AdaLoRA could allocate ranks", f"tinit {begin} + tfinal {end}"
        texts = {"found": f"{found}, with {steps} steps", "expected": "tinit + tfinal < steps - 1"}
        return [("adapter.tinit", what, texts)]
    every = adapter.get("orth_reg_every", 1)
    if type(every) is int and every > steps:
        what = "the orthogonality term would never be computed"
        return [("adapter.orth_reg_every", what, {"found": str(every), "expected": f"<= {steps}"})]
    return []
