"""Start one process per GPU: a command that needs several processes replaces itself by `accelerate launch`.

`python -m finetune.launch ...` works as `accelerate launch ...`, but returns the exit code of the first
process that failed, and prints its message last. Accelerate's own launcher ends with 1 and a traceback. The
launcher forwards signals and waits, so that a run can save and exit with 75.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from finetune.autoconfig.batch_size import most_processes
from finetune.autoconfig.mixed_precision import default_precision
from finetune.core import shipped_files, signals, standard_streams
from finetune.core.command_lines import program
from finetune.core.errors import Exit, Problem, UserError, nearest
from finetune.distributed import launch_environment
from finetune.distributed.launch_environment import ACCELERATE
from finetune.hardware.detection import Hardware, detect
from finetune.launch import accelerate_config
from finetune.recipe.recipe_errors import choices
from finetune.recipe.schema import Train

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED = "FINETUNE_LAUNCH_STOPPED"  # set for processes that restart after a signal
KILLED_LATER = 20  # seconds; torch's launcher kills a process that has not ended 30 s after SIGTERM


def launched() -> bool:
    """Return whether `accelerate launch` or `torchrun` started this process."""
    return any(name in os.environ for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"))


def if_needed(
    arguments: list[str],
    choose: Callable[[Hardware], LaunchChoice],
    config: str | None = None,
) -> None:
    """Replace this process by `accelerate launch` if a config was named or several GPUs are visible.

    In a process of a launch, only check the config that the launcher has read.

    Args:
        arguments: the arguments of the `finetune` command, with its name first.
        choose: chooses the launch for this machine if several GPUs are visible and `config` is `None`.
        config: an accelerate config: a file, or the name of a shipped config.

    Raises:
        UserError: the config does not exist, Accelerate would ignore parts of it, or a launch has started
            this process already (exit 2); or `choose` raises an error.
    """
    if os.environ.get(STOPPED):
        sys.exit(Exit.STOPPED)
    if launched():
        signals.end_with_parent()  # a killed launcher can't send a signal
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
        extra = [
            "--num_processes",
            str(start.processes),
            "--mixed_precision",
            default_precision(machine).value,
        ]
    config = str(find(config))
    check(Path(config))
    check_count(Path(config), extra, arguments)
    command = ["--config_file", config, *extra, "-m", "finetune", *arguments]
    standard_streams.say(shlex.join(["accelerate", "launch", *command]))
    os.environ |= named | accelerate_config.environment(Path(config))
    os.execv(sys.executable, [sys.executable, "-m", "finetune.launch", *command])


def command_line(words: list[str]) -> list[str]:
    """Return a `finetune train` command with the launcher of this process, as a user types it."""
    own = sys.argv[1:]
    launcher = _launcher_of(own) if words[0] == "train" else []
    return [*launcher, *(words if own[:1] == ["train"] else words[1:])] if launcher else [*program(), *words]


def _launcher_of(own: list[str]) -> list[str]:
    """Return the command line of the launcher without `own` arguments.

    The list is empty if the command launched itself, or if no launcher started this process.
    """
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


def data_parallel(train: Train, machine: Hardware) -> LaunchChoice:
    """Choose data parallelism over as many GPUs as the sequences of a step can be divided among."""
    count, fewer = most_processes(train, machine.count)
    config = "ddp_8" if count > 1 else "single_gpu"
    return LaunchChoice(config, fewer or f"{count} GPUs, each with the whole base model", count)


def refuse_second(config: str | None) -> None:
    """Refuse a config that is named inside a launch, which has its own config (exit 2)."""
    if config is not None:
        by = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in os.environ else "torchrun"
        raise UserError(
            Problem(
                f"{by} has started this process already, so finetune would ignore the config",
                "--accelerate",
                found=config,
                fix="`finetune train RECIPE --accelerate CONFIG`, or `accelerate launch --config_file CONFIG "
                "scripts/train.py RECIPE`",
                code="launch-config",
            )
        )


def check_the_launchers() -> None:
    """Check the config of the `accelerate launch` that started this process.

    It ignores `use_cpu` on a machine with GPUs, and accepts `--multi_gpu` on a machine without GPUs.
    """
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
    """Return the config that `accelerate launch` reads by default, written by `accelerate config`."""
    from accelerate.commands.config.config_args import default_config_file

    starts = {"launch", "accelerate.commands.launch", "finetune.launch"} & {*words}
    starts |= {"accelerate_launch"} & {Path(word).name for word in words[:2]}  # a script beside `accelerate`
    return [default_config_file] if starts and "__cpu" not in words else []


def check(config: Path) -> None:
    """Refuse a config that Accelerate would not follow, because of its content or of this machine."""
    accelerate_config.check(config)
    check_device(config)


def check_device(config: Path) -> None:
    """Refuse a config for GPUs on a machine without GPUs, where Accelerate would silently use the CPU.

    Only DeepSpeed trains on CPUs with such a config (`launch_environment.device_options`).

    Raises:
        UserError: there is no GPU, and the config does not ask for the CPU (exit 3).
    """
    given = accelerate_config.read(config)
    meant = given.get("use_cpu") is True or launch_environment.on("ACCELERATE_USE_CPU")
    if not meant and given.get("distributed_type") != "DEEPSPEED":
        check_gpu(str(config), "use_cpu: false")


def check_cpu(config: Path) -> None:
    """Refuse `use_cpu` with several processes if Accelerate's own launcher has ignored it (exit 2)."""
    if accelerate_config.environment(config) and detect().device == "cuda":  # `detect` reads the variable
        raise UserError(
            Problem(
                "Accelerate's launcher ignores use_cpu for several processes, which would train on GPUs",
                "use_cpu",
                where=str(config),
                found="true, and GPUs are visible",
                fix=(
                    "use `python -m finetune.launch` instead of `accelerate launch`, or set "
                    "ACCELERATE_USE_CPU=true"
                ),
                code="launch-config",
            )
        )


def check_count(config: Path, extra: list[str], arguments: list[str]) -> None:
    """Refuse a number of processes that is missing or that this machine can't start (exit 2)."""
    given, machine = accelerate_config.read(config), detect()
    count, machines = given.get("num_processes"), given.get("num_machines") or 1
    if count is None and given.get("distributed_type") != "NO":
        count = -1
    few = machine.device == "cuda" and isinstance(count, int) and count > machine.count * machines
    apart = machines > 1 and not given.get("main_process_ip")
    if not extra and (count == -1 or apart or few):
        what = "the command line must give the number of processes, and the machines if there are several"
        found = f"num_processes: {count}, num_machines: {machines}"
        found += f"; {machine.count} GPUs here" if machine.device == "cuda" else ""
        here, sizes = max(1, machine.count) * machines, accelerate_config.sizes(given)
        words = ["--num_machines N --machine_rank I --main_process_ip HOST"] * (machines > 1)
        words += ["-m", "finetune", *arguments]
        fix = f"accelerate launch --config_file {config} --num_processes {sizes if sizes > 1 else here}"
        fix = " ".join([fix, *words])
        if sizes > here:  # Accelerate starts this number of processes, or none
            what = "parallelism_config needs more processes than there are GPUs"
            found, fix = (
                f"{found}; {sizes} by its sizes",
                f"set sizes that multiply to {here}",
            )
        raise UserError(Problem(what, where=str(config), found=found, fix=fix, code="launch-config"))


def check_gpu(where: str, found: str) -> None:
    """Refuse a launch for GPUs if no GPU is visible (exit 3)."""
    if detect().device != "cuda":
        raise UserError(
            Problem(
                "this launch is for GPUs, and no GPU is visible",
                where=where,
                found=found,
                fix="use accelerate_configs/cpu.yaml, or cpu_2.yaml for two processes",
                code="hardware",
            ),
            code=Exit.ENVIRONMENT,
        )


def find(config: str, option: str = "--accelerate") -> Path:
    """Return the file that an option names.

    Raises:
        UserError: there is neither a file nor a shipped config with this name (exit 2).
    """
    if Path(config).is_file():
        return Path(config)
    own = Path(config).parent.name not in ("", "accelerate_configs")  # a folder of the user
    shelf = shipped_files.folder("accelerate_configs") / f"{Path(config).stem}.yaml"
    if own or not shelf.is_file():
        known = [path.stem for path in shelf.parent.glob("*.yaml")]
        near = nearest(Path(config).stem, known)
        raise UserError(
            Problem(
                "finetune can't find this accelerate config",
                option,
                found=config,
                expected=f"a file, or {choices(Path(config).stem, known)}",
                fix=f"{option} {near}" if near else "",
                code="launch-config",
            )
        )
    return shelf


@contextlib.contextmanager
def keep_import_path() -> Iterator[None]:
    """Start DeepSpeed's workers without the working directory on their import path.

    Accelerate would add it (`prepare_deepspeed_cmd_env`), and Python imports a `sitecustomize.py` from there.
    This process is only a launcher, so Accelerate's function is replaced in it within the context.
    """
    from accelerate.utils import launch

    def unchanged(env_var_name: str, path_to_add: str) -> str:
        return os.environ.get(env_var_name, "")

    before, launch.env_var_path_add = launch.env_var_path_add, unchanged
    try:
        yield
    finally:
        launch.env_var_path_add = before


def main(given: list[str]) -> int:
    """Run `accelerate launch` with the arguments. Return the exit code of the first failed process."""
    from subprocess import CalledProcessError

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # At these signals, torch's launcher would end and kill processes that still save after 30 s
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
    for number in FORWARDED:
        signal.signal(number, forward)
    arguments = launch_command_parser().parse_args(given)
    try:
        if arguments.config_file:
            arguments.config_file = str(find(arguments.config_file, "--config_file"))
        named = (
            [arguments.config_file]
            if arguments.config_file
            else default_config(["launch", *["__cpu"] * arguments.cpu])
        )
        files = [path for path in map(Path, named) if path.is_file()]
        for path in files:
            accelerate_config.check(path)
            os.environ |= accelerate_config.environment(path)
        config = accelerate_config.read(files[0]) if files else {}
        check_shares(arguments, config)
        begin_again(arguments, config)
        with keep_import_path():
            launch_command(arguments)
    except ValueError as error:  # Accelerate has refused its options
        _say_problems(
            Problem(
                "Accelerate can't start this launch",
                found=str(error),
                fix="correct this option, or remove it",
                code="launch-config",
            )
        )
        return Exit.INPUT
    except UserError as error:
        _say_problems(*error.problems)
        return error.code
    except ChildFailedError as error:
        rank, failure = first(error.failures)
        if failure.exitcode == Exit.STOPPED:  # the process has printed why
            return Exit.STOPPED
        if failure.exitcode == -signal.SIGABRT:
            what, timeout = f"SIGABRT ended rank {rank}", launch_environment.TIMEOUT
            _say_problems(
                Problem(
                    what,
                    why="NCCL sends it if another rank does not answer in time",
                    fix=f"find the first error above, or set {timeout} to a longer time in seconds",
                    code="launch-lost",
                )
            )
            return Exit.TRAINING
        if isinstance(failure.message, str) and not failure.message.startswith("To enable traceback"):
            standard_streams.say(f"rank {rank} failed first:", *failure.message.split("\n"), error=True)
        else:
            standard_streams.say(f"rank {rank} failed first, with the traceback above", error=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except CalledProcessError as error:  # a single process, which has printed why
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    return 0


def _say_problems(*problems: Problem) -> None:
    standard_streams.say(*(line for one in problems for line in str(one).split("\n")), error=True)


def check_shares(requested: argparse.Namespace, config: dict[str, Any]) -> None:
    """Refuse a number of processes that the number of machines does not divide (exit 2)."""
    given = [getattr(requested, name) or config.get(name) or 1 for name in ("num_processes", "num_machines")]
    count, machines = map(int, given)
    if count > 0 and count % machines:
        low = count // machines * machines
        raise UserError(
            Problem(
                f"{machines} machines can't share {count} processes equally, so Accelerate would start {low}",
                "--num_processes",
                found=str(count),
                fix=(
                    f"--num_processes {low or machines} or {low + machines}, or torchrun for unequal machines"
                ),
                code="launch-config",
            )
        )


def begin_again(requested: argparse.Namespace, config: dict[str, Any]) -> None:
    """Make `--max_restarts` work. By default, restarted processes look for ended processes (torch 2.13).

    Raises:
        UserError: restarts on several machines, which only torchrun supports (exit 2).
    """
    if not requested.max_restarts:
        return
    machines = int(requested.num_machines or config.get("num_machines") or 1)
    if machines > 1 and (requested.rdzv_backend or "static") == "static":
        raise UserError(
            Problem(
                "only torchrun can restart processes on several machines",
                "--max_restarts",
                found=f"{requested.max_restarts}, on {machines} machines",
                fix="--max_restarts 0, or torchrun as in the last lines of scripts/slurm/train.sbatch",
                code="launch-config",
            )
        )
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    requested.standalone = machines == 1  # torch's c10d rendezvous, on a free port


def first(failures: dict[int, Any]) -> tuple[int, Any]:
    """Return rank and failure of the process that failed first, by torch's report of each failure."""
    began = min(one.timestamp for one in failures.values())

    def order(item: tuple[int, Any]) -> tuple[int, float, int]:
        rank, one = item
        # The launcher ends the other processes when one has failed, and kills them if they do not end.
        killed = one.exitcode == -signal.SIGKILL and one.timestamp > began + KILLED_LATER
        told = killed or one.exitcode == -signal.SIGTERM
        lost = (
            launch_environment.GONE in str(one.message) or one.exitcode == -signal.SIGABRT
        )  # NCCL's watchdog
        kind = 3 if told else 2 if lost else int(one.exitcode == Exit.STOPPED)
        return kind, one.timestamp, rank

    return min(failures.items(), key=order)


def forward(number: int, frame: object) -> None:
    """Forward a signal to the processes of the launch. The launcher ends after them.

    Without processes, end the launch. Processes that `--max_restarts` restarts end at once. The function
    imports nothing, because a second signal could interrupt an import.
    """
    os.environ[STOPPED] = "1"
    children = psutil.Process().children()
    if not children:
        sys.exit(Exit.STOPPED)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


class LaunchChoice(NamedTuple):
    """The launch of a command on a machine with several GPUs."""

    config: str
    """The name of a shipped accelerate config. Empty: one process, without a launch."""
    reason: str
    processes: int
