"""GPUs of AMD: torch gives them capabilities such as (9, 0), but the kernels for Hopper are NVIDIA's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from finetune.autoconfig import mixed_precision
from finetune.hardware import detection
from finetune.kernels import expert_ops, fp8_expert_ops
from finetune.quantization import fp8_linear


@pytest.mark.parametrize("rocm", [None, "6.4.43482"])
def test_kernels_for_nvidia_gpus_are_not_chosen_on_amd_gpus(
    rocm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name="a GPU", total_memory=2**37)
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    device, weight = torch.device("cuda"), torch.zeros(2, 16, 16, dtype=torch.bfloat16)
    has_kernels = [
        fp8_expert_ops.has_kernel(device),
        fp8_linear.has_gemm(device),
        expert_ops.has_grouped_kernel(weight[0], weight),
        not mixed_precision.fp8_missing(detection.detect(), "bf16"),
    ]
    assert has_kernels == [rocm is None] * 4
    assert mixed_precision.default_precision(detection.detect()).value == "bf16"
