"""Add an adapter to a model, or continue from one. Then record its modules and the trainable weights.

`recipe/adapter_types.py` has the types and their keys. `initialization.py` has initializations that read
data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.adapters import (
    adapter_checks,
    continue_from,
    initialization,
    name_problems,
    peft_configs,
    trainable_parameters,
)
from finetune.core import upstream_private
from finetune.core.errors import UserError
from finetune.models import module_lists, module_names
from finetune.quantization import qat, stacked_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

    from finetune.core.run_checks import RunChecks
    from finetune.recipe.schema import Adapter


def attach(
    model: PreTrainedModel,
    adapter: Adapter,
    steps: int,
    checks: RunChecks,
    batches: Callable[[], list[dict[str, torch.Tensor]]] = list,
    added: Sequence[int] = (),
) -> PeftModel | PreTrainedModel:
    """Attach the adapter to the model. `full` trains the model itself.

    Args:
        steps: number of optimizer steps of the whole run, for AdaLoRA's schedule.
        batches: returns batches of training data, for initializations that read data.
        added: ids of new tokens. Their embeddings train.

    Raises:
        UserError: a name matches no module, or PEFT refuses the options (exit 2).
    """
    from finetune.quantization import fp8_loading

    if adapter.type == "full":
        checks.add("adapter.type", "full", "full", "no adapter: every parameter trains")
        _freeze_towers(model, checks)
        adapter_checks.count_trainable(model, checks)
        return model
    everything = module_lists.of_live_model(model)
    if adapter.source:
        with stacked_experts.plain_parameters(model):
            adapted: Any = continue_from.load(model, adapter, everything, added, checks)
    else:
        name_problems.check(model, adapter, everything)
        with continue_from.refusals("PEFT does not accept it"):
            config: Any = peft_configs.peft_config(
                adapter, steps, trainable_parameters.shapes(model), everything
            )
        peft_configs.fit(config, model, everything, added)
        init = adapter.options().get("init_lora_weights")
        with continue_from.refusals("PEFT does not accept it"), stacked_experts.plain_parameters(model):
            adapted = initialization.attach(model, config, init, everything.linear, batches, checks)
    _settle(adapted, adapter, model)
    fp8_loading.refuse_merges(adapted)
    _freeze_towers(model, checks)
    adapter_checks.add_run_checks(adapted, adapter, everything, checks)
    if added:
        adapter_checks.add_new_rows_check(adapted, added, checks)
    return qat.follow(adapted)


def _settle(adapted: PeftModel, adapter: Adapter, model: PreTrainedModel) -> None:
    """Write the base model's name to the config, freeze tensors that PEFT trains by mistake, and show TRL the
    head.

    Raises:
        UserError: the head has an adapter, which TRL's loss ignores (exit 2).
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    config: Any = adapted.peft_config["default"]
    config.base_model_name_or_path = str(model.name_or_path)
    config.revision = upstream_private.commit_hash(model.config)
    for name, parameter in adapted.named_parameters():
        if ".ranknum." in name:  # PEFT does not save it, but makes it trainable on a bf16 base model
            parameter.requires_grad = False
    head = adapted.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        raise UserError(name_problems.adapter_on_head(adapter.type))
    if not hasattr(head, "bias"):  # TRL reads it, and PEFT's wrapper for trained tokens lacks it
        head.register_parameter("bias", None)


def _freeze_towers(model: PreTrainedModel, checks: RunChecks) -> None:
    """Freeze trainable weights outside of the text model."""
    from torch import nn

    encoder_weights = trainable_parameters.towers(model)
    if not encoder_weights:
        return
    for parameter in encoder_weights.values():
        parameter.requires_grad = False
    text = set(module_names.of_text(model))
    count = sum(isinstance(module, nn.Linear) and module not in text for module in model.modules())
    beside = ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in encoder_weights}))
    checks.notes.append(
        f"{count} linear layers get no adapter, because the model does not use them: {beside}"
    )
    trained = sum(parameter.requires_grad for parameter in trainable_parameters.towers(model).values())
    checks.add(
        f"trained parameters in {beside}",
        expected="none",
        actual=trained or "none",
        how="parameters with requires_grad outside of the text model and its head",
    )
