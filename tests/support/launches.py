"""Environments of launches, and a machine."""

from __future__ import annotations

from finetune.hardware.detection import Hardware

H100 = Hardware("cuda", "NVIDIA H100 80GB HBM3", 8, (9, 0), 79.6, 96)
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
PARALLEL = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
