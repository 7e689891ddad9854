"""Estimate what a process computes and holds in a step."""

from __future__ import annotations

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from finetune.autoconfig import (
    compilation,
    cuda_graphs,
    delta_net_kernels,
    memory_estimate,
    optimizer_choice,
)
from finetune.autoconfig.batch_size import Batch
from finetune.autoconfig.machine_setup import Setup
from finetune.checkpointing import training_state
from finetune.data.audit import Report
from finetune.distributed import launch_environment, sharded_tensors, transformer_engine_layers
from finetune.recipe import adapter_types
from finetune.recipe.schema import Data, Recipe
from finetune.speed import live_model_spec


def work_of(
    adapted: PreTrainedModel | PeftModel, recipe: Recipe, setup: Setup, tokens: int, flops: float
) -> compilation.Work:
    """Estimate the work of a process, and the memory that training adds on its GPU.

    The memory to come depends on the launch:

    - FSDP: the shard of the process, the gathered layers, and the weights outside of layers
    - ZeRO-3: the buffers of DeepSpeed
    - full fine-tuning in one process: the copies that autocast makes of linear layers

    Each trainable parameter adds its gradient and its optimizer state.
    """
    launch, sharded, awaited = setup.launch, setup.launch.sharded, 0
    every = list(adapted.parameters())
    if not launch.splitter and not hasattr(adapted, "peft_config"):
        linear = (m.weight.numel() for m in adapted.modules() if isinstance(m, torch.nn.Linear))
        awaited += 2 * sum(linear) if launch.precision != "no" else 0
    if sharded == "FSDP":
        layers = [
            sum(p.nbytes for p in layer.parameters()) for layer in live_model_spec.decoder_layers(adapted)
        ]
        whole = sum(p.nbytes for p in every)
        outside = whole - sum(layers) if layers else 0
        count = len(layers) if launch_environment.keeps_layers() else memory_estimate.GATHERED_LAYERS
        awaited = whole // launch.processes + sum(layers[:count]) + outside
        awaited -= sum(
            p.nbytes for p in every if p.device.type == setup.hardware.device
        )  # quantized weights move completely
    if sharded == "DeepSpeed":
        awaited = (
            memory_estimate.zero3_gib(sum(sharded_tensors.shape(p).numel() for p in every))
            * memory_estimate.GIB
        )
    host = training_state.available() / 2 / int(launch_environment.said("LOCAL_WORLD_SIZE", "1"))
    parts = launch.processes if launch.splitter else 1
    bytes_per_parameter = 4 + parts * optimizer_bytes_per_parameter(recipe, setup)
    plain = hasattr(adapted, "peft_config") and not setup.quantized
    eager = launch_environment.eager(plain=plain) or delta_net_kernels.not_compiled_reason(adapted.config)
    kinds = {"attention": setup.attention.value, "storage": setup.storage.value}
    single_process = cuda_graphs.is_single_plain_process(launch.processes)
    searched = recipe.train.per_device_train_batch_size == "auto"
    unsupported = cuda_graphs.unsupported_reason(
        recipe, adapted.config, single_process=single_process, searched=searched, **kinds
    )
    return compilation.Work(
        tokens,
        flops,
        sharded=sharded,
        eager=eager,
        parts=parts,
        arriving_gib=awaited / memory_estimate.GIB,
        host=host / memory_estimate.GIB,
        bytes_per_parameter=bytes_per_parameter,
        graphs_unsupported=unsupported,
        no_recompute=transformer_engine_layers.used(),
    )


def optimizer_bytes_per_parameter(recipe: Recipe, setup: Setup) -> float:
    """Return the bytes of a process per trainable parameter in addition to weight and gradient.

    These are the optimizer state, DDP's copy of the gradient, DeepSpeed's fp32 copy of the weight, and
    AdaLoRA's averages. For a sharded state, only this process's shard counts.
    """
    launch = setup.launch
    state_bytes = optimizer_choice.state_bytes(optimizer_choice.asked(recipe.train), recipe.speed)
    state_bytes += 4 if launch.processes > 1 and not launch.splitter else 0
    state_bytes += 4 if launch.splitter == "DeepSpeed" and launch.precision != "no" else 0
    state_bytes += (
        memory_estimate.AVERAGES if adapter_types.find(recipe.adapter.type).peft == "adalora" else 0
    )
    return state_bytes / (launch.processes if launch.splitter else 1)


def tokens_of(data: Data, sharing: int, batch: Batch, report: Report) -> tuple[int, float]:
    """Return the tokens of a process: the maximum per forward pass, and the mean per step without padding.

    Args:
        sharing: processes that share each sequence.
    """
    most = data.max_length
    full = data.packing or data.streaming  # as `finetune plan` assumes
    number = (
        sum(report.lengths["counts"]) if report.lengths else report.kept
    )  # each piece of a split text is a sequence
    row = most if full else min(most, report.tokens / max(1, number))
    at_once = batch.per_device / sharing
    return int(at_once * most), at_once * row * batch.accumulation
