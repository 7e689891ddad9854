"""Print the table of docs/reference/launch_matrix.md: which config trains which method, or the reason.

    python scripts/launch_matrix.py

Accelerate's own launcher turns each config into environment variables. A cell shows the answer of
`finetune train` to these variables on eight H100s, or on the CPU for the `cpu` configs.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch, patch_environment
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from finetune.autoconfig import base_quantization, launch_settings
from finetune.core.errors import Problem, UserError
from finetune.hardware.detection import Hardware
from finetune.launch import accelerate_config
from finetune.models import module_names
from finetune.models.module_names import Names
from finetune.preflight import adapter_names, launch_conflicts
from finetune.recipe import loader

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
QUICKSTART = CONFIGS.parent / "recipes" / "quickstart.yaml"
EIGHT = Hardware("cuda", "NVIDIA H100 80GB HBM3", 8, (9, 0), 79.6, 96)
CPU = Hardware("cpu", "CPU", 1, (0, 0), 16.0, 8)
EXPERTS = "experts"  # the stacked experts of a mixture, in bf16 or NF4
COLUMNS = [  # adapter.type, model.quantization
    ("lora", "auto"), ("lora", "bf16"), ("dora", "bf16"), ("adalora", "bf16"), ("ia3", "bf16"),
    ("lora", "fp8"), ("dora", "fp8"),
    ("qlora", "auto"), ("full", "auto"), ("lora", EXPERTS), ("qlora", EXPERTS),
]  # fmt: skip
HEADS = tuple(kind if base == "auto" else f"{kind} on {base}" for kind, base in COLUMNS)
ALL, ON_EXPERTS = HEADS[:-2], HEADS[-2:]
# What was trained: on one GPU (benchmarks/gpu.json), on two (tests/gpu/test_multi_gpu.py and
# benchmarks/multi_gpu.json), or on two processes of a CPU, in fp32 (tests/distributed:
# test_two_cpu_processes, which is DDP, test_fsdp, test_deepspeed, test_two_hosts;
# tests/integration/test_adalora.py)
PROVED = {  # `HEADS` but what is refused
    "cpu": HEADS,
    "single_gpu": HEADS,
    "cpu_2": ALL,
    "ddp_2": HEADS,
    "ddp_4": HEADS,  # ddp_2 with another number
    "ddp_8": HEADS,
    "8xh100_fp8": ("lora", "lora on fp8", "dora on fp8"),
    "8xh100_fp8_te": ("full",),
    "8xh100_fp8_torchao": ("full",),
    "context_parallel_4": ALL,
    "fsdp2_8": HEADS,
    "fsdp2_8_offload": ALL,
    "fsdp2_8_quantized": ALL,
    "multi_node": ALL,
    "zero2_8": HEADS,
    "zero3_8": ALL,
    "zero3_8_offload": ALL,
}


def environment(config: Path) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets in each process for a config."""
    given = ["--config_file", str(config), "--main_process_port", "0"]
    if config.stem == "multi_node":
        given += ["--num_processes", "16", "--main_process_ip", "127.0.0.1"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args([*given, "script.py"]))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        made = launch.prepare_deepspeed_cmd_env(arguments)[1]
    elif arguments.use_fsdp or arguments.multi_gpu:
        made = launch.prepare_multi_gpu_env(arguments)
    else:
        made = launch.prepare_simple_launcher_cmd_env(arguments)[1]
    return {name: value for name, value in made.items() if os.environ.get(name) != value}


def launched(config: Path) -> AbstractContextManager[None]:
    """Set the environment of a process of that launch."""
    processes = {"WORLD_SIZE": accelerate_config.read(config)["num_processes"]}
    return patch_environment(**{**environment(config), **processes})


def cell(config: Path, kind: str, base: str) -> str:
    """Return `trains`, or the reason why this config can't train the method."""
    machine = CPU if config.stem.startswith("cpu") else EIGHT
    if machine is CPU:
        base = {"bf16": "auto"}.get(base, base)  # fp32 there
    attention = "sdpa" if "context" in config.stem else "auto"
    stored: Any = {"bf16": "none", EXPERTS: "none" if kind == "lora" else "auto"}.get(base, base)
    given = [f"adapter.type={kind}", f"model.quantization={stored}", f"model.attention={attention}"]
    try:
        with launched(config):
            found = launch_conflicts.check_all(loader.load(QUICKSTART, given), machine)
            found = found or (on_experts(kind, stored) if base == EXPERTS else [])
            if not found:
                started = launch_settings.read(machine)
                base_quantization.choose_base(
                    stored, kind, started.precision, machine, "the column says which"
                )
    except UserError as error:
        found = list(error.problems)
    return "; ".join(dict.fromkeys(map(reason, found))) or "trains"


def on_experts(kind: str, stored: str) -> list[Problem]:
    """Return the problems of an adapter on the experts of a Qwen3-MoE under the launch of this process."""
    config, names = mixture()
    given = [f"adapter.type={kind}", f"model.quantization={stored}"]
    recipe = loader.load(QUICKSTART, [*given, "adapter.target_modules=all-linear-and-experts"])
    found = adapter_names.check_sharded_experts(recipe, names)
    return found or adapter_names.check_storage(stored, names, config, kind)


@functools.cache
def mixture() -> tuple[Any, Names]:
    """Return the config of a small Qwen3-MoE, and the names of its modules."""
    config = Qwen3MoeConfig(num_hidden_layers=1, num_experts=8, vocab_size=64)
    with torch.device("meta"):
        return config, module_names.of_model(Qwen3MoeForCausalLM(config))


def reason(problem: Problem) -> str:
    """Return a problem as the table shows it."""
    return f"{problem.what}: {problem.why}" if problem.why else problem.what


def refused() -> dict[str, str]:
    """Return kinds of parallelism that finetune does not support, by their key, with the reason."""
    made = {}
    for kind in ("TP", "SP"):
        asked = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", f"PARALLELISM_CONFIG_{kind}_SIZE": 2}
        with patch_environment(**asked):
            (problem,) = launch_conflicts.check_all(loader.load(QUICKSTART), EIGHT)
        made[f"parallelism_config_{kind.lower()}_size: 2"] = reason(problem)
    (problem,) = accelerate_config.check_values({"distributed_type": "MEGATRON_LM"}, "")
    return {**made, "distributed_type: MEGATRON_LM": reason(problem)}


def table() -> str:
    """Return a Markdown table with a row per config and a column per method, and the reasons below it."""
    reasons: list[str] = []
    lines = [f"| | {' | '.join(HEADS)} |"]
    lines.append("|---|" + "---|" * len(COLUMNS))
    for config in sorted(CONFIGS.glob("*.yaml")):
        cells = [cell(config, *column) for column in COLUMNS]
        reasons = list(dict.fromkeys([*reasons, *(c for c in cells if c != "trains")]))
        ran = PROVED.get(config.stem, ())
        words = ["yes" if head in ran else "not tested" for head in HEADS]
        shown = [
            word if c == "trains" else f"no ({reasons.index(c) + 1})"
            for word, c in zip(words, cells, strict=True)
        ]
        lines.append(f"| {config.stem} | " + " | ".join(shown) + " |")
    for name, reason in refused().items():
        reasons = list(dict.fromkeys([*reasons, reason]))
        lines.append(f"| {name} | " + " | ".join([f"no ({reasons.index(reason) + 1})"] * len(COLUMNS)) + " |")
    said = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *said]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
