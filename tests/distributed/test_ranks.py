"""The processes of one launch end, stop and choose a batch size together."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from finetune.checkpointing import checkpoints
from finetune.cli import main
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.distributed import collectives, launch_environment
from finetune.experiments.runner import verify_resume
from finetune.launch import launcher
from finetune.reporting import html_report
from finetune.run_folder import lock
from finetune.run_folder.run_folder import RunFolder
from support import two_ranks
from support.faults import SCRIPT, Fault, injected
from support.paths import QUICKSTART, ROOT
from support.runs import metrics

FAILS = """
import argparse, datetime, os, sys, time
from pathlib import Path
from finetune.cli import main
from finetune.distributed import collectives
from finetune.core.errors import Exit, Problem, UserError

def work(options):
    rank, how = int(os.environ["RANK"]), sys.argv[1]
    Path(sys.argv[2]).touch()
    if how == "one fails" and rank == 1:
        raise UserError(Problem("rank 1's disk is full"), code=Exit.ENVIRONMENT)
    import torch.distributed
    collectives.start("cpu")
    if how == "one hangs" and rank == 1:
        time.sleep(300)
    if how == "rank 0 fails alone":
        collectives.from_main(lambda: 1 / 0)
    torch.distributed.barrier()

if __name__ == "__main__":
    sys.exit(main.guarded(work, argparse.Namespace(debug=False)).code)
"""


def two_processes(*given: str, **own: str) -> subprocess.Popen[str]:
    """Launch two processes on the CPU. The caller can read their stderr."""
    config = ROOT / "accelerate_configs" / "cpu_2.yaml"
    command = [sys.executable, "-m", "finetune.launch", "--config_file", str(config), *given]
    own |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env={**os.environ, **own}, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def short(small: tuple[str, str], two_layers: Path, *more: str) -> list[str]:
    """Return the arguments of a training with two layers and no evaluation."""
    given = ["train.max_steps=6", "train.effective_batch_size=8", "train.save_total_limit=null"]
    given += ["adapter.lora_dropout=0.1", "data.validation=null", "eval.forgetting=false"]
    return ["train", str(QUICKSTART), *given, small[0], f"model.name={two_layers}", *more, "--quiet"]


@pytest.mark.usefixtures("the_only_launch")
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        pytest.param(
            "one fails", 3, "rank 1 failed first:\nerror: rank 1's disk is full", marks=pytest.mark.soak
        ),
        ("rank 0 fails alone", 3, "rank 0 failed first:\nerror: finetune failed while it ran"),
        pytest.param("one hangs", 5, "did not answer", marks=pytest.mark.soak),
    ],
)
def test_all_ranks_end_and_the_first_ones_message_is_the_last(
    how: str, code: int, last: str, tmp_path
) -> None:
    """They end at most 5 s after the timeout, counted from when both have begun."""
    script, begun = tmp_path / "fails.py", tmp_path / "begun"
    script.write_text(FAILS)
    wait = 8 if how == "one hangs" else 30  # nothing else is to time out, however late a process starts
    with two_processes(str(script), how, str(begun), **{launch_environment.TIMEOUT: str(wait)}) as process:
        stderr = process.communicate(timeout=120)[1]
        took = time.time() - begun.stat().st_mtime
    assert process.returncode == code, stderr
    assert last in stderr[-700:]
    assert "Traceback" not in stderr.rpartition("failed first")[2]
    assert took < wait + 5, stderr


@pytest.mark.usefixtures("the_only_launch")
@pytest.mark.parametrize(
    ("fault", "code", "last", "seconds"),
    [
        pytest.param(
            "raise",
            5,
            "rank 1 failed first:\nerror: transformers failed while finetune trained the model",
            20,
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "hang", 5, "rank 1 failed first:\nerror: this process hung in a step", 30, marks=pytest.mark.soak
        ),
    ],
)
def test_what_befalls_a_rank_in_a_step_ends_all_in_time(
    fault: str, code: int, last: str, seconds: float, small, two_layers, tmp_path
) -> None:
    """The timeout is 15 s. The other rank says neither that it can resume nor that it failed first.

    Python's own thread prints where the rank hangs.
    """
    run = tmp_path / "run"
    words = short(small, two_layers, f"train.output_dir={run}", "train.logging_steps=1")
    own = {launch_environment.TIMEOUT: "15"}
    with two_processes(SCRIPT, f"{fault} step=3 rank=1", *words, **own) as process:
        stderr = process.communicate(timeout=120)[1]
        took = time.time() - (run / "metrics.jsonl").stat().st_mtime  # since step 2
    assert (process.returncode, took < seconds) == (code, True), (took, stderr)
    assert last in stderr[-700:] and [line["step"] for line in metrics(RunFolder(run))] == [1, 2]
    stack = r"Timeout \(0:00:13.*\n(.*\n)*?.*faults.py\", line \d+ in before_forward"
    assert bool(re.search(stack, stderr)) == (fault == "hang")


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_a_rank_that_is_killed_begins_again_by_max_restarts(small, two_layers, tmp_path) -> None:
    run = tmp_path / "run"
    words = short(small, two_layers, f"train.output_dir={run}", "train.logging_steps=1", "train.save_steps=2")
    line = [SCRIPT, "kill step=4 rank=1", *words, "--resume=auto"]
    with two_processes("--max_restarts", "1", *line, **{launch_environment.TIMEOUT: "60"}) as process:
        stderr = process.communicate(timeout=200)[1]
    assert process.returncode == 0, stderr
    assert [line["step"] for line in metrics(RunFolder(run))] == [1, 2, 3, 4, 5, 6]


def test_asking_who_sees_the_folder_does_not_let_go_of_its_lock(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        collectives, "PartialState", lambda: SimpleNamespace(num_processes=2, is_main_process=True)
    )
    monkeypatch.setattr(collectives, "from_main", lambda value: value())
    monkeypatch.setattr(collectives, "gathered", lambda value: [value, value])
    with lock.claimed(str(tmp_path / "run"), "run") as folder:
        collectives.on_one_disk(Path(str(folder)))
        assert [path.name for path in (tmp_path / "run").iterdir()] == [lock.LOCK]
        child = os.fork()
        if not child:  # another process
            try:
                lock.claimed(folder, "run").__enter__()
            except UserError:
                os._exit(2)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


GONE = f"error: {launch_environment.GONE}"


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([(75, 9, ""), (1, 10, "")], 1),  # told to stop because the other failed
        ([(5, 9, GONE), (1, 10, "")], 1),
        ([(5, 9, GONE), (-9, 10, "")], 1),  # as where memory runs out
        ([(5, 9, GONE), (-9, 40, "")], 0),  # killed by the launcher, which it did not listen to
        ([(5, 9, GONE), (-6, 10, "")], 0),  # NCCL's watchdog
        ([(-6, 9, ""), (5, 10, GONE)], 0),  # ended by itself
        ([(-15, 9, ""), (75, 9, "")], 1),
        ([(5, 9, GONE), (75, 10, "")], 1),  # a signal before the training
        ([(2, 9, "error: a"), (2, 9, "error: a")], 0),
    ],
)
def test_who_failed_first(failures: list[Any], rank: int) -> None:
    names = ("exitcode", "timestamp", "message")
    found = {n: SimpleNamespace(**dict(zip(names, one, strict=True))) for n, one in enumerate(failures)}
    assert launcher.first(found)[0] == rank


def test_a_signal_to_the_launcher_saves_and_ends_resumable(small, two_layers, tmp_path) -> None:
    run = tmp_path / "run"
    given = [f"train.output_dir={run}", "train.max_steps=500", f"model.name={two_layers}", *small]
    restarts = ["--max_restarts", "1"]  # a run that a signal has ended does not begin again
    with two_processes(*restarts, "-m", "finetune", "train", str(QUICKSTART), *given) as process:
        log, until = run / "metrics.jsonl", time.monotonic() + 120
        while not log.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 75, said
    assert "stopped by SIGUSR1" in said and "--resume" in said
    (step,) = checkpoints.published(run / "checkpoints")
    checkpoints.verify(step)


LAUNCHES = [
    ["accelerate", "launch", "--config_file", "accelerate_configs/cpu_2.yaml", "scripts/train.py"],
    [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "finetune", "train"],
]


@pytest.mark.usefixtures("the_only_launch")
@pytest.mark.soak
@pytest.mark.parametrize("launch", LAUNCHES)
def test_line_that_resumes_a_launch_runs_as_it_is_printed(
    launch: list[str], small, two_layers, tmp_path
) -> None:
    run = tmp_path / "run"
    words = short(small, two_layers, "train.max_steps=2", f"train.output_dir={run}", "--until=1")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    options: Any = {"env": {**os.environ, **own}, "cwd": ROOT, "capture_output": True, "text": True}
    stopped = subprocess.run([*launch, *words[1:]], timeout=120, check=False, **options)
    said = stopped.stdout + stopped.stderr
    (line,) = [line.partition("resume with: ")[2] for line in said.splitlines() if "resume with: " in line]
    resumed = subprocess.run(line, shell=True, timeout=120, check=False, **options)
    assert resumed.returncode == 0, line + resumed.stderr
    assert (run / "adapter" / "adapter_config.json").exists()


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_ranks_of_a_killed_launcher_save_and_end(small, two_layers, tmp_path) -> None:
    run = tmp_path / "run"
    given = [f"train.output_dir={run}", "train.max_steps=5000", f"model.name={two_layers}", *small]
    with two_processes("-m", "finetune", "train", str(QUICKSTART), *given) as process:
        log, until = run / "metrics.jsonl", time.monotonic() + 120
        while not log.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        ranks = psutil.Process(process.pid).children()
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=60)
        for rank in alive:
            rank.kill()
        said = process.communicate(timeout=60)[1]
    assert len(ranks) == 2 and not alive, said
    (step,) = checkpoints.published(run / "checkpoints")
    checkpoints.verify(step)


def runs(*commands: list[str]) -> None:
    """Run each command up to its `--until`."""
    for words in commands:
        assert main.main(words) == 75, words


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_ranks_take_as_many_rows_as_fit_on_each(small, two_layers, tmp_path) -> None:
    """With `auto`, 4 rows do not fit on rank 1. The run equals one with a size of 2, also after a resume."""
    size = "train.per_device_train_batch_size"
    told = short(small, two_layers, f"{size}=2", "train.output_dir=told", "--until=2")
    found = short(small, two_layers, f"{size}=auto", "train.output_dir=found")
    commands = told, [*found, "--until=1"], [*found, "--until=2", "--resume"]
    said = two_ranks.run(runs_with_little_memory, *commands, cwd=tmp_path)
    parts = verify_resume.compare(tmp_path / "told", tmp_path / "found", 2)
    assert not [part for part in parts if part.differing], said
    run = RunFolder(tmp_path / "found")
    assert f"{size.partition('.')[2]}: 2" in run.recipe.read_text()


def runs_with_little_memory(told: list[str], found: list[str], resumed: list[str]) -> None:
    runs(told)
    with injected(Fault("oom", rank=1, rows=2)):
        runs(found)
    runs(resumed)


def until_a_time(words: list[str]) -> None:
    """Give rank 1 no time and rank 0 an hour: both stop."""
    far = "--until=1h" if os.environ["RANK"] == "0" else "--until=0.001s"
    runs([*words, "train.output_dir=straight", "--until=2"], [*words, "train.output_dir=timed", far])
    runs([*words, "train.output_dir=timed", "--until=0.001s", "--resume"])


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_ranks_whose_clocks_differ_end_in_time_together(small, two_layers, tmp_path) -> None:
    said = two_ranks.run(until_a_time, short(small, two_layers), cwd=tmp_path)
    assert "stopped by --until 0.001s after step 1" in said  # which rank 1 alone has reached
    names = [path.name for path in checkpoints.published(tmp_path / "timed" / "checkpoints")]
    assert names == ["step-2", "step-1"]
    parts = verify_resume.compare(tmp_path / "straight", tmp_path / "timed", 2)
    assert not [part for part in parts if part.differing]


def each_is_refused(given: list[str]) -> None:
    for flag in ("--rehearse", "--verify-resume"):
        assert main.main(["check", *given, flag]) == 2


def on_two_disks(words: list[str]) -> None:
    collectives.NEW_FILE_SECONDS = 1.0
    Path(os.environ["RANK"]).mkdir()
    os.chdir(os.environ["RANK"])
    assert main.main(words) == 3


@pytest.mark.usefixtures("the_only_launch")
def test_machines_without_a_common_disk_are_told_before_anything_is_loaded(
    small, two_layers, tmp_path
) -> None:
    said = two_ranks.run(on_two_disks, short(small, two_layers, "train.output_dir=run"), cwd=tmp_path)
    assert "some machines of this launch do not see the run folder" in said and "train.output_dir" in said
    assert not any((tmp_path / "0" / "run").glob("*")), "nothing was begun"


def on_rows_of_their_own(words: list[str], rows: str) -> None:
    """Train on one path that has other rows on each machine, and as many."""
    lines, rank = Path(rows).read_text().splitlines(), int(os.environ["RANK"])
    Path(str(rank)).mkdir()
    Path(str(rank), "train.jsonl").write_text("\n".join(lines[48 * rank : 48 * rank + 48]) + "\n")
    os.chdir(str(rank))
    assert main.main(words) == 2


@pytest.mark.usefixtures("the_only_launch")
def test_machines_with_other_rows_under_one_name_are_refused(small, two_layers, tmp_path) -> None:
    words = short(small, two_layers, "data.name=train.jsonl", f"train.output_dir={tmp_path / 'run'}")
    rows = small[0].partition("=")[2]
    said = two_ranks.run(on_rows_of_their_own, words, rows, cwd=tmp_path)
    assert "the processes of this launch differ in" in said and "data: content" in said


def ends_late(words: list[str]) -> None:
    """Let rank 0 write for long after a run has stopped."""
    after = html_report.after

    def slowly(*given: Any) -> Any:
        time.sleep(1)
        Path("written").touch()
        return after(*given)

    html_report.after = slowly if os.environ["RANK"] == "0" else after
    assert main.main(words) == 75
    assert Path("written").exists(), "the launcher would have ended rank 0"


@pytest.mark.usefixtures("the_only_launch")
def test_no_rank_leaves_a_stopped_run_before_rank_0_has_written_all(small, two_layers, tmp_path) -> None:
    words = short(small, two_layers, "train.output_dir=run", "--until=1")
    two_ranks.run(ends_late, words, cwd=tmp_path)
    assert (tmp_path / "run" / "checks.json").exists()


def test_gloo_is_told_the_interface_on_which_other_machines_are(monkeypatch) -> None:
    found = {a.address: name for name, all_ in psutil.net_if_addrs().items() for a in all_}
    for address in ("127.0.0.1", *[a for a in found if a.count(".") == 3][:2]):
        assert collectives.interface_to(address) == found[address]
    assert collectives.interface_to("no-such-host.invalid") == ""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(collectives.GLOO, raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    collectives.name_interface()
    assert collectives.GLOO not in os.environ, "one machine needs none"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    collectives.name_interface()
    assert os.environ.pop(collectives.GLOO) == found["127.0.0.1"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", list(found.values())[-1])
    collectives.name_interface()
    assert os.environ.pop(collectives.GLOO) == list(found.values())[-1]


def test_processes_that_machines_can_not_share_evenly_are_refused(capsys) -> None:
    """Accelerate would start 8 of the 9."""
    config = str(ROOT / "accelerate_configs" / "multi_node.yaml")
    given = ["--num_machines", "2", "--num_processes", "9", "--machine_rank", "0", "--main_process_ip", "a"]
    assert launcher.main(["--config_file", config, *given, "scripts/train.py"]) == 2
    said = capsys.readouterr().err
    assert (
        "2 machines can't share 9 processes equally, so Accelerate would start 8" in said
        and "8 or 10" in said
    )


@pytest.mark.parametrize("by", [["accelerate", "launch"], ["python", "-m", "finetune.launch"]])
def test_the_config_that_is_read_where_none_is_named_is_looked_at(
    by: list[str], monkeypatch, tmp_path
) -> None:
    from accelerate.commands.config import config_args

    file = tmp_path / "default_config.yaml"
    file.write_text("fp8_config:\n  backend: te\n  formt: HYBRID\nnum_processes: 1\n")
    monkeypatch.setattr(config_args, "default_config_file", str(file))
    assert launcher.default_config(by) == [str(file)]
    assert launcher.default_config(["python", "-m", "torch.distributed.launch"]) == []
    assert launcher.main(["scripts/train.py"]) == 2


@pytest.mark.usefixtures("the_only_launch")
def test_a_proof_is_not_started_by_a_launcher(small, two_layers) -> None:
    """`prove` launches each run itself, as `finetune train` does."""
    given = [str(QUICKSTART), small[0], "data.validation=null", f"model.name={two_layers}"]
    said = two_ranks.run(each_is_refused, given)
    for flag in ("--rehearse", "--verify-resume"):
        assert f"finetune check {QUICKSTART}" in said and flag in said
    assert said.count("it starts its own runs on all GPUs") == 4, "on both ranks"


def test_a_rank_is_given_up_when_it_stands_longer_than_others_wait(monkeypatch) -> None:
    monkeypatch.setenv(launch_environment.TIMEOUT, "10")
    here = len(psutil.Process(os.getppid()).children())  # this process and its siblings
    for processes, seconds, started, given_up in (
        (1, 99, here + 1, False),
        (2, 8, here + 1, False),
        (2, 10, here + 1, True),
        (2, 10, here, False),
    ):
        monkeypatch.setattr(collectives, "PartialState", lambda n=processes: SimpleNamespace(num_processes=n))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(started))
        assert collectives.given_up(seconds) == given_up, (processes, seconds, started - here)


def prepares_for_long() -> None:
    """Prepare data on one of two ranks. The first takes longer than the timeout."""
    from accelerate import PartialState

    from finetune.training import load_data, resume_facts, training_data

    os.environ[launch_environment.TIMEOUT] = "3"
    recipe: Any = SimpleNamespace(data=SimpleNamespace(streaming=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_facts, "facts", lambda *_: {})
        collectives.start("cpu")
        slow = 6 * PartialState().is_main_process
        made = SimpleNamespace(cached=not slow, report={"train": SimpleNamespace(notes=[])})
        patch.setattr(load_data, "prepare_data", lambda _: time.sleep(slow) or (slow, made))
        print("prepared:", training_data.prepare_in_turn(recipe, SimpleNamespace())[0])  # pyright: ignore[reportArgumentType]  (a stand-in)


@pytest.mark.soak
def test_data_may_take_longer_to_prepare_than_ranks_wait() -> None:
    said = two_ranks.run(prepares_for_long)
    assert said.count("prepared: 6") == said.count("prepared: 0") == 1, said


def looks_at_its_base(decomposed: bool) -> None:
    """Compare base models that differ in one bit, on one of two ranks."""
    from finetune.adapters import initialization
    from finetune.training import base_fingerprint

    with pytest.MonkeyPatch.context() as patch:
        collectives.start("cpu")
        base: Any = torch.nn.Linear(2, 2).requires_grad_(False)
        base.weight.fill_(1 + collectives.main() * 1e-6)
        base.bias.zero_()
        patch.setattr(initialization, "rebases", lambda _: decomposed)
        try:
            print("base:", base_fingerprint.frozen_fingerprint(base, None, RunChecks()))
        except UserError as error:
            print(f"refused: {error}")


def test_a_base_is_one_on_all_ranks() -> None:
    """Rank 0 changes the base model for PiSSA, and DDP copies it. Other differences come from files."""
    made = re.findall(r"base: (\w+)", two_ranks.run(looks_at_its_base, True))
    assert len(made) == 2 and len({*made}) == 1
    assert two_ranks.run(looks_at_its_base, False).count("differ in weights of the base") == 2
