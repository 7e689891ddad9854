"""Put an adapter on a model, or go on from one; then say which modules it changed and which weights train.

The types and their keys are in `adapter_types.py`, first weights that need preparation in `adapter_init.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from finetune import adapter_init, adapter_source, adapter_types, modules, qat
from finetune.adapter_conflicts import coded, rows_beside
from finetune.errors import Exit, Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from finetune.adapter_types import Shapes
    from finetune.receipts import Ledger
    from finetune.sections import Adapter


def attach(
    model: PreTrainedModel,
    adapter: Adapter,
    steps: int,
    ledger: Ledger,
    batches: Callable[[], list[dict[str, torch.Tensor]]] = list,
    added: Sequence[int] = (),
) -> PeftModel | PreTrainedModel:
    """Put the adapter on the model. `full` trains the model as it is.

    Args:
        steps: optimizer steps of the whole run; AdaLoRA's schedule is made from it.
        batches: gives batches of training data, for initialisations that look at it.
        added: ids of tokens that are new to the model; their rows train.

    Raises:
        UserError: a name that matches no module, with the nearest; what PEFT refuses (exit 2).
    """
    from finetune.speed import fp8_base

    if adapter.type == "full":
        ledger.add("adapter.type", "full", "full", "no adapter: every parameter trains")
        _freeze_towers(model, ledger)
        _count_trainable(model, ledger)
        return model
    everything = names(model)
    if adapter.source:
        adapted: Any = adapter_source.load(model, adapter, added, ledger)
    else:
        _check_names(model, adapter)
        with adapter_source.refusals("PEFT refuses it"):
            config: Any = peft_config(adapter, steps, shapes(model))
        _train_rows(model, config, added)
        _keep_to_text(model, config, everything)
        init = adapter.options().get("init_lora_weights")
        with adapter_source.refusals("PEFT refuses it"):
            adapted = adapter_init.attach(model, config, init, everything.linear, batches, ledger)
    _settle(adapted, adapter, model)
    fp8_base.refuse_merges(adapted)
    _freeze_towers(model, ledger)
    _add_receipts(adapted, adapter, everything, ledger)
    if added:
        _add_row_receipt(adapted, added, ledger)
    return qat.follow(adapted)


def _settle(adapted: Any, adapter: Adapter, model: PreTrainedModel) -> None:
    """Name the base in the config, freeze what PEFT leaves to train by mistake, and let TRL find the head.

    Raises:
        UserError: an adapter on the head, which TRL's loss passes by (exit 2).
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    config: Any = adapted.peft_config["default"]
    config.base_model_name_or_path = str(model.name_or_path)
    config.revision = getattr(model.config, "_commit_hash", None)
    for name, parameter in adapted.named_parameters():
        if ".ranknum." in name:  # not saved, and trainable on a bf16 base
            parameter.requires_grad = False
    head = adapted.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        what, fix = "TRL's loss reads the head's own weight and passes the adapter by", "adapter.type: lora"
        fix += " with trainable_token_indices" if adapter.type == "trainable_tokens" else ""
        raise UserError(Problem(what, "adapter", found=f"{adapter.type} on the output head", fix=fix))
    if not hasattr(head, "bias"):  # TRL reads it, and PEFT's wrapper of trained tokens has none to give
        head.register_parameter("bias", None)


def towers(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """What a multimodal base has beside its text model and head, by name: no text runs through it."""
    text = {id(p) for module in modules.of_text(model) for p in module.parameters(recurse=False)}
    return {name: p for name, p in model.named_parameters() if id(p) not in text}


def _keep_to_text(model: PreTrainedModel, config: Any, known: modules.Names) -> None:
    """No adapter in a multimodal base's towers, whose layers may be called as those of its text model are."""
    if not towers(model):
        return
    decoder = model.get_decoder()
    text = next(name for name, module in model.named_modules() if module is decoder)
    if hasattr(config, "exclude_modules"):
        own = config.exclude_modules or ()
        own = [own] if isinstance(own, str) else [rf"(.*\.)?{re.escape(name)}" for name in sorted(own)]
        config.exclude_modules = "|".join([rf"(?!{re.escape(text)}\.).*", *own])
    elif getattr(config, "target_modules", None):
        config.target_modules = set(modules.targeted(vars(config), known))


def _freeze_towers(model: PreTrainedModel, ledger: Ledger) -> None:
    """Trained biases, whole modules and all of `full` stop at the text model too."""
    from torch import nn

    held = towers(model)
    if not held:
        return
    for parameter in held.values():
        parameter.requires_grad = False
    text = set(modules.of_text(model))
    count = sum(isinstance(module, nn.Linear) and module not in text for module in model.modules())
    beside = ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in held}))
    ledger.notes.append(f"{count} linear layers stay as they are, for no text runs through them: {beside}")
    trained = sum(parameter.requires_grad for parameter in towers(model).values())
    how = "parameters with requires_grad outside of the text model and its head"
    ledger.add(f"trained in {beside}", "nothing", trained or "nothing", how)


def _add_row_receipt(adapted: Any, added: Sequence[int], ledger: Ledger) -> None:
    """Each new token's row trains, in embeddings and head: by itself, or in what trains as a whole."""
    count, heads = (
        _rows_trained(module, added)
        for module in (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    )
    got = f"{count} rows train" + (f", and {heads} of the head" if heads != count else "")
    how = "rows of the embeddings and of the head with requires_grad"
    ledger.add("model.add_tokens", f"{len(added)} rows train", got, how)


def _rows_trained(module: Any, added: Sequence[int]) -> int:
    """How many of the new tokens' rows train in embeddings or a head, as PEFT has wrapped them."""
    if rows := getattr(module, "token_adapter", None):
        found = set(rows.token_indices["default"]) & set(added)
        return len(found) if rows.trainable_tokens_delta["default"].requires_grad else 0
    whole = getattr(module, "modules_to_save", None)
    return len(added) if whole and whole["default"].weight.requires_grad else 0


def peft_config(adapter: Adapter, steps: int, model: Shapes) -> PeftConfig:
    """PEFT's config of the recipe's section, completed for this model and this run.

    Raises:
        UserError: options that leave the type nothing to do (exit 2).
    """
    from peft import TaskType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = adapter_types.find(adapter.type)
    options: dict[str, Any] = {**deepcopy(adapter.options()), **kind.sets}  # PEFT adds to lists of its config
    if options.get("target_modules") == "all-linear" and options.get("layers_to_transform") is not None:
        options["target_modules"] = sorted(set(map(modules.short, model)))  # PEFT wants a list beside it
    if kind.build:
        options = kind.build(options, steps, model)
    init = options.get("init_lora_weights")
    if init in adapter_types.CONFIGURED_INITS:
        options.setdefault(f"{init}_config", {})  # or PEFT warns that it takes the defaults
    if init == "loftq":  # PEFT's own would quantise the weights once more
        options["init_lora_weights"] = True
    classes = {str(name.value).lower(): config for name, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return classes[kind.peft](task_type=TaskType.CAUSAL_LM, **options)


def derived(model: Any, adapter: Adapter) -> dict[str, Any]:
    """PEFT keys that a builder set, not the recipe: AdaLoRA's schedule, IA3's feed-forward modules."""
    builds = () if adapter.source else adapter_types.find(adapter.type).builds
    values = {
        key: getattr(model.peft_config["default"], key) for key in builds if key not in adapter.options()
    }
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


def shapes(model: PreTrainedModel) -> Shapes:
    """What adapter types need to know of a model; the shapes of quantised layers are those of their maths."""
    linear: dict[str, Any] = linear_layers(model)
    return {name: (module.out_features, module.in_features) for name, module in linear.items()}


def linear_layers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The linear layers that text runs through by their full names, without the output head."""
    from torch import nn

    head, text = model.get_output_embeddings(), set(modules.of_text(model))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and module in text
    }


def names(model: PreTrainedModel) -> modules.Names:
    """What a recipe may call by name in a live model."""
    beside = towers(model)
    parameters = [name for name, _ in model.named_parameters() if name not in beside]
    holders = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
    holders += [] if "lm_head" in holders else ["lm_head"]
    return modules.Names(list(linear_layers(model)), holders, parameters)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that the optimizer will move, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train_in_fp32(model: torch.nn.Module) -> dict[str, torch.dtype]:
    """Give every trained weight fp32, where small steps are not lost: PEFT does so for its own matrices only,
    not for modules that train whole.

    Returns:
        The dtypes they had and will be loaded in, by name.
    """
    import torch

    halves = {n: p.dtype for n, p in trainable(model).items() if p.dtype in (torch.bfloat16, torch.float16)}
    for name in halves:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.float()
    return halves


def frozen(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that must be the same after training: frozen parameters and buffers.

    AdaLoRA's `ranknum` is bookkeeping of the adapter, not of the base.
    """
    tensors: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    tensors.update(model.named_buffers())
    for name, tensor in list[tuple[str, Any]](tensors.items()):
        if hasattr(tensor, "__tensor_flatten__") and not hasattr(
            tensor, "full_tensor"
        ):  # torchao keeps codes and scales in one tensor
            del tensors[name]
            inner, _ = tensor.__tensor_flatten__()
            tensors.update({f"{name}.{part}": getattr(tensor, part) for part in inner})
    return {name: tensor for name, tensor in tensors.items() if "ranknum" not in name}


def _check_names(model: PreTrainedModel, adapter: Adapter) -> None:
    """Names and numbers of the recipe that nothing in the model answers to are errors, all at once."""
    options = adapter.options()
    kind = adapter_types.find(adapter.type)
    problems = modules.problems(options, names(model), any_module=kind.peft in adapter_types.NOT_LINEAR)
    parts = list(model.named_modules())
    for name in options.get("modules_to_save") or ():
        held = {modules.stored_as(part) for at, part in parts if at.endswith(name)} - {""}
        found = coded([name], held.pop()) if held else []
        problems += [Problem(what, key, **texts) for key, what, texts in found]
    embedding: Any = model.get_input_embeddings()
    rows = len(embedding.weight)
    for key in ("trainable_token_indices", "token_indices"):
        given = options.get(key) or ()
        tokens = [token for ids in given.values() for token in ids] if isinstance(given, dict) else given
        beyond = [token for token in tokens if not 0 <= token < rows]
        if beyond:
            texts = {"found": ", ".join(map(str, beyond)), "expected": f"0 to {rows - 1}"}
            problems.append(Problem("the model has no such token", f"adapter.{key}", **texts))
    if problems:
        raise UserError(*problems)


def _train_rows(model: PreTrainedModel, config: Any, added: Sequence[int]) -> None:
    """New tokens need rows that train: in the embeddings, and in the head if it has its own.

    Raises:
        UserError: embeddings or a head that train as a whole, and the other that does not (exit 2).
    """
    tied = model.config.get_text_config().tie_word_embeddings
    if found := rows_beside(vars(config), tied, bool(added)):
        raise UserError(*(Problem(what, key, **texts) for key, what, texts in found))
    saved = getattr(config, "modules_to_save", None) or ()  # trainable_tokens has none
    if not added or "embed_tokens" in map(modules.short, saved):
        return
    own = getattr(config, "trainable_token_indices", None) or []
    asked = own if isinstance(own, dict) else {"embed_tokens": own} | ({} if tied else {"lm_head": own})
    rows = {name: sorted({*ids, *added}) for name, ids in asked.items()}
    config.trainable_token_indices = rows["embed_tokens"] if tied and len(rows) == 1 else rows


def _add_receipts(adapted: Any, adapter: Adapter, known: modules.Names, ledger: Ledger) -> None:
    """Type, modules by name, ranks, and what else trains: read back from the live model."""
    config, kind = adapted.peft_config["default"], adapter_types.find(adapter.type)
    asked = " ".join([kind.peft.upper(), *(f"with {key}" for key in kind.sets)])
    got = str(getattr(config.peft_type, "value", config.peft_type))
    got = " ".join([got, *(f"with {key}" for key in kind.sets if getattr(config, key, None))])
    ledger.add("adapter.type", asked, got, "the live PEFT config")
    options = adapter.options()
    changed = Counter(modules.short(name) for name in getattr(adapted, "targeted_module_names", ()))
    if changed:
        targets = options.get("target_modules")
        as_saved = adapter.source and targets != "all-linear"  # by the names of the adapter it goes on from
        limits = vars(config) if adapter.source else {}  # what of all layers that one leaves out
        expected = changed if targets is None or as_saved else _expected({**limits, **options}, known)
        if expected != changed:
            expected = _without_experts(config, options, expected, known, ledger)
        ledger.add(
            "adapter.target_modules", _counts(expected), _counts(changed), "adapted modules, counted by name"
        )
    if kind.peft == "lora" and (options.get("rank_pattern") or options.get("alpha_pattern")):
        _add_pattern_receipt(adapted, config, ledger)
    for key, part in (
        ("modules_to_save", ".modules_to_save."),
        ("trainable_token_indices", "trainable_tokens_delta"),
    ):
        if options.get(key):
            trained = {n for n in trainable(adapted) if part in n}
            ledger.add(
                f"adapter.{key}",
                options[key],
                f"{len(trained)} tensors train",
                "parameters with requires_grad",
                ok=bool(trained),
            )
    parameters = getattr(adapted, "targeted_parameter_names", ())
    if parameters or options.get("target_parameters"):
        ledger.add(
            "adapter.target_parameters",
            options.get("target_parameters") or "experts' weights, by the names of their layers (PEFT)",
            f"{len(parameters)} parameters",
            "the live PEFT model",
            ok=bool(parameters),
        )
    _count_trainable(adapted, ledger)


def _add_pattern_receipt(adapted: Any, config: Any, ledger: Ledger) -> None:
    """Rank and scale of each module, beside those that PEFT's rule for patterns gives it."""
    from peft.utils.other import get_pattern_key

    asked, got = Counter[str](), Counter[str]()
    for name in adapted.targeted_module_names:
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
        module = adapted.get_base_model().get_submodule(name)
        asked[f"r={rank} x{alpha / (rank**0.5 if config.use_rslora else rank):g}"] += 1
        got[f"r={len(module.lora_A['default'].weight)} x{module.scaling['default']:g}"] += 1
    how = "rows of A and scale, counted over modules"
    ledger.add("adapter.rank_pattern, alpha_pattern", _counts(asked), _counts(got), how)


def _expected(options: dict[str, Any], known: modules.Names) -> Counter[str]:
    """The layers that PEFT's rules pick, counted by name."""
    return Counter(map(modules.short, modules.targeted(options, known)))


def _without_experts(
    config: Any, options: dict[str, Any], asked: Counter[str], known: modules.Names, ledger: Ledger
) -> Counter[str]:
    """The layers asked for, less those whose names PEFT takes for the weights of a mixture's experts.

    Its conversion for transformers 5 makes `target_parameters` of them, where an MLP that is dense, or shared
    by all experts, has layers of these names (peft 0.21.2, utils/transformers_weight_conversion.py).
    """
    made = sorted(set(config.target_parameters or ()) - set(options.get("target_parameters") or ()))
    if not made:
        return asked
    left = _expected({**options, "target_modules": config.target_modules}, known)
    if lost := asked - left:
        what = f"{_counts(lost)} get no adapter: PEFT adapts the experts' weights in their place"
        ledger.notes.append(f"{what} ({', '.join(made)})")
    return left


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


def _count_trainable(model: torch.nn.Module, ledger: Ledger) -> None:
    from finetune import shards  # imports torch

    count = sum(shards.shape(parameter).numel() for parameter in trainable(model).values())
    total = sum(shards.shape(parameter).numel() for parameter in model.parameters())
    if hasattr(model, "get_nb_trainable_parameters"):  # knows that a 4-bit code holds two weights
        count, total = model.get_nb_trainable_parameters()  # type: ignore[operator]  (a PeftModel's method)
    share = f"{count:,} of {total:,} ({count / total:.2%})"
    how = "parameters with requires_grad"
    ledger.add("trainable parameters", "> 0", share, how, ok=count > 0, code=Exit.TRAINING)
