"""All adapter types by their name in a recipe, without importing torch or PEFT.

A type of PEFT that this file does not name takes PEFT's own keys and defaults. A type that needs more has an
entry in `_KNOWN`, and a function if its options depend on the model or the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, gcd, log, sqrt
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.core.formatting import WARNING
from finetune.recipe import upstream_options

if TYPE_CHECKING:
    from finetune.recipe.schema import Adapter, Recipe

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class AdapterType:
    """The keys, the defaults and the properties of an adapter type."""

    peft: str
    """PEFT's name of the type; the empty string: no adapter."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    """PEFT keys that define this type. A recipe can't set them."""
    decides: frozenset[str] = frozenset()
    """PEFT keys that the run decides, or that have no effect here."""
    own_defaults: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[dict[str, Any], int, Shapes, str], dict[str, Any]] | None = None
    """Makes PEFT's options from the recipe's options, the optimizer steps, the model's shapes and family."""
    builds: tuple[str, ...] = ()
    """PEFT keys that `build` may add."""
    learning_rate: tuple[float, float] | None = None
    """The usual range of peak learning rates. A rate outside gets a note or a warning, but is not changed."""
    storage: str = ""
    """The storage of the base model that the type implies: nf4 for the q-types."""
    prompt: bool = False
    """The type trains vectors before the prompt and changes no layer."""
    refused: str = ""
    """Why the type can't be used in supervised fine-tuning."""

    @property
    def sources(self) -> tuple[upstream_options.Source, ...]:
        return upstream_options.peft_config(upstream_options.peft_types()[self.peft]) if self.peft else ()

    @property
    def keys(self) -> frozenset[str]:
        """PEFT's keys that a recipe may set."""
        return (
            frozenset(upstream_options.fields(self.sources))
            - self.decides
            - set(self.sets)
            - _BY_RUN
            - _NO_EFFECT
        )

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults in a recipe. All linear layers are targets, unless the type has its own targets."""
        targeted = self.peft not in OWN_TARGETS and "target_modules" in upstream_options.fields(self.sources)
        return {**({"target_modules": "all-linear"} if targeted else {}), **self.own_defaults}


def adalora(options: dict[str, Any], steps: int, shapes: Shapes, family: str = "") -> dict[str, Any]:
    """Complete the options of AdaLoRA (arXiv 2303.10512) with a schedule for the run's steps.

    By default, AdaLoRA starts to remove ranks after a tenth of the steps. It reaches its budget when a third
    of the steps is left.
    """
    options = dict(options)
    options.setdefault("target_r", options.pop("r"))
    options.setdefault("init_r", ceil(1.5 * options["target_r"]))
    options.setdefault("tinit", steps // 10)
    options.setdefault("tfinal", steps // 3)
    if options["init_r"] <= options["target_r"]:
        raise UserError(
            Problem(
                "`init_r` is not larger than `target_r`",
                "adapter.init_r",
                found=f"init_r: {options['init_r']}, target_r: {options['target_r']}",
                expected="init_r > target_r",
                fix=f"init_r: {ceil(1.5 * options['target_r'])}",
                why="AdaLoRA starts with init_r and removes ranks",
                code="adapter-option",
            )
        )
    if steps < 2 or options["tinit"] + options["tfinal"] >= steps - 1:
        raise UserError(no_rank_steps(options["tinit"], options["tfinal"], steps))
    return {**options, "total_step": steps}


def no_rank_steps(begin: int, end: int, steps: int) -> Problem:
    """Return the problem of a schedule of AdaLoRA that leaves no step for the allocation of ranks."""
    remove = "remove `tinit` and `tfinal`: finetune then derives them from the number of steps"
    return Problem(
        "no step is left in which AdaLoRA could allocate ranks",
        "adapter.tinit",
        found=f"tinit {begin} + tfinal {end}, with {steps} steps",
        expected="tinit + tfinal < steps - 1",
        fix=remove if steps > 1 else "train.max_steps: 10",
        why="AdaLoRA allocates ranks after the first tinit and before the last tfinal steps",
        code="adapter-option",
    )


def in_few_steps(adapter: Adapter, steps: int) -> dict[str, Any]:
    """Return AdaLoRA's schedule for a run of a few steps, by dotted key.

    Only keys that the recipe sets for a whole run are returned.
    """
    if find(adapter.type).peft != "adalora":
        return {}
    stated = {key: value for key, value in adapter if key in adapter.model_fields_set and value is not None}
    few = {
        "tinit": steps // 10,
        "tfinal": steps // 3,
        "orth_reg_every": min(stated.get("orth_reg_every", 1), steps),
    }
    return {f"adapter.{key}": value for key, value in few.items() if key in stated}


def ia3(options: dict[str, Any], steps: int, shapes: Shapes, family: str = "") -> dict[str, Any]:
    """Complete the options of (IA)^3 (arXiv 2205.05638), which scales keys, values and feed-forward inputs.

    "all-linear" becomes a list of short names. PEFT would save full names, of which `feedforward_modules` is
    not a subset, and would then refuse to load its own adapter. The feed-forward modules are `down_proj` and
    PEFT's names for the family, such as `fc2` or `mlp.c_proj`.
    """
    options = dict(options)
    forward = {"down_proj", *upstream_options.peft_modules("IA3_FEEDFORWARD").get(family, ())}
    if options.get("target_modules") == "all-linear":
        containers = {part for name in shapes for part in name.split(".")[:-1]}
        options["target_modules"] = sorted({_distinct(name, forward, containers) for name in shapes})
    if isinstance(options.get("target_modules"), list):
        down = [
            name
            for name in options["target_modules"]
            if any(name == one or name.endswith(f".{one}") for one in forward)
        ]
        options.setdefault("feedforward_modules", down)
    elif isinstance(options.get("target_modules"), str):  # a regular expression: PEFT needs one here too
        ends = "|".join(re.escape(one) for one in sorted(forward))
        options.setdefault("feedforward_modules", rf"(.*\.)?({ends})")
    return options


def _distinct(name: str, forward: Collection[str], containers: Collection[str]) -> str:
    """Return the last part of a layer's name, or the last two parts if the last one matches other modules.

    For example, GPT-2 has `attn.c_proj` and `mlp.c_proj`. In CTRL, `0` is a layer of `ffn` and also a decoder
    layer.
    """
    parts = name.split(".")
    longer = {one.rpartition(".")[2] for one in forward if "." in one}
    return ".".join(parts[-2:] if parts[-1] in longer or parts[-1] in containers else parts[-1:])


def oft(options: dict[str, Any], steps: int, shapes: Shapes, family: str = "") -> dict[str, Any]:
    """Complete the options of OFT (arXiv 2306.07280). One of `r` and `oft_block_size` must be 0."""
    return {"oft_block_size": 0, **options} if options.get("r") else {"r": 0, **options}


def c3a(options: dict[str, Any], steps: int, shapes: Shapes, family: str = "") -> dict[str, Any]:
    """Complete the options of C3A (arXiv 2407.19342).

    The default block size is the largest one up to 256 that divides the width of every layer.
    """
    return {"block_size": _common_divisor(shapes, 256), **options}


def vblora(options: dict[str, Any], steps: int, shapes: Shapes, family: str = "") -> dict[str, Any]:
    """Complete the options of VB-LoRA (arXiv 2405.15179).

    The default vector length is the largest one up to 256 that divides the width of every layer.
    """
    return {"vector_length": _common_divisor(shapes, 256), **options}


def layer_kinds(peft: str) -> frozenset[str] | None:
    """Return the kinds of layers that a PEFT type changes, as in `module_names.KINDS`.

    Returns:
        The kinds; `None` if the type changes all layers with a weight.
    """
    if peft == "ln_tuning":
        return None
    linear = () if peft == "trainable_tokens" else ("Linear",)
    return frozenset(linear) | _LAYERS.get(peft, frozenset())


def own_targets(peft: str, family: str) -> Any:
    """Return the modules that PEFT chooses for a type and a model family; `None` if it has no choice."""
    return upstream_options.peft_modules(_OWN_TARGETS[peft]).get(family) if peft in _OWN_TARGETS else None


def find(name: str) -> AdapterType:
    return all_types()[name]


@cache
def all_types() -> dict[str, AdapterType]:
    """Return all types by their name in a recipe: first those of `_KNOWN`, then the others of PEFT."""
    installed = upstream_options.peft_types()
    known = {name: kind for name, kind in _KNOWN.items() if not kind.peft or kind.peft in installed}
    others = {name: AdapterType(name) for name in sorted(installed) if name not in known}
    return {**known, **others}


def base_storage(name: str, quantization: object) -> str:
    """Return the quantization of the base model that a recipe sets or its type implies, or the empty string.

    Args:
        name: `adapter.type`.
        quantization: `model.quantization`.
    """
    return quantization if isinstance(quantization, str) and quantization in QUANTIZED else find(name).storage


def unsupported_reason(name: str, storage: str) -> str:
    """Return why a type can't train on a base model in this storage; the empty string if it can."""
    if storage not in QUANTIZED:
        return ""
    kind = all_types()[name]
    if kind.peft in _NEEDS_THE_WEIGHTS or kind.peft in _NOT_ON.get(storage, ()):
        return f"PEFT's {name} can't compute with {storage} weights"
    if name == "full":
        return f"full fine-tuning can't train {storage} weights"
    return ""


def called(name: str, key: str) -> str:
    """Return a type's own name for a key of another type, or the empty string.

    For example, loha has `alpha` for `lora_alpha`, and vera has `vera_dropout` for `lora_dropout`.
    """
    own, (before, _, word) = all_types()[name], key.rpartition("_")
    if word not in ("alpha", "dropout") or (before and before not in upstream_options.peft_types()):
        return ""
    return next((one for one in (word, f"{own.peft}_{word}") if one in own.keys), "")


def advice(recipe: Recipe) -> list[str]:
    """Return notes and warnings about the adapter of a recipe. The recipe does not change."""
    name, options = recipe.adapter.type, recipe.adapter.options()
    is_overridden = recipe.origin.set_by.get("train.learning_rate") == "override"
    kind, set_for = all_types()[name], "" if is_overridden else recipe.origin.file_type
    said = _rate_advice(name, recipe.train.learning_rate, set_for)
    if kind.sets.get("use_dora") and options.get("lora_dropout"):
        said.append(
            "adapter.lora_dropout: PEFT's DoRA applies dropout also to the inputs of the base layer "
            "(peft 0.21.2, lora/dora.py). `lora_dropout: 0` is exact and faster"
        )
    return said


def _rate_advice(name: str, rate: float, set_for: str) -> list[str]:
    """Return notes and warnings about a peak learning rate.

    Args:
        set_for: the type in the file, if an override sets another type.
    """
    kind, own = all_types()[name], all_types().get(set_for)
    if kind.learning_rate is None or rate <= 0:
        return []
    low, high = kind.learning_rate
    usual = f"the usual range of {name} is {low:g} to {high:g}"
    if own and own.learning_rate and _times_apart(own.learning_rate, kind.learning_rate) >= FAR:
        scaled, _ = rate_for(name, set_for, rate)
        said = f"train.learning_rate: the recipe sets {rate:g} for {set_for}, and {usual}"
        return [f"{WARNING}{said}. Try train.learning_rate={scaled:g}"]
    if low <= rate <= high:
        return []
    if rate * FAR <= low or rate >= high * FAR:
        return [f"{WARNING}train.learning_rate: {usual}, and {rate:g} is {FAR} or more times outside of it"]
    return [f"train.learning_rate: {usual}, and {rate:g} is outside of it"]


def _times_apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the factor between the middles of two ranges of learning rates, rounded."""
    ratio = sqrt((one[0] * one[1]) / (other[0] * other[1]))
    return round(max(ratio, 1 / ratio), 6)


def unmerged(name: str, options: Mapping[str, Any]) -> str:
    """Return why PEFT can't merge a type with these options; the empty string if it can.

    BEFT trains biases, which can't be merged into layers without a bias.
    """
    kind = all_types().get(name)
    if kind and (kind.prompt or kind.peft in ("", "beft")):
        return "can't merge it" if kind.peft else "has nothing to merge"
    return "can't merge it into layers without a bias" if options.get("lora_bias") else ""


def rate_for(name: str, own: str, rate: float) -> tuple[float, str]:
    """Convert a peak learning rate for the type `own` to the type `name`. Return the rate and its source.

    The rate keeps its position in the usual range of the type, on a log scale.
    """
    here, there = all_types()[own].learning_rate, all_types()[name].learning_rate
    if here == there:
        return rate, "from the recipe"
    if here is None or there is None or rate <= 0:
        return rate, "from the recipe, not scaled: finetune knows no usual range"
    place = log(rate / here[0]) / log(here[1] / here[0])
    scaled = float(f"{there[0] * (there[1] / there[0]) ** place:.2g}")
    return scaled, f"from the recipe, scaled to the usual range of {there[0]:g} to {there[1]:g}"


def _common_divisor(shapes: Shapes, most: int) -> int:
    widths = gcd(*(width for shape in shapes.values() for width in shape))
    return max(size for size in range(1, most + 1) if widths % size == 0)


FAR = 10  # factor between learning rates from which a note becomes a warning
REBASING_INITS = ("pissa", "olora", "corda", "lora_ga")  # move a part of the base weights into the adapter
PREPARED_INITS = (*REBASING_INITS, "eva", "loftq")
CONFIGURED_INITS = ("eva", "corda", "lora_ga")  # have a key of their own, such as `eva_config`
QUANTIZED = ("fp8", "nf4", "fp4", "int8", "torchao_int8")
FOUR_BIT = ("nf4", "fp4")

_BY_RUN = frozenset({"task_type", "peft_type", "inference_mode"})
# Keys that have no effect on linear layers in training, or that need several adapters.
_NO_EFFECT = frozenset(
    [
        "megatron_config",
        "megatron_core",
        "fan_in_fan_out",
        "runtime_config",
        "use_qalora",
        "qalora_group_size",
        "arrow_config",
        "alora_invocation_tokens",
        "layer_replication",
        "loftq_config",
    ]
)
# Options of PEFT that finetune can't support, by PEFT's type, with the reason (peft 0.21.2).
UNSERVED = {
    "lora": {
        "kasa_config": "finetune does not add the two loss terms of KaSA, and PEFT does not either",
        "monteclora_config": "finetune does not add the loss term of MonteCLoRA, and PEFT does not either",
        "velora_config": "a checkpoint can't store the projection that VeLoRA computes in training",
    },
    "adamss": {"use_asa": "finetune does not update the masks of AdaMSS's adaptive allocation"},
    "pvera": {
        "generator_seed": "a separate random generator can't be restored by activation checkpointing or "
        "by a resumed run. Without this key, `train.seed` is the seed",
        "sample_at_inference": "each forward pass would give other outputs, so finetune could not verify "
        "the saved adapter",
    },
    "vblora": {"save_only_topk_weights": "the saved adapter would lack weights, so no run could resume"},
}
# PEFT's types whose forward breaks the graph of torch.compile.
BREAKING = frozenset({"frod", "loha", "lokr", "shira", "vblora", "waveft"})
# Types for which `quantization: auto` may choose fp8.
FAST_ON_FP8 = frozenset({"lora", "rslora", "dora", "adalora", "ia3"})
OWN_TARGETS = frozenset({"ia3", "ln_tuning", "trainable_tokens", "beft"})
# Types that change norms or rows of the embeddings instead of linear layers.
NOT_LINEAR = frozenset({"ln_tuning", "trainable_tokens"})
# The kinds of layers that a PEFT type changes in addition to nn.Linear (peft 0.21.2). A test tries each kind.
_LAYERS = {
    "lora": frozenset({"Conv1D", "Embedding", "Conv1d"}),
    "hira": frozenset({"Conv1D", "Embedding", "Conv1d"}),
    "tinylora": frozenset({"Conv1D", "Embedding"}),
    "oft": frozenset({"Embedding"}),
    "trainable_tokens": frozenset({"Embedding"}),
    "loha": frozenset({"Conv1d"}),
    "lokr": frozenset({"Conv1d"}),
    **dict.fromkeys(
        ("adalora", "deft", "fourierft", "frod", "gralora", "ia3", "pvera", "randlora", "unilora", "vblora",
         "vera", "waveft"),
        frozenset({"Conv1D"}),
    ),
}  # fmt: skip
# PEFT's names for the modules of a type that has targets of its own
_OWN_TARGETS = {"ia3": "IA3_TARGET", "ln_tuning": "LNTUNING_TARGET", "beft": "BEFT_TARGET"}
# Both lists come from sharding each type (peft 0.21.2, torch 2.13, accelerate 1.15).
# FSDP2 can't shard these types, because layers share parameters.
SHARES = frozenset({"vblora", "tinylora", "unilora"})
# FSDP2 can't send these types from rank 0 to the other processes, because they have buffers.
WITH_BUFFERS = frozenset(
    ["adamss", "delora", "frod", "glora", "pvera", "randlora", "supertuning", "tinylora", "vera"]
)
# Types that compute with quantized weights as if they were plain ones, or that fail. The lists come from
# training each type on each storage (peft 0.21.2, tests/integration/test_adapters_on_quantized_bases.py).
_NEEDS_THE_WEIGHTS = frozenset(
    ["adamss", "deft", "delora", "frod", "glora", "hra", "osf", "peanut", "psoft", "supertuning", "tinylora"]
)
_NOT_ON = {
    "fp8": frozenset({"hira", "shira"}),
    "nf4": frozenset({"loha", "lokr", "unilora"}),
    "fp4": frozenset({"loha", "lokr", "unilora"}),
    "int8": frozenset({"unilora"}),
    "torchao_int8": frozenset({"hira"}),
}
_LORA_RATES = (1e-5, 1e-2)
_LORA = AdapterType(
    "lora",
    decides=frozenset({"use_dora"}),
    own_defaults={"r": 16, "lora_alpha": 32},
    learning_rate=_LORA_RATES,
)
_DORA = replace(_LORA, sets={"use_dora": True}, decides=frozenset())
_ADALORA = AdapterType(
    "adalora",
    decides=frozenset(  # keys that AdaLoRA's config inherits from LoRA's but does not read
        [
            "use_dora",
            "total_step",
            "rank_pattern",
            "alpha_pattern",
            "use_rslora",
            "lora_bias",
            "use_bdlora",
            "target_parameters",
            "eva_config",
            "corda_config",
            "lora_ga_config",
            "velora_config",
            "monteclora_config",
            "kasa_config",
        ]
    ),
    own_defaults={"r": 16, "lora_alpha": 32},
    build=adalora,
    builds=("target_r", "init_r", "tinit", "tfinal"),
    learning_rate=(1e-4, 3e-2),
)
_PROMPT = AdapterType(
    "prompt_tuning",
    decides=frozenset({"token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers"}),
    own_defaults={"num_virtual_tokens": 20},
    learning_rate=(1e-3, 3e-1),
    prompt=True,
)
_NEEDS_TASKS = "it needs a task number for each example, which the data lacks"
_KNOWN = {
    "lora": _LORA,
    "rslora": replace(_LORA, sets={"use_rslora": True}),
    "dora": _DORA,
    "adalora": _ADALORA,
    "ia3": AdapterType("ia3", build=ia3, builds=("feedforward_modules",), learning_rate=(1e-3, 1e-1)),
    "qlora": replace(_LORA, storage="nf4"),
    "qdora": replace(_DORA, storage="nf4"),
    "qadalora": replace(_ADALORA, storage="nf4"),
    "full": AdapterType("", learning_rate=(1e-6, 1e-3)),
    "oft": AdapterType("oft", build=oft, builds=("r", "oft_block_size")),
    "c3a": AdapterType("c3a", build=c3a, builds=("block_size",)),
    "vblora": AdapterType("vblora", build=vblora, builds=("vector_length",)),
    "adaption_prompt": AdapterType("adaption_prompt", refused="TRL 1.16 can't compute its loss"),
    "frod": AdapterType("frod", own_defaults={"progressbar": False}),
    "prompt_tuning": _PROMPT,
    "p_tuning": replace(_PROMPT, peft="p_tuning"),
    "prefix_tuning": replace(_PROMPT, peft="prefix_tuning"),
    "cartridge": replace(_PROMPT, peft="cartridge"),
    "cpt": replace(_PROMPT, peft="cpt", refused="it needs a type for each token, which the data lacks"),
    "multitask_prompt_tuning": replace(_PROMPT, peft="multitask_prompt_tuning", refused=_NEEDS_TASKS),
    "poly": AdapterType("poly", refused=_NEEDS_TASKS),
    "lily": AdapterType(
        "lily", refused="each token's output depends on later tokens and other examples in PEFT"
    ),
    "xlora": AdapterType("xlora", refused="it mixes trained adapters and trains no new one"),
    "shadow": AdapterType("shadow", refused="PEFT 0.21's version does not run with transformers 5"),
}
