"""Read the settings of a launch from its environment variables.

`accelerate launch` passes its config file to the processes only as environment variables.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from finetune.core.errors import Exit, Problem, UserError
from finetune.distributed import recorded_variables

# The meaning of `mixed_precision: fp8` without an fp8_config.
FROZEN = "frozen base"
# Backends of an fp8_config that finetune supports.
BACKENDS = {"TE": "TransformerEngine", "AO": "torchao"}
TIMEOUT = "FINETUNE_TIMEOUT_SECONDS"
# Seconds by which NCCL's timeout is longer than gloo's. NCCL's watchdog ends a process with SIGABRT, but gloo
# raises an error with a message. Ranks use both in each step, and NCCL's clock starts earlier.
NCCL_LATER = 60
# TransformerEngine's fp8 GEMMs need multiples of this number of tokens, as in Accelerate's own script.
TE_TOKENS = 16
ONCE = "the backward pass would recompute in bf16, and get other tensors than the forward pass saved"
GONE = "another process of this launch ended or did not answer in time"
_WAYS = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_FP8_")
_LOST = re.compile("gloo|NCCL|Connection (closed|reset)|[Tt]imed out|Socket Timeout|recv.*failed|Broken pipe")
_SWITCHES = (
    r"ACCELERATE_(USE_(CPU|FSDP|DEEPSPEED|MEGATRON_LM|PARALLELISM_CONFIG)|DEBUG_MODE|CPU_AFFINITY|ENABLE_RICH"
    r"|INIT_INCLUDE_BUFFERS|DYNAMO_USE_(FULLGRAPH|DYNAMIC|REGIONAL_COMPILATION))"
    r"|FSDP_(USE_ORIG_PARAMS|SYNC_MODULE_STATES|OFFLOAD_PARAMS|FORWARD_PREFETCH|CPU_RAM_EFFICIENT_LOADING|ACTIVATION_CHECKPOINTING)|HF_HUB_OFFLINE"
)
_FORMS = (  # names of variables that libraries read, most of a launcher, and their values
    (r"(LOCAL_)?RANK|PMI_RANK|MPI_LOCALRANKID|(OMPI|MV2)_COMM_WORLD_(LOCAL_)?RANK", r"-?\d{1,9}"),
    (r"(LOCAL_)?WORLD_SIZE|PMI_SIZE|(OMPI|MV2)_COMM_WORLD_SIZE|PARALLELISM_CONFIG_\w+_SIZE", r"[1-9]\d{0,8}"),
    (r"PARALLELISM_CONFIG_SP_BACKEND", r"deepspeed"),
    (r"MASTER_PORT", r"\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5]"),
    (r"MASTER_ADDR", r"\S+"),
    (r"ACCELERATE_USE_MEGATRON_LM", r"(?i)n|no|f|false|off|0"),  # finetune does not support Megatron-LM
    (r"ACCELERATE_GRADIENT_(CLIPPING|ACCUMULATION_STEPS)", r"|auto|-?\d{1,9}(\.\d{1,9})?"),
    (r"ACCELERATE_MIXED_PRECISION", r"|no|fp16|bf16|fp8"),
    (_SWITCHES, r"(?i)y|yes|t|true|on|1|n|no|f|false|off|0"),  # accelerate.utils.str_to_bool
    (r"HF_HUB_(DOWNLOAD|ETAG)_TIMEOUT", r"|\d{1,9}"),
    (r"SOURCE_DATE_EPOCH", r"-?\d{1,12}"),  # numpy reads it
    (r"PYTHONOPTIMIZE", r"|0|1"),  # 2 removes docstrings, which transformers reads
    (r"HF_DATASETS_IN_MEMORY_MAX_SIZE", r"\d{1,15}(\.\d{1,9})?"),
    (r"ACCELERATE_LOG_LEVEL", r"(?i)notset|debug|info|warn|warning|error|critical|fatal"),
    (
        "FINETUNE_AFTER_OUT_OF_MEMORY",  # training.auto_correction writes it
        r'|\[\[((, )?\["[\w.]+(checkpointing", "[\w:]+", "[\w:]+|size", "\d{1,9}", "\d{1,9})"\])*\], '
        r'"([^"\\]|\\.)*", (true|false)\]',
    ),
    (r"(JUPYTER_)?(COLUMNS|LINES)", r"|\d{1,4}"),  # rich and shutil read them
    ("FINETUNE_COMMITS", r'|\{("[^"\\]+": "[^"\\]+"(, )?)*\}'),  # hub.client writes it
)
# Numbers of processes that Accelerate reads in place of WORLD_SIZE
_OF_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
CONFIG = "accelerate config"  # the name of the launch's settings in messages


class Fp8(NamedTuple):
    """The kind of an fp8 launch."""

    kind: str
    """`FROZEN`: an fp8 base model. `TE`, `AO`: a backend of Accelerate. Empty: no fp8 launch."""
    reason: str = ""

    @property
    def precision(self) -> str:
        """The precision of the Accelerator. It is bf16 for `FROZEN`, because fp8 GEMMs return bf16."""
        return "bf16" if self.kind == FROZEN else "fp8"


def said(name: str, default: str = "") -> str:
    """Return a variable of the launch in lower case and without spaces around it."""
    return os.environ.get(name, default).strip().lower()


def is_main() -> bool:
    """Return whether this process is rank 0. It needs no process group."""
    return os.environ.get("RANK", "0") == "0"


def processes() -> int:
    """Return the number of processes of the launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_variables() -> None:
    """Refuse wrong values of variables that libraries read, and remove them, so that errors can be printed.

    Raises:
        UserError: a variable has another form, such as no number (exit 3).
    """
    empty = [name for name, value in os.environ.items() if not value]
    for name in [name for name in empty if re.fullmatch(f"{_SWITCHES}|MASTER_ADDR|SOURCE_DATE_EPOCH", name)]:
        del os.environ[name]  # as if it were not set; Accelerate and PEFT would fail
    wrong = {
        name: value
        for name, value in os.environ.items()
        for names, values in _FORMS
        if re.fullmatch(names, name) and not re.fullmatch(values, value)
    }
    for name in wrong:
        del os.environ[name]
    if wrong:
        raise UserError(
            Problem(
                "a variable of the environment has a wrong value",
                found=", ".join(f"{name}={value!r}"[:100] for name, value in wrong.items())[:200],
                fix=f"unset {' '.join(wrong)}",
                code="launch-config",
            ),
            code=Exit.ENVIRONMENT,
        )


def check_launcher() -> None:
    """Refuse variables of a launcher in a process that no launcher has started.

    Raises:
        UserError: torch would wait for other processes, or find no address for them (exit 3).
    """
    left = {"WORLD_SIZE": processes() > 1, "LOCAL_RANK": said("LOCAL_RANK", "-1") != "-1"}
    if "WORLD_SIZE" not in os.environ:
        left |= {name: int(os.environ.get(name, "1")) > 1 for name in _OF_MPI}
    found = [name for name, is_set in left.items() if is_set]
    if found and "MASTER_ADDR" not in os.environ:
        raise UserError(
            Problem(
                "the environment names a process of a launch, and no launcher has started this one",
                found=f"{', '.join(f'{name}={os.environ[name]}' for name in found)}, and no MASTER_ADDR",
                fix=f"unset {' '.join(found)}, or start finetune with a launcher (`--accelerate FILE`)",
                code="launch-config",
            ),
            code=Exit.ENVIRONMENT,
        )


def on(name: str) -> bool:
    return said(name) in ("y", "yes", "t", "true", "on", "1")  # accelerate.utils.str_to_bool


@contextlib.contextmanager
def under(variables: Mapping[str, str]) -> Iterator[None]:
    """Run the block with the environment of a launch of one process that sets these variables."""
    before = {
        name: os.environ.get(name) for name in (*variables, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    }
    for name in before:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def fp8() -> Fp8:
    """Return the kind of fp8 that the launch asks for."""
    if said("ACCELERATE_MIXED_PRECISION") != "fp8":
        return Fp8("")
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "").strip()
    if not backend:
        return Fp8(
            FROZEN, "mixed_precision: fp8 means a frozen fp8 base model, and bf16 for the other operations"
        )
    return Fp8(backend, f"its mixed_precision: fp8 by {BACKENDS.get(backend, backend)}")


def sharded() -> str:
    """Return the library that shards the weights; the empty string if none does."""
    if on("ACCELERATE_USE_FSDP"):
        return "FSDP"
    return "DeepSpeed" if on("ACCELERATE_USE_DEEPSPEED") and zero_stage() == "3" else ""


def splitter() -> str:
    """Return the library that shards the optimizer state, with or without weights; else the empty string."""
    return "FSDP" if on("ACCELERATE_USE_FSDP") else "DeepSpeed" if zero_stage() else ""


def keeps_layers() -> bool:
    """Return whether FSDP keeps all layers gathered from forward to backward."""
    return sharded() == "FSDP" and said("FSDP_RESHARD_AFTER_FORWARD", "true") in ("false", "0", "no")


def read_by_rank_0() -> bool:
    """Return whether only rank 0 reads the base model and sends the other ranks their shards."""
    return sharded() == "FSDP" and on("FSDP_CPU_RAM_EFFICIENT_LOADING")


def eager(*, plain: bool) -> str:
    """Return why `speed.compile: auto` does not compile under this launch; the empty string if it may.

    Args:
        plain: whether an adapter trains on a base model that is not quantized. Only such runs were measured
            under FSDP2.
    """
    if fp8().kind == "TE":
        return "TransformerEngine's delayed scaling breaks the graph at each layer"
    if sharded() == "FSDP" and plain and parallel("CP") == 1 and not on("FSDP_OFFLOAD_PARAMS"):
        return ""
    only = ", except for adapters on an unquantized base model on the GPUs" if sharded() == "FSDP" else ""
    return f"not measured for weights that {sharded()} shards{only}" if sharded() else ""


def zero_stage() -> str:
    return said("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2") if on("ACCELERATE_USE_DEEPSPEED") else ""


def means_fp8(quantization: str) -> bool:
    """Return whether the launch, and not the recipe, asks for an fp8 base model."""
    return fp8().kind == FROZEN and quantization == "auto"


def device_options(device: str) -> dict[str, Any]:
    """Return SFTConfig's keys for a device. DeepSpeed on CPUs must not set `use_cpu`, which starts DDP."""
    zero = device == "cpu" and bool(zero_stage())
    return {"use_cpu": device == "cpu" and not zero, "ddp_backend": "gloo" if zero else None}


def row_options(*, flat: bool, kernel_multiple: int = 1) -> dict[str, Any]:
    """Return SFTConfig's `pad_to_multiple_of` if the launch or a kernel needs it.

    Context parallelism gives each process two pieces of a sequence, all of the same length.
    TransformerEngine's GEMMs take multiples of `TE_TOKENS`.

    Args:
        flat: whether examples are concatenated to sequences of one length.
        kernel_multiple: the multiple that the attention kernel needs (`kernel_limits.LENGTH_MULTIPLES`).
    """
    multiple = 2 * parallel("CP") if parallel("CP") > 1 else 1
    multiple = math.lcm(multiple, TE_TOKENS) if fp8().kind == "TE" and not flat else multiple
    multiple = math.lcm(multiple, kernel_multiple)
    return {"pad_to_multiple_of": multiple} if multiple > 1 else {}


def parallel(kind: str) -> int:
    """Return a size of the launch's `parallelism_config`.

    Args:
        kind: CP, SP, TP, DP_SHARD or DP_REPLICATE.
    """
    used = on("ACCELERATE_USE_PARALLELISM_CONFIG")
    return int(said(f"PARALLELISM_CONFIG_{kind}_SIZE", "1")) if used else 1


def offloads_to(device: str) -> bool:
    """Return whether DeepSpeed offloads weights or optimizer state to a device, cpu or nvme."""
    named = ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")
    return any(said(name) == device for name in named)


def ways() -> dict[str, str]:
    """Return the variables that decide on sharding, parallelism and fp8, without paths of the machine."""
    return {
        name: value.strip().lower()
        for name, value in recorded_variables.recorded().items()
        if name.startswith(_WAYS)
    }


def timeout_seconds() -> int:
    """Return the seconds that a process waits for others before it raises an error (default: 1800)."""
    setting = said(TIMEOUT, "1800")
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", setting):
        raise UserError(
            Problem(
                "the timeout must be an integer number of seconds",
                TIMEOUT,
                found=setting,
                expected="an integer from 1 to 999999999",
                fix=f"{TIMEOUT}=600",
                code="value-range",
            )
        )
    return int(setting)


def leave(code: int) -> int:
    """Destroy the process group and return the exit code. Exit at once if a run with NCCL failed.

    NCCL can wait for processes that have ended while its communicators are destroyed. torch would destroy
    them when the interpreter ends. The launcher ends the other ranks only after this one.
    """
    torch: Any = sys.modules.get("torch")
    if not (torch and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return code
    if code and "nccl" in torch.distributed.get_backend_config():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if not code:
        torch.distributed.destroy_process_group()
    return code


def report(message: str, when: float) -> None:
    """Write this process's error message to the file where torch's launcher looks for it.

    The launcher prints the first error at its end.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(path).write_text(json.dumps({"message": message, "timestamp": int(when)}), encoding="utf-8")


def lost(error: BaseException) -> Problem | None:
    """Return the problem if an error means that another process ended or does not answer."""
    text = " ".join(str(error).split())
    if int(said("WORLD_SIZE", "1")) < 2 or not _LOST.search(text):
        return None
    fix = f"read the first error above; {TIMEOUT} sets the timeout ({timeout_seconds()} s)"
    fix += "; set GLOO_SOCKET_IFNAME to the network between the machines" if "[127." in text else ""
    return Problem(GONE, found=text[:200], fix=fix, code="launch-lost")


ACCELERATE = "FINETUNE_ACCELERATE"  # environment variable with the accelerate config of this launch
