"""Load a base model as `finetune train` does, for another training loop."""

from __future__ import annotations

from transformers import PreTrainedModel

from finetune.autoconfig import attention_choice, fp8_support, machine_setup
from finetune.distributed import launch_environment
from finetune.models import loading, model_files
from finetune.quantization import stored_weights
from finetune.recipe.schema import Model
from finetune.speed import fused_experts


def load(section: Model, device: str | None = None) -> PreTrainedModel:
    """Load the base model with the quantization of `section` and frozen weights.

    Args:
        device: a device such as "cuda:1". By default, the GPU of this process, or the CPU.
    """
    config = model_files.read_config(section)
    setup = machine_setup.choose(
        attention="auto",
        base=section.quantization,
        adapter_type="lora",
        model=machine_setup.ModelProperties(
            attention_choice.read(config),
            stored_weights.read(config),
            fp8_support.config_against_fp8(config),
        ),
    )
    gpu = f"cuda:{launch_environment.said('LOCAL_RANK', '0')}"
    loaded = loading.load(section, setup, device or ("cpu" if setup.hardware.device == "cpu" else gpu))
    fused_experts.install_quantized(loaded)  # transformers' forward would save each dequantized weight
    return loaded.requires_grad_(False)
