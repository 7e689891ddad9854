"""Build TRL's SFTConfig from a recipe."""

from __future__ import annotations

from typing import Any, get_args

from trl.trainer.sft_config import SFTConfig

from finetune.autoconfig import data_loader
from finetune.autoconfig.batch_size import Batch
from finetune.autoconfig.machine_setup import Setup
from finetune.core import upstream_private
from finetune.core.errors import UserError
from finetune.distributed import launch_environment
from finetune.kernels import kernel_limits
from finetune.recipe import train_rules, upstream_options
from finetune.recipe.schema import Data, Train


def with_floats(train_keys: dict[str, Any]) -> dict[str, Any]:
    """The same values, an integer as a float where SFTConfig has one: configs of models check their types."""
    known = upstream_options.fields(upstream_options.SFT_CONFIG)

    def is_float(name: str) -> bool:
        return not name.endswith("_steps") and float in get_args(known[name].annotation)

    return {
        name: float(value) if type(value) is int and is_float(name) else value
        for name, value in train_keys.items()
    }


def training_arguments(train: Train, data: Data, setup: Setup, batch: Batch) -> SFTConfig:
    """Return the SFTConfig of a recipe's `train:` and of what finetune decides itself.

    In a launch of several processes on CPUs, `collectives.start` must have joined them. On GPUs, SFTConfig
    starts the process group.
    """
    new_name = "activation_checkpointing" in upstream_options.fields(
        upstream_options.SFT_CONFIG
    )  # transformers >= 5.23
    checkpointing = "activation_checkpointing" if new_name else "gradient_checkpointing"
    train_keys = with_floats(train.passed_on())
    length = {"max_steps": train.max_steps} if train.max_steps else {"num_train_epochs": train.epochs}
    decided: dict[str, Any] = {
        "per_device_train_batch_size": batch.per_device,
        "gradient_accumulation_steps": batch.accumulation,
        "learning_rate": train.learning_rate,
        "seed": train.seed,
        "bf16": setup.launch.precision == "bf16",  # TRL's default of True would overrule the launch
        "fp16": setup.launch.precision == "fp16",
        **launch_environment.row_options(
            flat=data.flat,
            kernel_multiple=kernel_limits.LENGTH_MULTIPLES.get(setup.attention.value, 1),
        ),
        **launch_environment.device_options(setup.hardware.device),
        checkpointing: False,  # `apply_to_model.apply` does it
        "dataset_kwargs": {"skip_prepare_dataset": True},  # rows come as input_ids and labels
        "max_length": None,
        "padding_free": data.flat,  # packed rows hold their documents' lengths
        **data_loader.loader_of_launch(setup.hardware, train_keys),
        "ddp_find_unused_parameters": False,  # True for every PeftModel otherwise
        "ddp_broadcast_buffers": False,  # an fp8 base's scales are the same everywhere from the start
        "ddp_timeout": launch_environment.timeout_seconds() + launch_environment.NCCL_LATER,
        "logging_nan_inf_filter": False,  # it would log an old average in place of NaN
        "disable_tqdm": True,
        "save_strategy": "no",  # `stopping.Schedule` decides when to save
    }
    try:
        config = SFTConfig(**{**decided, **length, **train_keys})
    except (ValueError, ImportError) as error:
        raise UserError(train_rules.refused("SFTConfig", error, train_keys)) from error
    upstream_private.keep_on_one_gpu(config)
    return config
