"""The environment variables that a run records: those in which a launcher passes on its config."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from finetune.core.privacy import masked_setting

_SETTING = re.compile(r"[\w.,:+ -]{0,500}")  # a switch, a number or class names
# Variables in which Accelerate passes on its config. Variables with similar names may hold secrets.
RECORDED = frozenset(
    {
        "ACCELERATE_ALLOW_CP_STANDALONE",
        "ACCELERATE_CONFIG_DS_FIELDS",
        "ACCELERATE_CPU_AFFINITY",
        "ACCELERATE_DEBUG_MODE",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        "ACCELERATE_DOWNCAST_BF16",
        "ACCELERATE_DYNAMO_BACKEND",
        "ACCELERATE_DYNAMO_MODE",
        "ACCELERATE_DYNAMO_USE_DYNAMIC",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        "ACCELERATE_FP8_AMAX_COMPUTE_ALGO",
        "ACCELERATE_FP8_AMAX_HISTORY_LEN",
        "ACCELERATE_FP8_BACKEND",
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
        "ACCELERATE_FP8_FORMAT",
        "ACCELERATE_FP8_INTERVAL",
        "ACCELERATE_FP8_MARGIN",
        "ACCELERATE_FP8_OPT_LEVEL",
        "ACCELERATE_FP8_OVERRIDE_DGRAD",
        "ACCELERATE_FP8_OVERRIDE_FPROP",
        "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION",
        "ACCELERATE_FP8_OVERRIDE_WGRAD",
        "ACCELERATE_FP8_PAD_INNER_DIM",
        "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL",
        "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "ACCELERATE_GRADIENT_CLIPPING",
        "ACCELERATE_MIXED_PRECISION",
        "ACCELERATE_NUM_PROCESSES",
        "ACCELERATE_TORCH_DEVICE",
        "ACCELERATE_USE_CPU",
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_USE_MEGATRON_LM",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        "ACCELERATE_ZERO_STAGE",
        "FSDP_ACTIVATION_CHECKPOINTING",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        "FSDP_AUTO_WRAP_POLICY",
        "FSDP_BACKWARD_PREFETCH",
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
        "FSDP_FORWARD_PREFETCH",
        "FSDP_MIN_NUM_PARAMS",
        "FSDP_OFFLOAD_PARAMS",
        "FSDP_RESHARD_AFTER_FORWARD",
        "FSDP_SHARDING_STRATEGY",
        "FSDP_STATE_DICT_TYPE",
        "FSDP_SYNC_MODULE_STATES",
        "FSDP_TRANSFORMER_CLS_TO_WRAP",
        "FSDP_USE_ORIG_PARAMS",
        "FSDP_VERSION",
        "OMP_NUM_THREADS",
        "PARALLELISM_CONFIG_CP_BACKEND",
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        "PARALLELISM_CONFIG_CP_SIZE",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE",
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
        "PARALLELISM_CONFIG_SP_BACKEND",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
        "PARALLELISM_CONFIG_SP_SIZE",
        "PARALLELISM_CONFIG_TP_SIZE",
    }
)


def recorded(environment: Mapping[str, Any] = os.environ) -> dict[str, str]:
    """Return the variables of `RECORDED`, which may be saved or shown.

    Values that do not look like a setting, or that look like a secret, are masked.
    """
    variables = {name: str(environment[name]) for name in sorted(RECORDED & environment.keys())}
    return {
        name: masked_setting(value) if _SETTING.fullmatch(value) else "****"
        for name, value in variables.items()
    }
