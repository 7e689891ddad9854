"""Find trainable tensors that no gradient can reach, in one forward pass before the first step.

Some models read a layer's weight and do not call the layer (Mamba's `dt_proj`). An adapter does not train
there. A zero gradient proves nothing, because LoRA's A has one while B is 0. So finetune searches the graph
of the loss. The same forward pass finds layers in which PEFT's adapter fails. `train` runs it with weights.
`check` runs it without weights if `adapter_trial` asks for it.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Collection
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from finetune.adapters import name_problems, trainable_parameters
from finetune.autoconfig.machine_setup import Setup
from finetune.core.errors import Problem, UserError, first_line
from finetune.core.run_checks import RunChecks
from finetune.models import autograd_graph, meta_forward, module_lists
from finetune.recipe import adapter_types
from finetune.recipe.schema import Adapter
from finetune.speed import packing_isolation


def check(adapted: PreTrainedModel | PeftModel, adapter: Adapter, setup: Setup, checks: RunChecks) -> None:
    """Refuse an adapter with tensors that no gradient reaches. For `full`, freeze such parameters.

    Raises:
        UserError: the modules without gradient, and a change of the recipe that works (exit 2).
    """
    trained = trainable_parameters.trainable(adapted)
    if setup.launch.sharded:
        lost = _unreached_on_meta(adapted, trained)
        how = "a forward pass of the same model on the meta device"
    else:
        try:
            lost = unreached(adapted, trained, setup.attention.value)
        except Exception as error:  # of a forward that does not take this input; the first step takes another
            if _is_of_adapter(adapted, adapter, setup.attention.value, error):
                raise UserError(_failing(adapted, adapter, error)) from error
            checks.notes.append(
                f"finetune could not check the gradients before training: {first_line(error)}"
            )
            return
        how = f"the graph of one forward pass of {meta_forward.TOKENS} tokens"
    if adapter.type == "full":
        for name in lost:
            trained[name].requires_grad = False
        if lost:
            checks.notes.append(
                f"{len(lost)} parameters are frozen, because the model never uses them: {lost[0]}"
            )
    elif lost:
        raise UserError(*_problems(adapted, lost, adapter))
    reached = len(trained) - len(lost)
    expected = f"reach {reached} trained tensors"
    checks.add("gradients", expected, expected, how)


def problems_on_meta(
    adapted: PreTrainedModel | PeftModel, adapter: Adapter, inputs: dict[str, Any]
) -> list[Problem]:
    """Return the problems that `check` finds in a forward pass of an adapter on the meta device."""
    trained = trainable_parameters.trainable(adapted)
    try:
        lost = unreached(adapted, trained, "eager", inputs)
    except Exception as error:  # of the adapter, for the model ran without it
        return [] if needs_values(error) else [_failing(adapted, adapter, error)]
    return _problems(adapted, lost, adapter) if lost else []


def needs_values(error: BaseException | None) -> bool:
    """Whether an error says that a tensor on the meta device has no values, or an operator no shapes."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def unreached(
    model: PreTrainedModel | PeftModel,
    trained: dict[str, torch.nn.Parameter],
    attention: str,
    inputs: dict[str, Any] | None = None,
) -> list[str]:
    """Return the trainable tensors that the logits do not depend on, without experts that no token reached.

    Layers may share a tensor, and a gradient then reaches it through any of them. If the logits do not depend
    on the output of such a layer, the list has the layer's own weight.
    """
    device, sharing = model.device, _sharing_layers(model)
    outputs = {name: list[Any]() for name in sharing}
    with (
        contextlib.ExitStack() as hooks,
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        packing_isolation.as_trained(model, attention),
        torch.enable_grad(),
        meta_forward.guessed_values() if device.type == "meta" else contextlib.nullcontext(),
    ):
        for module in model.modules():
            if hasattr(module, "module_dropout"):  # LoHa and LoKr would skip whole layers in training mode
                module.eval()
        for name, layer in sharing.items():
            hook = layer.register_forward_hook(
                lambda *made, name=name: outputs[name].append(made[-1].grad_fn)
            )
            hooks.callback(hook.remove)
        logits = model(**(inputs or _inputs(model))).logits
    used = autograd_graph.functions(logits)
    read = autograd_graph.parameters(used)
    lost = [name for name, tensor in trained.items() if id(tensor) not in read]
    lost += [f"{name}.base_layer.weight" for name, made in outputs.items() if used.isdisjoint(made)]
    return [name for name in lost if ".experts." not in name]


def _sharing_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers by full name if the adapter's tensors are shared by all layers; else nothing."""
    config = getattr(model, "peft_config", {}).get("default")
    if config is None or str(config.peft_type.value).lower() not in adapter_types.SHARES:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _inputs(model: PreTrainedModel | PeftModel) -> dict[str, Any]:
    ids = meta_forward.tokens(model)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}


def _is_of_adapter(
    adapted: PreTrainedModel | PeftModel, adapter: Adapter, attention: str, error: Exception
) -> bool:
    """Return whether the adapter raised the error, or the model runs without the adapter."""
    if adapter.type == "full" or isinstance(error, torch.AcceleratorError) or should_reduce_batch_size(error):
        return False
    return bool(_failing_layer(adapted, error)) or _runs_without(adapted, attention)


def _runs_without(adapted: Any, attention: str) -> bool:
    """Return whether the model's forward pass raises no error while the adapter is disabled."""
    trained = [(parameter, parameter.requires_grad) for parameter in adapted.parameters()]
    try:
        with adapted.disable_adapter(), packing_isolation.as_trained(adapted, attention), torch.no_grad():
            adapted(**_inputs(adapted))
    except Exception:  # of the model itself; the first step raises it again
        return False
    finally:
        for parameter, trains in trained:  # PEFT makes every tensor of an enabled adapter trainable
            parameter.requires_grad = trains
    return True


def _failing(adapted: nn.Module, adapter: Adapter, error: Exception) -> Problem:
    """Return the problem of an adapter that raised an error in the forward pass."""
    said = f"{type(error).__name__}: {first_line(error)}"
    kind, picked = adapter_types.find(adapter.type), getattr(adapted, "targeted_module_names", [])
    if layer := _failing_layer(adapted, error):
        return name_problems.describe_failing(layer, picked, adapter.options(), kind.peft, said)
    if kind.prompt:
        return _no_vectors(adapter, said)
    return Problem(
        f"the forward pass of this model fails with {adapter.type}",
        "adapter.type",
        found=said,
        fix="adapter.type: lora",
        code="adapter-type",
    )


def _failing_layer(adapted: nn.Module, error: Exception) -> str:
    """Return the name, in the base model, of the layer whose adapter raised an error, or the empty string."""
    names = {id(module): name for name, module in adapted.named_modules()}
    owners = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    inner = next((names[owner] for owner in reversed(owners) if owner in names), "")
    layer = _wrapped(adapted, inner.split("."))
    return "" if layer is None or ".base_layer" in inner else layer


def _no_vectors(adapter: Adapter, said: str) -> Problem:
    """Return the problem of an adapter with virtual tokens in a cache that the model does not use."""
    return Problem(
        f"{adapter.type} does not train with this model",
        "adapter.type",
        found=said,
        why=(
            f"{adapter.type} puts virtual tokens into the key-value cache, and the model does "
            "not use that cache"
        ),
        fix="adapter.type: prompt_tuning",
        code="adapter-type",
    )


def _unreached_on_meta(adapted: Any, trained: Collection[str]) -> list[str]:
    """Do the same for a model with sharded weights, by its class on the meta device and without the adapter.

    An adapter trains if the model calls its layer. A parameter of the base model trains if the model uses it.
    """
    base = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
    with torch.device("meta"):
        config = copy.deepcopy(base.config)  # building a model may change the attention in its config
        plain: Any = type(base)(config).to(torch.bfloat16)
        without_gradient = set(module_lists.of_meta_model(plain).without_gradient)
        inputs, parameters = meta_forward.inputs(plain), dict(plain.named_parameters())
        unread = set(unreached(plain, parameters, "eager", inputs)) if inputs else set[str]()
    lost = list[str]()
    for name in trained:
        own = _name_in_base(name)
        if own in unread or (own not in parameters and _module_of(adapted, name) in without_gradient):
            lost.append(name)
    return lost


def _name_in_base(tensor: str) -> str:
    """Return the name of a parameter before PEFT wrapped its module."""
    plain = tensor.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return plain.replace(".modules_to_save.default.", ".")


def _module_of(adapted: nn.Module, tensor: str) -> str:
    """Return the full name, in the base model, of the module that PEFT wrapped for a trainable tensor."""
    parts = tensor.split(".")[:-1]
    return _wrapped(adapted, parts) or ".".join(parts).removeprefix("base_model.model.")


def _wrapped(adapted: nn.Module, path: list[str]) -> str | None:
    """Return the full name of the first module on a path that PEFT has wrapped, or `None`."""
    module = adapted
    for index, part in enumerate(path):
        module = getattr(module, part, None)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            return ".".join(path[: index + 1]).removeprefix("base_model.model.")
    return None


def _problems(adapted: nn.Module, lost: list[str], adapter: Adapter) -> list[Problem]:
    """Return a problem for each option that names modules of the tensors."""
    options, kind = adapter.options(), adapter_types.find(adapter.type)
    if kind.prompt:
        return [_no_vectors(adapter, f"no gradient reaches {lost[0]}")]
    modules = sorted({_module_of(adapted, name) for name in lost})
    whole = [name for name in options.get("modules_to_save") or () if any(m.endswith(name) for m in modules)]
    saved = [name for name in modules if any(name.endswith(one) for one in whole)]
    problems = list[Problem]()
    if left := [name for name in modules if name not in saved]:
        picked = getattr(adapted, "targeted_module_names", [])
        problems.append(name_problems.describe_without_gradient(left, picked, options, kind.peft))
    if saved:
        problems.append(
            Problem(
                "these modules would never train, because the model's forward pass does not use them",
                "adapter.modules_to_save",
                found=", ".join(saved),
                fix=f"remove {', '.join(whole)} from modules_to_save",
                code="no-gradient",
            )
        )
    return problems
