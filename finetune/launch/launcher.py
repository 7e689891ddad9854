"""One process for each GPU: a command that needs several replaces itself by `accelerate launch` of itself.

`python -m finetune.launch ...` is `accelerate launch ...` that ends with the exit code of the first process
that failed, and with its message as the last thing said; Accelerate's own ends with 1 and a traceback. A
signal is passed on and waited for: a run that saves and leaves with 75 does so under a launcher too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from finetune.autoconfig.batch_size import most_processes
from finetune.autoconfig.mixed_precision import default_precision
from finetune.core import shipped_files, signals, standard_streams
from finetune.core.command_lines import program
from finetune.core.errors import Exit, Problem, UserError
from finetune.distributed import launch_environment
from finetune.distributed.launch_environment import ACCELERATE
from finetune.hardware.detection import detect
from finetune.launch import accelerate_config

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Train

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED = "FINETUNE_LAUNCH_STOPPED"  # set for processes that are begun again after a signal
KILLED_LATER = 20  # seconds; torch's launcher waits 30 before it kills who does not end when told to


def launched() -> bool:
    """Whether `accelerate launch` or `torchrun` started this process."""
    return any(name in os.environ for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"))


def if_needed(
    arguments: list[str],
    choose: Callable[[Hardware], Start],
    config: str | None = None,
) -> None:
    """Replace this process by `accelerate launch` where a config was named or several GPUs are visible.

    In a process of a launch nothing is replaced; the config that the launcher read is looked at instead.

    Args:
        arguments: of the `finetune` command, its name first.
        choose: how to start on this machine; called where several GPUs are visible and no config was named.
        config: an accelerate config: a file, or the name of a shipped one.

    Raises:
        UserError: no such config, or one that Accelerate would not follow as it is written, or one inside
            a launch (exit 2); what `choose` refuses.
    """
    if os.environ.get(STOPPED):
        sys.exit(Exit.STOPPED)
    if launched():
        signals.end_with_parent()  # a launcher that is killed can tell nobody
        refuse_second(config)
        return check_the_launchers()
    extra: list[str] = []
    named = {ACCELERATE: config or ""}
    if config is None:
        machine = detect()
        if machine.count < 2:
            return
        start = choose(machine)
        standard_streams.say(f"note: {start.reason}")
        if not start.config:
            return
        config = str(shipped_files.folder("accelerate_configs") / f"{start.config}.yaml")
        extra = ["--num_processes", str(start.processes)]
        extra += ["--mixed_precision", default_precision(machine).value]
    config = str(find(config))
    check(Path(config))
    check_count(Path(config), extra, arguments)
    command = ["--config_file", config, *extra, "-m", "finetune", *arguments]
    standard_streams.say(shlex.join(["accelerate", "launch", *command]))
    os.environ |= named | accelerate_config.environment(Path(config))
    os.execv(sys.executable, [sys.executable, "-m", "finetune.launch", *command])


def command_line(words: list[str]) -> list[str]:
    """How a user types a `finetune train` that runs in the same processes: with the launcher of this one."""
    own = sys.argv[1:]
    launcher = _launcher_of(own) if words[0] == "train" else []
    return [*launcher, *(words if own[:1] == ["train"] else words[1:])] if launcher else [*program(), *words]


def _launcher_of(own: list[str]) -> list[str]:
    """The command line of the launcher that started this process, up to `own` arguments; empty: the command
    launched itself, or nothing did."""
    if ACCELERATE in os.environ or not launched() or not own:
        return []
    try:
        given = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []
    if given[-len(own) :] != own:
        return []
    script = Path(given[1])
    found = shutil.which(script.name)
    on_the_path = found is not None and script.is_file() and Path(found).samefile(script)
    return [script.name, *given[2 : -len(own)]] if on_the_path else given[: -len(own)]


def data_parallel(train: Train, machine: Hardware) -> Start:
    """The whole base on each GPU, of as many as a step's rows can be split over."""
    count, fewer = most_processes(train, machine.count)
    config = "ddp_8" if count > 1 else "single_gpu"
    return Start(config, fewer or f"{count} GPUs: the whole base on each", count)


def refuse_second(config: str | None) -> None:
    """Refuse a config named inside a launch: the launcher has decided already (exit 2)."""
    if config is not None:
        by = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in os.environ else "torchrun"
        what = f"starts a launch, and {by} has started this process: the config would not be read"
        fix = "finetune train RECIPE --accelerate CONFIG, or accelerate launch --config_file CONFIG "
        raise UserError(Problem(what, "--accelerate", found=config, fix=f"{fix}scripts/train.py RECIPE"))


def check_the_launchers() -> None:
    """Refuse a config that `accelerate launch`, which started this process, passed over parts of: `use_cpu`
    where there are GPUs too; and its `--multi_gpu` where there is none."""
    with contextlib.suppress(psutil.Error):
        given = [part for word in psutil.Process(os.getppid()).cmdline() for part in word.split("=", 1)]
        words = [word.replace("-", "_") for word in given]  # Accelerate takes either
        named = [after for word, after in zip(words, given[1:], strict=False) if word == "__config_file"]
        for path in map(Path, named or default_config(words)):
            if path.is_file():
                check(path)
                check_cpu(path)
        if "__multi_gpu" in words and not launch_environment.on("ACCELERATE_USE_CPU"):
            check_gpu("accelerate launch", "--multi_gpu")


def default_config(words: list[str]) -> list[str]:
    """The config that `accelerate launch` reads where none is named, `accelerate config` has written it."""
    from accelerate.commands.config.config_args import default_config_file

    starts = {"launch", "accelerate.commands.launch", "finetune.launch"} & {*words}
    starts |= {"accelerate_launch"} & {Path(word).name for word in words[:2]}  # a script beside `accelerate`
    return [default_config_file] if starts and "__cpu" not in words else []


def check(config: Path) -> None:
    """Refuse a config that Accelerate would not follow as it is written, by what it says or what is here."""
    accelerate_config.check(config)
    check_device(config)


def check_device(config: Path) -> None:
    """Refuse a config for GPUs where there is none: Accelerate would take the CPU without a word.

    DeepSpeed alone trains on CPUs by such a config (`launch_environment.device_options`).

    Raises:
        UserError: there is no GPU, and nothing says that the CPU is meant (exit 3).
    """
    given = accelerate_config.read(config)
    meant = given.get("use_cpu") is True or launch_environment.on("ACCELERATE_USE_CPU")
    if not meant and given.get("distributed_type") != "DEEPSPEED":
        check_gpu(str(config), "use_cpu: false")


def check_cpu(config: Path) -> None:
    """Refuse `use_cpu` of several processes that Accelerate's own launcher did not hand on (exit 2)."""
    if accelerate_config.environment(config) and detect().device == "cuda":  # which looks at the variable
        what = "Accelerate's launcher hands on no use_cpu of several processes: these would train on GPUs"
        fix = "python -m finetune.launch in place of accelerate launch, or ACCELERATE_USE_CPU=true"
        raise UserError(Problem(what, "use_cpu", str(config), found="true, and GPUs are visible", fix=fix))


def check_count(config: Path, extra: list[str], arguments: list[str]) -> None:
    """Refuse a number of processes that this machine can't start, or that the config leaves open (exit 2)."""
    given, machine = accelerate_config.read(config), detect()
    count, machines = given.get("num_processes"), given.get("num_machines") or 1
    if count is None and given.get("distributed_type") != "NO":
        count = -1
    few = machine.device == "cuda" and isinstance(count, int) and count > machine.count * machines
    apart = machines > 1 and not given.get("main_process_ip")  # which a config of one machine's own may say
    if not extra and (count == -1 or apart or few):
        what = "the launcher's command line must say how many processes to start, and on which machines"
        found = f"num_processes: {count}, num_machines: {machines}"
        found += f"; {machine.count} GPUs here" if machine.device == "cuda" else ""
        here, sizes = max(1, machine.count) * machines, accelerate_config.sizes(given)
        words = ["--num_machines N --machine_rank I --main_process_ip HOST"] * (machines > 1)
        words += ["-m", "finetune", *arguments]
        fix = f"accelerate launch --config_file {config} --num_processes {sizes if sizes > 1 else here}"
        fix = " ".join([fix, *words])
        if sizes > here:  # Accelerate starts as many as the sizes multiply to, or none
            what = "parallelism_config is for more processes than there are GPUs"
            found, fix = f"{found}; sizes of {sizes}", f"a copy of it whose sizes multiply to {here}"
        raise UserError(Problem(what, where=str(config), found=found, fix=fix))


def check_gpu(where: str, found: str) -> None:
    """What asks for GPUs needs one (exit 3)."""
    if detect().device != "cuda":
        what = "this launch is for GPUs, and no GPU is visible here"
        fix = "accelerate_configs/cpu.yaml, or cpu_2.yaml for two processes"
        raise UserError(Problem(what, where=where, found=found, fix=fix), code=Exit.ENVIRONMENT)


def find(config: str) -> Path:
    """The file that `--accelerate` names.

    Raises:
        UserError: no such file, and no shipped config of that name (exit 2).
    """
    if Path(config).is_file():
        return Path(config)
    own = Path(config).parent.name not in ("", "accelerate_configs")  # a place of the user's
    shelf = shipped_files.folder("accelerate_configs") / f"{Path(config).stem}.yaml"
    if own or not shelf.is_file():
        known = ", ".join(sorted(path.stem for path in shelf.parent.glob("*.yaml")))
        expected = f"a file, or one of {known}"
        raise UserError(Problem("no such accelerate config", found=config, expected=expected))
    return shelf


def main(given: list[str]) -> int:
    """`accelerate launch` of `given`; the exit code of the first process that failed."""
    from subprocess import CalledProcessError

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torch's launcher would end with these itself, and kill what is still saving after 30 seconds
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
    for number in FORWARDED:
        signal.signal(number, forward)
    asked = launch_command_parser().parse_args(given)
    try:
        named = (
            [asked.config_file] if asked.config_file else default_config(["launch", *["__cpu"] * asked.cpu])
        )
        files = [path for path in map(Path, named) if path.is_file()]
        for path in files:
            accelerate_config.check(path)
            os.environ |= accelerate_config.environment(path)
        config = accelerate_config.read(files[0]) if files else {}
        check_shares(asked, config)
        begin_again(asked, config)
        launch_command(asked)
    except ValueError as error:  # what Accelerate says of its options
        _say_problems(Problem("Accelerate can't start this launch", found=str(error)))
        return Exit.INPUT
    except UserError as error:
        _say_problems(*error.problems)
        return error.code
    except ChildFailedError as error:
        rank, failure = first(error.failures)
        if failure.exitcode == Exit.STOPPED:  # as it was told to, which it has said itself
            return Exit.STOPPED
        if failure.exitcode == -signal.SIGABRT:
            what = f"rank {rank} was ended by SIGABRT, as NCCL does where another one does not answer in time"
            _say_problems(Problem(what, fix=f"what stands above; {launch_environment.TIMEOUT}"))
            return Exit.TRAINING
        if isinstance(failure.message, str) and not failure.message.startswith("To enable traceback"):
            standard_streams.say(f"rank {rank} failed first:", *failure.message.split("\n"), error=True)
        else:
            standard_streams.say(f"rank {rank} failed first, with the traceback above", error=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except CalledProcessError as error:  # one process, which has said why itself
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    return 0


def _say_problems(*problems: Problem) -> None:
    standard_streams.say(*(line for one in problems for line in str(one).split("\n")), error=True)


def check_shares(asked: argparse.Namespace, config: dict[str, Any]) -> None:
    """Refuse processes that can't be as many on each machine: Accelerate would start fewer (exit 2)."""
    given = [getattr(asked, name) or config.get(name) or 1 for name in ("num_processes", "num_machines")]
    count, machines = map(int, given)
    if count > 0 and count % machines:
        low = count // machines * machines
        what = f"{count} processes can't be as many on each of {machines} machines: {low} would start"
        fix = f"--num_processes {low or machines} or {low + machines}; torchrun, where machines differ"
        raise UserError(Problem(what, "--num_processes", found=str(count), fix=fix))


def begin_again(asked: Any, config: dict[str, Any]) -> None:
    """Have `--max_restarts` find its processes anew: as Accelerate starts them, they look for those that are
    gone (torch 2.13). Of several machines torchrun alone does it (exit 2)."""
    if not asked.max_restarts:
        return
    machines = int(asked.num_machines or config.get("num_machines") or 1)
    if machines > 1 and (asked.rdzv_backend or "static") == "static":
        what = "processes of several machines are begun again by torchrun alone"
        fix = "--max_restarts 0, or torchrun as scripts/slurm/train.sbatch has it in its last lines"
        found = f"{asked.max_restarts}, on {machines} machines"
        raise UserError(Problem(what, "--max_restarts", found=found, fix=fix))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    asked.standalone = machines == 1  # torch's c10d rendezvous, on a free port


def first(failures: dict[int, Any]) -> tuple[int, Any]:
    """Rank and failure of the process that the others' ends came of, by torch's account of each."""
    began = min(one.timestamp for one in failures.values())

    def order(item: tuple[int, Any]) -> tuple[int, float, int]:
        rank, one = item
        # the launcher ends the others as soon as one has failed, and kills them if they do not listen
        killed = one.exitcode == -signal.SIGKILL and one.timestamp > began + KILLED_LATER
        told = killed or one.exitcode == -signal.SIGTERM
        lost = (
            launch_environment.GONE in str(one.message) or one.exitcode == -signal.SIGABRT
        )  # NCCL's watchdog
        kind = 3 if told else 2 if lost else int(one.exitcode == Exit.STOPPED)
        return kind, one.timestamp, rank

    return min(failures.items(), key=order)


def forward(number: int, frame: object) -> None:
    """Hand a signal to the processes of the launch; they end by themselves, and the launcher after them.

    Before there are any it ends the launch. Processes that `--max_restarts` begins again end at once. It
    imports nothing: a second signal would find what is half imported.
    """
    os.environ[STOPPED] = "1"
    children = psutil.Process().children()
    if not children:
        sys.exit(Exit.STOPPED)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


class Start(NamedTuple):
    """How a command starts on a machine with several GPUs."""

    config: str
    """The name of a shipped accelerate config; empty: one process, in place."""
    reason: str
    processes: int
