"""What a launcher's environment asks for.

`accelerate launch` hands its config file on as environment variables; they are all that a process sees of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Problem, UserError
from finetune.distributed import recorded_variables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


FROZEN = "frozen base"  # what `mixed_precision: fp8` means without an fp8_config
BACKENDS = {"TE": "TransformerEngine", "AO": "torchao"}  # of an fp8_config that this project serves
TIMEOUT = "FINETUNE_TIMEOUT_SECONDS"
# Seconds that NCCL waits longer: its watchdog ends a process by SIGABRT, and in each step ranks meet by gloo
# too, whose timeout is an error with a message. NCCL's clock starts earlier, when the step is queued
NCCL_LATER = 60
TE_TOKENS = 16  # of which TransformerEngine's fp8 products take multiples, as Accelerate's own script has it
ONCE = "what backward runs again would be in bf16, and other tensors than it kept"
GONE = "another process of this launch ended, or did not answer in time"
_WAYS = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_FP8_")
_LOST = re.compile("gloo|NCCL|Connection (closed|reset)|[Tt]imed out|Socket Timeout|recv.*failed|Broken pipe")
CONFIG = "accelerate config"  # as messages call the other side


class Fp8(NamedTuple):
    """What an fp8 launch asks for."""

    kind: str
    """Empty: nothing; `FROZEN`; `TE` or `AO`: Accelerate's own path."""
    reason: str = ""

    @property
    def precision(self) -> str:
        """That of the Accelerator: the frozen base's products give bf16, which is all it has to know."""
        return "bf16" if self.kind == FROZEN else "fp8"


def said(name: str, default: str = "") -> str:
    """A variable of the launch, without regard to how it is written."""
    return os.environ.get(name, default).strip().lower()


def on(name: str) -> bool:
    return said(name) in ("true", "1", "yes")


@contextlib.contextmanager
def under(variables: Mapping[str, str]) -> Iterator[None]:
    """As in the one process of a launch that sets these."""
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
    """What the launch's precision means if it is fp8."""
    if said("ACCELERATE_MIXED_PRECISION") != "fp8":
        return Fp8("")
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "").strip()
    if not backend:
        return Fp8(FROZEN, "mixed_precision: fp8 means the frozen fp8 base; all else in bf16")
    return Fp8(backend, f"its mixed_precision: fp8 by {BACKENDS.get(backend, backend)}")


def sharded() -> str:
    """What the launch splits the weights with; the empty string if nothing does."""
    if on("ACCELERATE_USE_FSDP"):
        return "FSDP"
    return "DeepSpeed" if on("ACCELERATE_USE_DEEPSPEED") and zero_stage() == "3" else ""


def splitter() -> str:
    """What splits the optimizer's state, and from ZeRO-3 on the weights; the empty string if nothing does."""
    return "FSDP" if on("ACCELERATE_USE_FSDP") else "DeepSpeed" if zero_stage() else ""


def keeps_layers() -> bool:
    """Whether FSDP keeps a layer's weights whole from forward to backward, and so all layers' at once."""
    return sharded() == "FSDP" and said("FSDP_RESHARD_AFTER_FORWARD", "true") in ("false", "0", "no")


def read_by_rank_0() -> bool:
    """Whether rank 0 alone reads the base, and the others get their parts from it."""
    return sharded() == "FSDP" and on("FSDP_CPU_RAM_EFFICIENT_LOADING")


def eager(*, plain: bool) -> str:
    """Why `speed.compile: auto` does not compile under this launch; the empty string if it may.

    Args:
        plain: an adapter on a base that is not stored as codes; what was measured under FSDP2.
    """
    if fp8().kind == "TE":
        return "TransformerEngine's delayed scaling breaks the graph at each layer"
    if sharded() == "FSDP" and plain and parallel("CP") == 1 and not on("FSDP_OFFLOAD_PARAMS"):
        return ""
    only = ", but adapters on a plain base that stays on the GPUs" if sharded() == "FSDP" else ""
    return f"not measured where {sharded()} splits the weights{only}" if sharded() else ""


def zero_stage() -> str:
    return said("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2") if on("ACCELERATE_USE_DEEPSPEED") else ""


def means_fp8(quantization: str) -> bool:
    """Whether it is the launch alone that says how the base is stored: in fp8."""
    return fp8().kind == FROZEN and quantization == "auto"


def device_options(device: str) -> dict[str, Any]:
    """SFTConfig's keys for a device. DeepSpeed runs on CPUs too, but not under `use_cpu`: that starts DDP."""
    zero = device == "cpu" and bool(zero_stage())
    return {"use_cpu": device == "cpu" and not zero, "ddp_backend": "gloo" if zero else None}


def row_options(*, flat: bool, kernel_multiple: int = 1) -> dict[str, Any]:
    """SFTConfig's `pad_to_multiple_of`, where a launch or a kernel needs one.

    Processes that share a row have two pieces of it each, all of one length. TransformerEngine's products
    take multiples of `TE_TOKENS`.

    Args:
        flat: rows stand end to end, and have one length.
        kernel_multiple: what the attention kernel wants (`kernel_limits.LENGTH_MULTIPLES`).
    """
    multiple = 2 * parallel("CP") if parallel("CP") > 1 else 1
    multiple = math.lcm(multiple, TE_TOKENS) if fp8().kind == "TE" and not flat else multiple
    multiple = math.lcm(multiple, kernel_multiple)
    return {"pad_to_multiple_of": multiple} if multiple > 1 else {}


def parallel(kind: str) -> int:
    """A size of the launch's `parallelism_config`: `CP`, `SP`, `TP`, `DP_SHARD` or `DP_REPLICATE`."""
    used = on("ACCELERATE_USE_PARALLELISM_CONFIG")
    return int(said(f"PARALLELISM_CONFIG_{kind}_SIZE", "1")) if used else 1


def offloads_to(device: str) -> bool:
    """Whether DeepSpeed keeps weights or what the optimizer has there: cpu, nvme."""
    named = ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")
    return any(said(name) == device for name in named)


def ways() -> dict[str, str]:
    """How this launch splits, shares and rounds, by variable; but places of a machine."""
    return {
        name: value.strip().lower()
        for name, value in recorded_variables.recorded().items()
        if name.startswith(_WAYS)
    }


def timeout_seconds() -> int:
    """How long a process waits for the others in one exchange, before it says that it did (default: 1800)."""
    given = said(TIMEOUT, "1800")
    if not given.isdecimal() or int(given) < 1:
        raise UserError(Problem("a whole number of seconds", TIMEOUT, found=given, fix=f"{TIMEOUT}=600"))
    return int(given)


def leave(code: int) -> int:
    """The exit code, with no process group left; at once where a run failed and NCCL's communicators live: to
    end them can mean to wait for who is gone.

    torch ends them while the interpreter does, and the launcher ends the other ranks only when this one has.
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
    """Leave this process's message where torch's launcher looks for it: it says the first one last."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = json.dumps({"message": message, "timestamp": int(when)})
        Path(path).write_text(text, encoding="utf-8")


def lost(error: BaseException) -> str:
    """What to say of an error that means that another process is gone, or does not answer; else nothing."""
    text = " ".join(str(error).split())
    if int(said("WORLD_SIZE", "1")) < 2 or not _LOST.search(text):
        return ""
    fix = f"what the first process that failed said; {TIMEOUT} is how long one waits ({timeout_seconds()} s)"
    fix += "; GLOO_SOCKET_IFNAME names the network between machines" if "[127." in text else ""
    return str(Problem(GONE, found=text[:200], fix=fix))


ACCELERATE = "FINETUNE_ACCELERATE"  # of the environment: the config that this launch was asked for by
