"""`--to compressed-tensors`: weights in fp8 or int8 with one scale for each output, for vLLM and SGLang.

A base model with `model.quantization: fp8` has the same weights and the same scales. So `--adapter` writes
the base model as it was in training, and the adapter next to it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from finetune.core import model_config, packages, safe_files
from finetune.core.errors import Problem, UserError
from finetune.core.model_config import ModelConfig
from finetune.core.paths import writing
from finetune.export import folder_export, gguf_file, vllm_export
from finetune.export.export_job import ExportJob
from finetune.models import model_class
from finetune.quantization import fp8_linear

KINDS = ("fp8", "int8")
check_adapter = vllm_export.check_adapter
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    },
    "int8": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
}
"""The schemes of the library: FP8_DYNAMIC, and int8 for weights alone, which needs no calibration."""
LARGEST_ERROR = 0.1
"""The relative error above which the weights of an output are other weights: 8 bits lose about 3%."""
NOT_RUN = "vLLM itself was not run: transformers read the files that vLLM reads"


def check(config: ModelConfig, _quantize: str) -> None:
    """Check what is known before weights are loaded.

    Raises:
        UserError: the model has experts (exit 2), or the package is missing (exit 3).
    """
    packages.require(
        "compressed_tensors", "export", "--to compressed-tensors needs the package compressed-tensors"
    )
    if experts := model_config.experts(config.get_text_config()):
        raise UserError(
            Problem(
                "finetune writes no experts with compressed-tensors",
                found=f"{experts} experts per layer",
                fix="--to vllm",
                why="transformers stacks their weights",
                code="export",
            )
        )


def write(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Quantize the merged weights, and compare transformers' answers with the fine-tuned model's."""
    model = model_class.open_folder(job.source, dtype=torch.float32)
    with writing(folder):
        report = save(model, job.quantize, folder)
        job.tokenizer.save_pretrained(str(folder))
    check_weights(folder, job.source)
    report |= {"files": folder_export.sizes(folder)}
    report |= {"serving_check": folder_export.check(folder, job, job.quantize), "notes": [NOT_RUN]}
    return report | vllm_export.serving(job.name)


def check_weights(folder: Path, source: Path) -> None:
    """Raise a UserError if a quantized weight times its scale is not the merged weight (exit 4)."""
    found = []
    with gguf_file.opened(folder) as stored, gguf_file.opened(source) as merged:
        for name in sorted(stored.files.keys() & merged.files.keys()):
            if f"{name}_scale" in stored.files:
                wanted = merged.tensor(name)
                got = stored.tensor(name) * stored.tensor(f"{name}_scale")
                errors = (got - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)
                if (error := float(errors.max())) > LARGEST_ERROR:
                    found.append(f"tensor {name} differs from the merged weights by {error:.0%}")
    gguf_file.refuse_damaged(folder, found)


def write_adapter(job: ExportJob, folder: Path) -> dict[str, Any]:
    """Write the quantized base model and the adapter, and compare the answers of both together."""
    rank = vllm_export.check_adapter(job.source)
    with writing(folder):
        stored = safe_files.make_folder(folder, "base")
        safe_files.make_folder(folder, "adapter")
    options: Any = {"revision": job.revision, "dtype": torch.float32, "trust_remote_code": False}
    base: Any = AutoModelForCausalLM.from_pretrained(job.base, **options)
    with writing(folder):
        report = save(base, job.quantize, stored)
        job.tokenizer.save_pretrained(str(stored))
    del base
    folder_export.copy(job.source, folder / "adapter")
    report |= {"files": folder_export.sizes(folder)}
    report["serving_check"] = folder_export.check(folder, job, job.quantize)
    ends = ", ".join(map(str, job.expected.stops))
    report["notes"] = [NOT_RUN, f"base/generation_config.json must name the stop tokens {ends}"]
    serve = [
        "vllm",
        "serve",
        "base",
        "--enable-lora",
        "--max-lora-rank",
        str(rank),
        "--lora-modules",
        f"{job.name}=adapter",
    ]
    return report | {"serve": [shlex.join(serve)], "client": vllm_export.client(job.name)}


def save(model: PreTrainedModel | PeftModel, kind: str, folder: Path) -> dict[str, Any]:
    """Quantize a model in fp32, and save it. All weights that are not quantized become bf16.

    Returns:
        The number of quantized layers, and the names of the other linear layers.
    """
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    compressors: Any = importlib.import_module("compressed_tensors.compressors")

    layers, others = split_layers(model)
    scheme = quantization.QuantizationScheme(targets=["Linear"], **SCHEMES[kind])
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=others, quantization_status="frozen"
    )
    with contextlib.redirect_stderr(io.StringIO()):  # the library's bars have no switch
        quantization.apply_quantization_config(model, config)
        set_scales(layers)
        compressor = compressors.ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
    for module in model.modules():
        if module not in layers.values():
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(str(folder))
    compressor.update_config(str(folder))
    return {"layers": {"quantized": len(layers), "plain": others}}


def split_layers(model: PreTrainedModel | PeftModel) -> tuple[Mapping[str, nn.Module], list[str]]:
    """Return the linear layers to quantize, and the names of the others, such as the output head.

    They are the layers that a base model with `model.quantization: fp8` stores in fp8.
    """
    decoder = set(model.get_decoder().modules())
    linear = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    layers = {name: one for name, one in linear.items() if one in decoder and fp8_linear.fits(one)}
    return layers, sorted(linear.keys() - layers.keys())


def set_scales(layers: Mapping[str, nn.Module]) -> None:
    """Set one scale for each output: its largest weight, divided by the largest number of the format."""
    utils: Any = importlib.import_module("compressed_tensors.quantization.utils")
    for layer in layers.values():
        weight: Any = layer.weight
        limits = weight.detach().amin(1, keepdim=True), weight.detach().amax(1, keepdim=True)
        arguments: Any = layer.quantization_scheme
        scale, _ = utils.calculate_qparams(*limits, arguments.weights)
        scales: Any = layer.weight_scale
        scales.data = scale.float()
