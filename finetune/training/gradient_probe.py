"""Find trained tensors that no gradient can reach, in one forward pass before the first step.

Some models read a layer's weight and do not call the layer (Mamba's `dt_proj`). No adapter trains there.
A zero gradient would prove nothing: LoRA's A has one while B is 0. So the graph of the loss is searched.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from finetune.adapters import name_problems, trainable_parameters
from finetune.core.errors import Problem, UserError, first_line
from finetune.models import module_lists
from finetune.speed import packing_isolation

if TYPE_CHECKING:
    from collections.abc import Collection

    from finetune.autoconfig.machine_setup import Setup
    from finetune.core.run_checks import RunChecks
    from finetune.recipe.schema import Adapter

TOKENS = 16


def check(adapted: Any, adapter: Adapter, setup: Setup, ledger: RunChecks) -> None:
    """Refuse an adapter with tensors that no gradient reaches; freeze such parameters of `full`.

    Raises:
        UserError: the modules, and a change of the recipe that works (exit 2).
    """
    trained = trainable_parameters.trainable(adapted)
    if setup.launch.sharded:
        lost = _not_called_on_meta(adapted, trained)
        how = "a forward pass of the same model on the meta device"
    else:
        try:
            lost = unreached(adapted, trained, setup.attention.value)
        except Exception as error:  # of a forward that does not take this input; the first step takes another
            ledger.notes.append(f"gradients were not checked before the first step: {first_line(error)}")
            return
        how = f"the graph of one forward pass of {TOKENS} tokens"
    if adapter.type == "full":
        for name in lost:
            trained[name].requires_grad = False
        if lost:
            ledger.notes.append(f"{len(lost)} parameters do not train, the model never reads them: {lost[0]}")
    elif lost:
        raise UserError(*_problems(adapted, lost, adapter))
    reached = len(trained) - len(lost)
    expected = f"reach {reached} trained tensors"
    ledger.add("gradients", expected, expected, how)


def unreached(model: Any, trained: dict[str, torch.nn.Parameter], attention: str) -> list[str]:
    """Trained tensors that the logits do not depend on. An expert that no token reaches is no fault."""
    device = model.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        packing_isolation.as_trained(model, attention),
        torch.enable_grad(),
    ):
        ids = torch.arange(TOKENS, device=device)[None] % model.config.get_text_config().vocab_size
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    found = _leaves(logits)
    return [name for name, tensor in trained.items() if id(tensor) not in found and ".experts." not in name]


def _leaves(output: torch.Tensor) -> set[int]:
    """Ids of the parameters in a tensor's autograd graph."""
    found, seen = set[int](), set[Any]()
    stack: list[Any] = [output.grad_fn]
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):  # AccumulateGrad, one for each parameter
            found.add(id(function.variable))
        stack += [inner for inner, _ in function.next_functions]
    return found


def _not_called_on_meta(adapted: Any, trained: Collection[str]) -> list[str]:
    """The same of a model whose weights are in parts, by the modules that its class calls."""
    base = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
    with torch.device("meta"):
        config = copy.deepcopy(base.config)  # a model that is built may change its config's attention
        names = module_lists.of_meta_model(type(base)(config).to(torch.bfloat16))
    return [name for name in trained if _module_of(adapted, name) in names.not_called]


def _module_of(adapted: Any, tensor: str) -> str:
    """The full name, in the base model, of the module that PEFT has wrapped for a trained tensor."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    module, path = adapted, list[str]()
    for part in tensor.split(".")[:-1]:
        module = getattr(module, part)
        path.append(part)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            break
    return ".".join(path).removeprefix("base_model.model.")


def _problems(adapted: Any, lost: list[str], adapter: Adapter) -> list[Problem]:
    """The modules of the tensors, by the option that named them."""
    options = adapter.options()
    modules = sorted({_module_of(adapted, name) for name in lost})
    whole = [name for name in options.get("modules_to_save") or () if any(m.endswith(name) for m in modules)]
    saved = [name for name in modules if any(name.endswith(one) for one in whole)]
    found = list[Problem]()
    if left := [name for name in modules if name not in saved]:
        explicit = options.get("target_modules") != "all-linear"
        found.append(name_problems.describe_not_called(left, explicit=explicit))
    if saved:
        what = "would never be trained: the model's forward does not use them"
        fix = f"modules_to_save without {', '.join(whole)}"
        found.append(Problem(what, "adapter.modules_to_save", found=", ".join(saved), fix=fix))
    return found
