"""What this machine can do, and what is therefore chosen. Every choice comes with its reason."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune import adapter_types, attention_choice, gpus, launch_env
from finetune.adapter_types import QUANTISED
from finetune.errors import Exit, Problem, UserError
from finetune.upstream import installed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from finetune.attention_choice import Attends, Rows

STORED = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of weights, by storage
FP8_CAPABILITY = (8, 9)  # the first GPUs with fp8 GEMMs: Ada, then Hopper
FP8_MULTIPLE = 16  # fp8 GEMMs want both sides of a weight divisible by it
# Of computation, by precision; of what is not in fp8
DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}


class Choice(NamedTuple):
    value: str
    reason: str


class Start(NamedTuple):
    """How a command starts on a machine with several GPUs."""

    config: str
    """The name of a shipped accelerate config; empty: one process, in place."""
    reason: str
    processes: int


@dataclass(frozen=True)
class Hardware:
    device: str  # cuda | cpu
    name: str
    count: int
    capability: tuple[int, int]  # (0, 0) on the CPU
    memory_gib: float  # of one device
    cpu_cores: int
    host_gib: float | None = None  # that may leave GPUs for the CPU's memory
    here: bool = True  # False: planned for, so nothing is known of its packages

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s of one device, `None` if not in the table."""
        known = gpus.of_device(self.name)
        return known.bf16 if known else None


@dataclass(frozen=True)
class Launch:
    """What the launcher decided, and what was decided in its absence."""

    launcher: str  # accelerate | torchrun | none
    processes: int
    rank: int
    precision: str  # of the Accelerator: no | bf16 | fp16 | fp8
    precision_by: str  # launch | hardware
    precision_reason: str
    sharded: str = ""  # what splits weights between processes: FSDP, DeepSpeed
    fp8: str = ""  # what an fp8 launch means: launch_env.FROZEN, TE, AO
    splitter: str = ""  # what splits the optimizer's state, the weights or not: FSDP, DeepSpeed

    @property
    def keeper(self) -> str:
        """What holds state that checkpoints need, and may not give it: a splitter; TransformerEngine's layers
        the largest values that they remember; DeepSpeed its own scale of a loss in fp16, and files of its own
        on a disk that it offloads to."""
        if self.fp8 == "TE":
            return "TransformerEngine"
        if self.splitter == "DeepSpeed" and self.precision == "fp16":
            return "DeepSpeed in fp16"
        if self.splitter == "DeepSpeed" and launch_env.offloads_to("nvme"):
            return "DeepSpeed on NVMe"
        return self.splitter

    @property
    def sharing(self) -> int:
        """Processes that share each row: a context-parallel group."""
        return launch_env.parallel("CP")

    @property
    def rows_apart(self) -> int:
        """Processes with rows of their own."""
        return self.processes // self.sharing

    @property
    def main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Setup:
    """This machine, this launch and what they mean for loading a model, in training and evaluation alike."""

    hardware: Hardware
    launch: Launch
    attention: Choice
    storage: Choice

    @property
    def attn_implementation(self) -> str:
        """What transformers calls the attention; of a kernel without a mask, the name we register."""
        return attention_choice.IMPLEMENTATIONS.get(self.attention.value, self.attention.value)

    @property
    def compute_dtype(self) -> str:
        """The dtype of matrix products: autocast's, or without autocast that of the stored weights."""
        return compute_dtype(self.launch.precision, self.storage.value)


def compute_dtype(precision: str, storage: str) -> str:
    """The dtype of matrix products, by the launch's precision and the weights' storage."""
    return STORED[storage] if precision == "no" and storage in STORED else DTYPES[precision]


def choose(
    *,
    attention: str,
    base: str,
    adapter_type: str,
    attends: Attends | None = None,
    rows: Rows | None = None,
    against_fp8: Callable[[], str] | None = None,
) -> Setup:
    """Detect everything and choose, in one go.

    Args:
        against_fp8: see `choose_base`.
        attends: what the model's attention computes; `None`: what Llama's does.
        rows: what is trained on; `None`: for evaluation, where attention takes masks and a cache.

    Raises:
        UserError: a request that this machine, its packages or the launch can't meet (exit 3).
    """
    hardware = detect()
    started = launch(hardware)
    # of a model that is opened again (`against_fp8` is None) the run has said how it is stored
    by_launch = started.fp8 == launch_env.FROZEN and base == "auto" and against_fp8 is not None
    if against_fp8 is not None and (kept := whole_base(started)):
        against_fp8 = partial(str, kept)
    storage = choose_base(
        "fp8" if by_launch else base, adapter_type, started.precision, hardware, against_fp8
    )
    if by_launch:
        storage = Choice(storage.value, "the launch's mixed_precision: fp8")
    if (
        storage.value == "int8"
        and hardware.device == "cpu"
        and "use_dora" in adapter_types.find(adapter_type).sets
    ):
        what, fix = "bitsandbytes' int8 weights can't be unpacked on the CPU, which DoRA needs", "base: nf4"
        raise UserError(Problem(what, "speed.base", found="int8", fix=fix), code=Exit.ENVIRONMENT)
    dtype = compute_dtype(started.precision, storage.value)
    chosen = Choice(*attention_choice.choose(attention, hardware, dtype, attends, rows))
    return Setup(hardware, started, chosen, storage)


def detect() -> Hardware:
    """Look at this machine; imports torch."""
    import psutil
    import torch

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if torch.cuda.is_available() and not launch_env.on("ACCELERATE_USE_CPU"):  # the launch's word
        properties = torch.cuda.get_device_properties(0)
        capability = (properties.major, properties.minor)
        memory = properties.total_memory / 2**30
        return Hardware("cuda", properties.name, torch.cuda.device_count(), capability, memory, cores)
    return Hardware("cpu", "CPU", 1, (0, 0), psutil.virtual_memory().total / 2**30, cores)


def launch(hardware: Hardware) -> Launch:
    """How this process was started: `accelerate launch` owns precision, else the hardware decides.

    Raises:
        UserError: bf16 under a GPU that lacks it, fp16 on the CPU, fp8 where there are no fp8 GEMMs (exit 3).
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION")
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    launcher = "accelerate" if asked else "torchrun" if torchrun else "none"
    precision, reason = (asked, "its mixed_precision") if asked else default_precision(hardware)
    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    fp8 = launch_env.fp8()
    if fp8.kind:
        precision, reason = fp8.precision, fp8.reason
        if missing := fp8_missing(hardware, "bf16"):  # Accelerate would take fp16, with a warning in its log
            what, fix = "an fp8 launch needs fp8 GEMMs", "mixed_precision: bf16 in the accelerate config"
            raise UserError(Problem(what, found=missing, fix=fix), code=Exit.ENVIRONMENT)
    check_precision(precision, hardware)
    by = "launch" if asked else "hardware"
    split = launch_env.sharded(), fp8.kind, launch_env.splitter()
    return Launch(launcher, processes, rank, precision, by, reason, *split)


def check_precision(precision: str, machine: Hardware) -> None:
    """Refuse what the machine does not compute in, or not with what training in it needs (exit 3)."""
    if precision == "bf16" and machine.device == "cuda" and machine.capability < (8, 0):
        found = f"{machine.name}, compute capability {machine.capability[0]}.{machine.capability[1]}"
        fix = "mixed_precision: fp16 in the accelerate config"
        raise UserError(Problem("this GPU has no bf16", found=found, fix=fix), code=Exit.ENVIRONMENT)
    if precision == "fp16" and machine.device == "cpu":
        what = "fp16 can't be trained in on the CPU: Accelerate has neither autocast nor a loss scaler for it"
        fix = 'mixed_precision: "no" or bf16 in the accelerate config'
        raise UserError(Problem(what, found="mixed_precision: fp16", fix=fix), code=Exit.ENVIRONMENT)


def default_precision(hardware: Hardware) -> Choice:
    if hardware.device == "cpu":
        return Choice("no", "no GPU: fp32 on the CPU")
    if hardware.capability >= (8, 0):
        return Choice("bf16", f"{hardware.name} has bf16")
    return Choice(
        "fp16",
        f"{hardware.name} has no bf16 (compute capability below 8.0): fp16 with a loss scaler",
    )


def loader(
    hardware: Hardware, processes: int, given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """SFTConfig's loader settings: workers that are ahead of each GPU, none where the CPU itself trains.

    Args:
        processes: of this machine.
        given: `train:`, where it says so itself.

    Raises:
        UserError: workers that are to persist, and there are none (exit 2).
    """
    own = 0 if hardware.device == "cpu" else max(1, min(2, hardware.cpu_cores // processes - 1))
    asked = given.get("dataloader_num_workers")
    workers = own if asked is None else asked
    if given.get("dataloader_persistent_workers") and not workers:  # torch says so once the model has loaded
        what, fix = "there are no workers here that could persist", "dataloader_num_workers: 2"
        raise UserError(Problem(what, "train.dataloader_persistent_workers", found="true", fix=fix))
    if hardware.device == "cpu":
        return {"dataloader_num_workers": 0, "dataloader_pin_memory": False}
    # Of these upstream refuses the first, and torch the second, where there are none
    busy = {"dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True} if workers else {}
    return {
        "dataloader_num_workers": workers,
        **busy,
        "dataloader_pin_memory": True,
        "accelerator_config": {"non_blocking": True},
    }


def whole_base(started: Launch) -> str:
    """Why the launch wants a base that is not in codes, where `auto` decides; the empty string: it may be."""
    if started.sharded:
        return f"{started.sharded} splits the weights, which fast forwards want whole"
    return "DeepSpeed casts the weights, and fp8's are codes" if started.splitter == "DeepSpeed" else ""


def choose_base(
    asked: str,
    adapter_type: str,
    precision: str,
    machine: Hardware,
    against_fp8: Callable[[], str] | None = None,
) -> Choice:
    """How the base weights are stored: quantised, or in the dtype of the launch's precision.

    Args:
        against_fp8: says what in the recipe or the model speaks against fp8 under `auto`, the empty string if
            nothing does; called only where the machine has fp8 GEMMs. `None`: the model is opened again, so
            it is stored as it was in training, if need be without fp8 GEMMs.

    Raises:
        UserError: fp8 where there are no fp8 GEMMs, or the package that quantises is missing (exit 3).
    """
    meant = adapter_types.find(adapter_type).storage
    storage = asked if asked in QUANTISED else meant
    if storage == "fp8":
        return _asked_for_fp8(fp8_missing(machine, precision), reopened=against_fp8 is None)
    if storage:
        problem = missing_package(storage)
        if problem:
            raise UserError(problem, code=Exit.ENVIRONMENT)
        return Choice(storage, "asked for" if asked in QUANTISED else f"{adapter_type} means a 4-bit base")
    if asked == "bf16":
        return Choice("bf16", "asked for")
    if adapter_type == "full":
        return Choice("fp32", "full fine-tuning keeps fp32 weights under autocast")
    stored = {"no": "fp32", "fp16": "fp16"}.get(precision, "bf16")
    if against_fp8 is None or precision != "bf16":
        return Choice(stored, f"precision {precision}")
    reason = fp8_missing(machine, precision) or against_fp8()
    if reason:
        return Choice(stored, f"precision {precision}; not fp8: {reason}")
    return Choice("fp8", f"auto: {machine.name} has fp8 GEMMs, and the layers are large enough to gain")


def fp8_missing(machine: Hardware, precision: str) -> str:
    """Why products on an fp8 base can't run as fp8 GEMMs here; the empty string if they can."""
    if machine.device != "cuda" or machine.capability < FP8_CAPABILITY:
        return f"{machine.name} has no fp8 GEMMs (compute capability 8.9 has: Ada, Hopper or newer)"
    return "" if precision == "bf16" else f"fp8 GEMMs give bf16, and the launch's precision is {precision}"


def _asked_for_fp8(missing: str, *, reopened: bool) -> Choice:
    if not missing:
        return Choice("fp8", "asked for")
    if reopened:
        return Choice("fp8", f"as in training, its products in float32: {missing}")
    fix = "speed.base=auto; for memory adapter.type=qlora"
    problem = Problem("the fp8 base can't be trained on here", "speed.base", found=missing, fix=fix)
    raise UserError(problem, code=Exit.ENVIRONMENT)


def missing_package(storage: str) -> Problem | None:
    """The package that a storage of the base needs and this environment has not."""
    if storage not in QUANTISED or storage == "fp8":
        return None
    package, extra = ("torchao", "quantize") if storage.startswith("torchao") else ("bitsandbytes", "bnb")
    if installed(package):
        return None
    what = f"a base in {storage} needs {package}, which is not installed"
    return Problem(what, "speed.base", fix=f"pip install 'finetune-toolkit[{extra}]'")
