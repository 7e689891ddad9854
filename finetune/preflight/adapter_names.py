"""Check a recipe's adapter against the names of a model's modules."""

from __future__ import annotations

from finetune.adapters import continue_from, expert_targets, name_problems
from finetune.autoconfig import fp8_support
from finetune.core.errors import Problem
from finetune.core.model_config import ModelConfig
from finetune.distributed import launch_environment
from finetune.kernels import kernel_limits
from finetune.models import module_names, tokenizer_setup
from finetune.models.module_names import Names
from finetune.recipe import adapter_rules, adapter_types
from finetune.recipe.schema import Recipe

ONLY_LINEAR = ("fp8", "torchao_int8")  # bitsandbytes stores GPT-2's Conv1D layers too


def check_names(recipe: Recipe, names: Names, config: ModelConfig) -> list[Problem]:
    """Return the problems of a recipe's adapter with the names of a model's modules.

    An adapter to continue from has the names of the model that it was trained on.
    """
    kind, options = adapter_types.find(recipe.adapter.type), recipe.adapter.options()
    if recipe.adapter.source:
        found = continue_from.slow_patterns(recipe.adapter, names)
        return found + continue_from.check_layout(recipe.adapter, names)
    if not kind.peft:
        return []
    added = tokenizer_setup.read_added_tokens(recipe.model)
    if added is None:  # only the run knows the ids of the new tokens
        options = {key: value for key, value in options.items() if key != "trainable_token_indices"}
    elif added:
        names = names.with_rows(max(added) + 1)
    found = name_problems.check_options({**options, **kind.sets}, names, kind.peft)
    stored = check_storage(recipe.model.quantization, names, config, recipe.adapter.type)
    return (
        found
        + check_noise(recipe, names)
        + check_trainable_token_rows(recipe, names)
        + check_sharded_experts(recipe, names)
        + (stored or check_quantized_experts(recipe, names, config))
        + check_fp8_experts(recipe, names, config)
    )


def check_noise(recipe: Recipe, names: Names) -> list[Problem]:
    """Return the problem of NEFTune with virtual tokens, if transformers does not find the embeddings.

    It reads them from `base_model.model` (transformers 5.22, integrations/neftune.py). With virtual tokens,
    this is an attribute of the base model, which only some families have.
    """
    noise = recipe.train.passed_on().get("neftune_noise_alpha")
    virtual = adapter_types.find(recipe.adapter.type).prompt
    if not noise or not virtual or names.embedding.startswith("model."):
        return []
    return [
        Problem(
            f"NEFTune does not train with {recipe.adapter.type} on {names.family}",
            "train.neftune_noise_alpha",
            found=f"{noise:g}",
            fix="remove `neftune_noise_alpha`, or use another adapter.type",
            why="with virtual tokens, transformers does not find the embeddings of this family",
            code="recipe-conflict",
        )
    ]


def check_fp8_experts(recipe: Recipe, names: Names, config: ModelConfig) -> list[Problem]:
    """Return the problem of a model whose experts can't run in fp8, if the recipe requests it."""
    if recipe.speed.fp8_experts is not True:
        return []
    storage = adapter_types.base_storage(recipe.adapter.type, recipe.model.quantization)
    reason = kernel_limits.fp8_experts_unsupported_reason(storage, config, names.shapes)
    return [fp8_support.experts_refusal(reason)] if reason else []


def check_storage(storage: str, names: Names, config: ModelConfig, adapter: str) -> list[Problem]:
    """Return the problem of a model whose layers can't be quantized, or not under this launch.

    GPT-2 has no nn.Linear layers. Types such as qlora promise a 4-bit base model.

    Args:
        storage: `model.quantization`, or the storage that a run has chosen.
    """
    meant = adapter_types.find(adapter).storage
    storage = adapter_types.base_storage(adapter, storage)
    reason = expert_targets.stays_in_bf16(names, config, storage)
    if meant and reason:
        return [
            Problem(
                f"{adapter} can't quantize all of {names.family}",
                "adapter.type",
                found=f"{expert_targets.stacks_in_bf16(names)} would stay in bf16",
                fix=f"adapter.type: {adapter[1:]} and model.quantization: nf4",
                why=reason,
                code="quantization",
            )
        ]
    quantized = storage in kernel_limits.EXPERTS_STORAGES and names.stacked_experts and not reason
    if quantized and (splitter := launch_environment.splitter()):
        return [
            Problem(
                f"{splitter} can't shard quantized experts",
                "model.quantization",
                found=storage,
                fix="accelerate_configs/ddp_8.yaml, or model.quantization: none",
                code="launch-config",
            )
        ]
    stored = [name for name in names.linear if names.kinds[name] == "Linear"]
    if storage not in ONLY_LINEAR or stored:
        return []
    return [
        Problem(
            f"{storage} quantizes only nn.Linear layers, and the layers of {names.family} are Conv1D",
            "model.quantization",
            found=storage,
            fix="set `model.quantization: nf4`, or none",
            code="quantization",
        )
    ]


def check_quantized_experts(recipe: Recipe, names: Names, config: ModelConfig) -> list[Problem]:
    """Return the problems of adapter options that quantized experts don't support."""
    kind, options = adapter_types.find(recipe.adapter.type), recipe.adapter.options()
    storage = adapter_types.base_storage(recipe.adapter.type, recipe.model.quantization)
    if not storage or not names.stacked_experts:
        return []
    if expert_targets.stays_in_bf16(names, config, storage):
        return []
    init = options.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(adapter_types.PREPARED_INITS):
        return [
            Problem(
                f"init_lora_weights: {init} can't read a model with quantized experts",
                "adapter.init_lora_weights",
                found=init,
                fix="init_lora_weights: true",
                code="quantization",
            )
        ]
    ranks = _ranks_on_experts(recipe, names)
    plain = f"adapter.type: {recipe.adapter.type[1:]} and " if kind.storage else ""  # lora for qlora
    if ranks and config.get_text_config().model_type in kernel_limits.FROZEN_EXPERTS:
        return [
            Problem(
                f"quantized experts of {names.family} train without an adapter",
                "adapter.target_modules",
                found=", ".join(sorted(ranks)[:2]),
                fix=f"adapter.target_modules: all-linear, or {plain}model.quantization: none",
                code="quantization",
            )
        ]
    largest = max(ranks.values(), default=0)
    if largest <= kernel_limits.MAX_EXPERTS_RANK:
        return []
    times = max(1, largest // options.get("r", kind.defaults.get("r", largest)))
    return [
        Problem(
            "the rank on quantized experts is too large",
            "adapter.r",
            found=str(largest),
            expected=f"at most {kernel_limits.MAX_EXPERTS_RANK}",
            fix=f"adapter.r: {kernel_limits.MAX_EXPERTS_RANK // times}",
            why="gate_up_proj holds two layers, and can get twice r",
            code="quantization",
        )
    ]


def check_sharded_experts(recipe: Recipe, names: Names) -> list[Problem]:
    """Return the problem of adapters on stacked experts whose weights DeepSpeed shards."""
    ranks = _ranks_on_experts(recipe, names) if launch_environment.sharded() == "DeepSpeed" else {}
    if not ranks:
        return []
    return [
        Problem(
            "ZeRO-3 can't shard stacked experts that have an adapter",
            "adapter.target_modules",
            found=", ".join(sorted(ranks)[:2]),
            why="PEFT reads the shapes of the experts' weights, and finds shards",
            fix="accelerate_configs/fsdp2_8.yaml or zero2_8.yaml, or adapter.target_modules: all-linear",
            code="launch-config",
        )
    ]


def _ranks_on_experts(recipe: Recipe, names: Names) -> dict[str, int]:
    """Return the rank of each adapter on stacked experts, by the name of their parameter."""
    kind, options = adapter_types.find(recipe.adapter.type), recipe.adapter.options()
    if kind.peft != "lora" or not names.stacked_experts:
        return {}
    resolved = expert_targets.resolve({**kind.defaults, **options, **kind.sets}, names, kind.peft)
    return expert_targets.parameter_ranks(resolved.options, names)


def check_trainable_token_rows(recipe: Recipe, names: Names) -> list[Problem]:
    """Return the problems of training rows of an embedding that another option trains as a whole."""
    ends = module_names.short(names.embedding), module_names.short(names.head)
    given = recipe.adapter.options(), names.tied, bool(recipe.model.add_tokens), *ends
    return adapter_rules.rows_beside(*given)
