"""Runs that end before their last step: signals, a time, a step, kill -9; and two ranks."""

import argparse
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl

from finetune.autoconfig import launch_settings
from finetune.checkpointing import checkpoints, resume, training_state
from finetune.cli import arguments, main
from finetune.core import signals
from finetune.core.errors import Stopped, UserError
from finetune.experiments.runner import verify_resume
from finetune.export import after_training
from finetune.hardware import detection
from finetune.profiling import profiler
from finetune.recipe import loader
from finetune.recipe.schema import Train
from finetune.run_folder import lock
from finetune.run_folder.run_folder import RunFolder
from finetune.training import saved_evaluation, stopping
from support import tables, two_ranks
from support.paths import DATA, QUICKSTART, ROOT
from support.printed_commands import assert_commands_run
from support.runs import metrics

# A loader's worker that does not leave by itself, as one that waits for more to read
WAITING = """
import multiprocessing, os, signal, time
from finetune.training import loader_workers

def work(begin, ready):
    begin(0)
    ready.set()
    time.sleep(60)

if __name__ == "__main__":
    ready = multiprocessing.Event()
    begin = loader_workers.keep_workers(None)
    worker = multiprocessing.Process(target=work, args=(begin, ready), daemon=True)
    worker.start()
    ready.wait()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(worker.pid, number)
    worker.join(0.5)
    print("alive" if worker.is_alive() else "ended", flush=True)
"""
SHORT = ["train.max_steps=6", "adapter.lora_dropout=0.1", "train.save_total_limit=null"]


@pytest.fixture
def signalled(monkeypatch) -> Any:
    """`signalled(number, step)`: this process gets a signal while it reads the batch of a step."""

    def at(number: int, step: int) -> None:
        original, seen = training_state.digest, []

        def digest(so_far: Any, inputs: Any) -> Any:
            seen.append(1)
            if len(seen) == step:
                os.kill(os.getpid(), number)
            return original(so_far, inputs)

        monkeypatch.setattr(training_state, "digest", digest)

    return at


@pytest.mark.parametrize("number", signals.ENDING)
def test_a_signal_saves_after_the_step_and_says_how_to_go_on(number: int, train, signalled, capsys) -> None:
    signalled(number, 3)
    run = train(*SHORT, code=75)
    said = capsys.readouterr().err
    assert f"stopped by {signal.Signals(number).name} after step 3" in said
    assert [path.name for path in checkpoints.published(run.checkpoints)] == ["step-3"]
    assert not (run.path / ".lock").exists()
    (line,) = [line for line in said.splitlines() if "resume with:" in line]
    again = shlex.split(line.partition(": finetune ")[2])
    assert again[-1] == "--resume" and f"train.output_dir={run.path}" in again
    if number == signal.SIGTERM:
        assert main.main([*again, "--quiet"]) == 0
        whole = train(*SHORT, name="whole")
        numbers = [[line[k] for k in ("step", "loss", "grad_norm")] for line in metrics(run)]
        assert numbers == [[line[k] for k in ("step", "loss", "grad_norm")] for line in metrics(whole)]
        files = [(one.adapter / "adapter_model.safetensors").read_bytes() for one in (run, whole)]
        assert files[0] == files[1]


def test_a_signal_before_training_ends_at_once(train, monkeypatch, capsys) -> None:
    from finetune.models import loading

    monkeypatch.setattr(loading, "load", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    run = train(code=75)
    assert "stopped by SIGTERM" in capsys.readouterr().err and not run.path.exists()


@pytest.mark.parametrize(
    ("keeper", "said"),
    [
        ("FSDP", "train.optim=adamw_torch_fused"),
        ("DeepSpeed", "train.optim=adamw_torch_fused"),
        ("DeepSpeed in fp16", "mixed_precision: bf16"),
        ("DeepSpeed on NVMe", "device: cpu"),
        ("TransformerEngine", "fsdp2_8.yaml"),
    ],
)
def test_what_saves_where_this_run_can_not(keeper: str, said: str) -> None:
    """Another optimizer, another precision, another launch."""
    given = ["train.optim=adamw_torch_8bit", "train.save_strategy=steps"]
    with pytest.raises(UserError) as raised:
        stopping.check(loader.load(QUICKSTART, given).train, None, keeper)
    assert said in raised.value.problems[0].fix


def test_what_deepspeed_keeps_apart_is_told_by_the_launch(monkeypatch) -> None:
    machine = detection.Hardware("cuda", "NVIDIA H100", 1, (9, 0), 79.6, 8)
    for given, said in (
        ({}, "DeepSpeed"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "DeepSpeed in fp16"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"}, "DeepSpeed on NVMe"),
    ):
        with monkeypatch.context() as launch:
            for name, value in ({"ACCELERATE_USE_DEEPSPEED": "true"} | given).items():
                launch.setenv(name, value)
            assert launch_settings.read(machine).keeper == said


def test_a_second_signal_leaves_at_once(monkeypatch) -> None:
    monkeypatch.setattr(signals, "TOGETHER", 0.0)
    child = os.fork()
    if not child:
        with stopping.Stop().listening() as stop, stop.later():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75


def test_a_second_signal_in_a_save_leaves_the_last_one_as_it_was(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(signals, "TOGETHER", 0.0)
    tensors: dict[str, Any] = {"weights.safetensors": {"w": torch.ones(4)}, checkpoints.CONTRACT: {}}
    checkpoints.write(tmp_path, 1, tensors, None)
    begun, child = time.monotonic(), os.fork()
    if not child:
        os.fsync = lambda handle: time.sleep(60)  # a disk that takes its time
        with stopping.Stop().listening() as stop, stop.later():
            checkpoints.Writer(tmp_path, 1).start(2, tensors)
            while not list(tmp_path.glob(".staging/.step-2.*/*")):
                if time.monotonic() - begun > 20:
                    os._exit(2)
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75 and time.monotonic() - begun < 30
    found = checkpoints.newest(tmp_path)
    assert found and found.step == 1 and not found.notes
    checkpoints.verify(found.path)


def test_until_is_a_step_or_a_time(train, monkeypatch) -> None:
    run = train(*SHORT, "--until=2", code=75)
    assert [path.name for path in checkpoints.published(run.checkpoints)] == ["step-2"]
    train(*SHORT, "--resume", "--until=0.001s", code=75)  # no step fits, but one is always made
    assert checkpoints.published(run.checkpoints)[0].name == "step-3"
    now = time.time()
    assert 0 < (arguments.until("06:30").time or 0) - now <= 86400
    assert abs((arguments.until("1h30m").deadline or 0) - time.monotonic() - 5400) < 5
    assert arguments.until("2100-01-01T06:30").time == time.mktime((2100, 1, 1, 6, 30, 0, 0, 1, -1))
    for wrong in ("soon", "25:00", "0"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a step"):
            arguments.until(wrong)


def test_a_streamed_run_goes_on(train) -> None:
    """Its state has the largest integer of 64 bits as its number of epochs."""
    streamed = [*SHORT, "data.streaming=true", "train.max_steps=3"]
    train(*streamed, "--until=2", code=75)
    run = train(*streamed, "--resume")
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3]


def test_checkpoints_by_share_epoch_and_time(train, monkeypatch, tmp_path) -> None:
    rows = (DATA / "train.jsonl").read_text().splitlines(keepends=True)[:6]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    few = [*SHORT, "train.effective_batch_size=2", f"data.name={tmp_path}/rows.jsonl"]

    def steps(*options: str, name: str) -> list[int]:
        run = train(*few, *options, "--until=6", name=name, code=75)
        return sorted(map(checkpoints.step_of, checkpoints.published(run.checkpoints)))

    assert steps("train.save_steps=0.4", name="share") == [3, 6]
    assert steps("train.save_strategy=epoch", name="epoch") == [3, 6]
    assert steps("train.save_strategy=no", name="no") == [6], "a run that is told to stop saves"
    monkeypatch.setattr(stopping, "MINUTES", 0)
    assert steps(name="time") == [1, 2, 3, 4, 5, 6]


def test_where_there_is_nothing_to_go_on_from(train, tmp_path, capsys) -> None:
    train("--resume", code=2)
    assert "--resume=auto" in capsys.readouterr().err
    assert main.main(["train", str(QUICKSTART), "--resume"]) == 2
    assert "train.output_dir" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("")
    train("--resume=auto", code=2)
    assert "thesis.txt" in capsys.readouterr().err
    (tmp_path / "run" / "thesis.txt").unlink()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "run" / "log.txt").write_text("")
    (tmp_path / "run" / "validation.jsonl").write_text("")
    for name in ("model", "nonfinite-step-1"):  # names that anyone may have given
        (tmp_path / "run" / name).mkdir()
    train("--resume=auto", code=2)
    for mark in resume.MARKS:  # of a run that got no further
        (tmp_path / "run" / mark).write_text(f"process {2**22 + 1} on here, since then")
        assert not resume.check_folder(str(tmp_path / "run"), "auto", {})
        (tmp_path / "run" / mark).rename(tmp_path / "run" / lock.LOCK)
    train(code=2)
    said = capsys.readouterr().err
    assert "its lock is from process" in said and "in use" not in said
    run = train("--resume=auto", "--until=1", code=75)
    assert [line["step"] for line in metrics(run)] == [1] and "loss" in metrics(run)[0]
    assert not run.model.exists() and not (run.path / "validation.jsonl").exists(), (
        "another recipe's, perhaps"
    )
    assert "finetune removed model of an earlier start" in (run.path / "log.txt").read_text()


def test_what_was_trained_and_saved_is_not_begun_again(tmp_path) -> None:
    """Killed in its last evaluation, with no checkpoint: a start would delete its weights. Unless the save
    itself was cut short, when it begins anew."""
    run = tmp_path / "run"
    for name in ("adapter", "checkpoints"):
        (run / name).mkdir(parents=True)
    for name in ("recipe.resolved.yaml", "checks.json", "checkpoints/contract.json"):
        (run / name).write_text("{}")
    assert not resume.check_folder(str(run), "auto", {})
    (run / "adapter" / "tokenizer_config.json").write_text("{}")
    for asked in ("auto", "newest"):
        with pytest.raises(UserError, match=f"not evaluated.*\n.*\n.*finetune evaluate {run}"):
            resume.check_folder(str(run), asked, {})
    (run / "checkpoints" / "step-3").mkdir()
    assert not resume.check_folder(str(run), "auto", {}), "it goes on after its last step"


def test_a_finished_run_may_be_asked_for_otherwise(tmp_path, monkeypatch) -> None:
    """By what an unfinished one allows: where prepared data lies, how a file's path is written, `eval:`."""
    for name in ("run/adapter", "run/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "run" / "eval.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path / "rows.jsonl")
    for was, name, other in (
        ("rows.jsonl", here, "others.jsonl"),
        (["rows.jsonl"], [here], [here, here]),
        (["rows.jsonl"], [{"name": here}], [{"name": here, "weight": 2.0}]),
    ):
        kept = {"recipe": {"data.name": was, "data.cache_dir": "there", "eval.generate": True}}
        RunFolder(tmp_path / "run").write("checkpoints/contract.json", {**kept, "facts": {}, "chosen": {}})
        now: dict[str, Any] = {"model": {}, "data": {"name": name, "cache_dir": "here"}}
        now["eval"] = {"generate": False}
        assert resume.check_folder("run", "auto", now)
        with pytest.raises(UserError, match=r"data\.name"):
            resume.check_folder("run", "auto", now | {"data": {"name": other}})


def test_how_to_go_on_is_a_command_that_does(tmp_path) -> None:
    def said(folder: Path | str, *words: str) -> list[str]:
        return arguments.go_on(main.parse(["train", "a.yaml", *words]), str(folder))

    assert said("") == ["train", "a.yaml"]  # it had no folder yet
    assert said("", "--resume")[-1] == "--resume=auto"  # the recipe says which
    assert said(tmp_path) == ["train", "a.yaml", f"train.output_dir={tmp_path}", "--resume=auto"]
    (tmp_path / "adapter").mkdir()  # told to end while it was evaluated: nothing is trained again
    assert said(tmp_path) == ["evaluate", str(tmp_path)]
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    assert said(tmp_path)[-1] == "--resume"


def test_a_run_that_is_finished_is_published_once(tmp_path, monkeypatch) -> None:
    """Also where its process was ended while it did that."""
    told: list[Any] = []
    monkeypatch.setattr(after_training, "check", lambda *given: [])
    monkeypatch.setattr(after_training, "publish_run", lambda *given: told.append(given))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "eval.json").write_text("{}")
    words = ["train", str(QUICKSTART), f"train.output_dir={tmp_path}", "publish.repo=a/b", "--resume"]
    assert main.main([*words, "--quiet"]) == 0
    assert len(told) == 1
    (tmp_path / "publish.json").write_text("{}")
    assert main.main([*words, "--quiet"]) == 0
    assert len(told) == 1


def test_the_first_step_does_not_say_how_long_one_takes(monkeypatch) -> None:
    """It also compiles and finds its place in a stream; with it no second one might ever fit."""
    now = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    writer: Any = SimpleNamespace(check=lambda: None, seconds=0.0)
    schedule = stopping.Schedule(Train(), stopping.Stop(), writer, "")
    state: Any = SimpleNamespace(global_step=0, max_steps=10, epoch=0.5)
    control: Any = TrainerControl()
    schedule.on_train_begin(None, state, control)
    for took, longest in ((500.0, 0.0), (2.0, 2.0), (1.0, 2.0)):
        now[0] += took
        schedule.on_step_end(None, state, control)
        assert schedule.longest == longest


def test_an_optimizer_whose_state_can_t_be_kept_is_said_after_one_step() -> None:
    """Not ten minutes later, by the first checkpoint."""
    writer: Any = SimpleNamespace(check=lambda: None, seconds=0.0)
    state: Any = SimpleNamespace(global_step=1, max_steps=10, epoch=0.5)
    control: Any = TrainerControl()
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    optimizer: Any = SimpleNamespace(state_dict=lambda: {"state": {0: {"odd": jagged}}})
    for strategy in ("auto", "no"):
        schedule = stopping.Schedule(Train(save_strategy=strategy), stopping.Stop(), writer, "")
        schedule.on_train_begin(None, state, control)
        with (
            pytest.raises(UserError, match="can't store a value of the optimizer state")
            if strategy == "auto"
            else nullcontext()
        ):
            schedule.on_step_end(None, state, control, optimizer=optimizer)


def test_a_proof_saves_in_the_middle_and_reaches_no_one() -> None:
    given = ["train.save_strategy=epoch", "train.report_to=tensorboard", "publish.repo=a/b"]
    shorter = verify_resume.shortened(loader.load(QUICKSTART, given))
    found = loader.load(QUICKSTART, [*given, *shorter])
    assert (found.train.save_strategy, found.train.save_steps) == ("steps", verify_resume.HALF)
    assert found.train.passed_on()["report_to"] == "none" and found.publish.repo is None


@pytest.mark.soak
def test_the_proof_of_a_recipe(two_layers, small, capsys) -> None:
    words = [*small, f"model.name={two_layers}", "train.max_steps=20", "adapter.type=adalora"]
    tables.assert_tables_fit(lambda: main.main(["check", str(QUICKSTART), *words, "--verify-resume"]))
    said = capsys.readouterr().out
    assert_commands_run(said)
    assert (
        "verified: a resumed run of this recipe equals a run without a stop" in said
        and "train.max_steps=12" in said
    )
    for part in training_state.PARTS:
        assert part in said


def _ranks(words: list[str]) -> None:
    """Straight through; and stopped by a signal to one rank, and resumed."""
    rank, exits = os.environ["RANK"], []
    exits.append(main.main([*words, "train.output_dir=straight", "--until=4", "--quiet"]))
    original, seen = training_state.digest, []

    def digest(so_far: Any, inputs: Any) -> Any:
        seen.append(1)
        if rank == "1" and len(seen) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(so_far, inputs)

    training_state.digest = digest
    exits.append(main.main([*words, "train.output_dir=resumed", "--quiet"]))
    exits.append(main.main([*words, "train.output_dir=resumed", "--resume", "--until=4", "--quiet"]))
    exits.append(main.main([*words, "train.output_dir=straight", "--resume", "--quiet"]))  # no step is left
    assert exits == [75, 75, 75, 0], exits


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_two_ranks_stop_together_and_go_on(train, two_layers, small, tmp_path, capsys) -> None:
    """A signal to one of them; what each rank draws is its own. One rank alone can't go on with it."""
    given = [*SHORT, "train.max_steps=4", "train.effective_batch_size=4", f"model.name={two_layers}", *small]
    words = ["train", str(QUICKSTART), *given]
    said = two_ranks.run(_ranks, words, cwd=tmp_path)
    assert "stopped by SIGUSR1 after step 2" in said  # which rank 1 alone has heard
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    names = [path.name for path in checkpoints.published(resumed / "checkpoints")]
    assert names == ["step-4", "step-2"]
    parts = verify_resume.compare(straight, resumed, 4)
    assert not [part for part in parts if part.differing]
    (random_states,) = [part for part in parts if part.name == "rng"]
    assert random_states.tensors == 4  # torch's and numpy's, of two ranks
    train(*given, f"train.output_dir={resumed}", "--resume", code=4)
    assert "processes" in capsys.readouterr().err


@pytest.mark.soak
def test_a_loader_s_worker_outlives_signals_but_not_its_run(tmp_path) -> None:
    """torch 2.11 leaves workers that persist to the end of Python, which waits for each."""
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=45, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_a_loader_s_workers_end_with_the_training(train, monkeypatch) -> None:
    """Of a loader that garbage collection finds, queues are closed first: torch then waits 20 s."""
    left: list[Any] = []
    clear = saved_evaluation.clear_device_cache

    def watched(**given: bool) -> None:
        left.append(multiprocessing.active_children())
        clear(**given)

    monkeypatch.setattr(saved_evaluation, "clear_device_cache", watched)
    train("train.dataloader_num_workers=1", "train.dataloader_persistent_workers=true", "eval.samples=0")
    assert left and not any(left)


def test_of_a_profile_that_is_stopped_nothing_is_kept(small, two_layers, tmp_path) -> None:
    """What its run saves goes with it: the same command begins again."""

    class Tells(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    given = [*small, f"model.name={two_layers}", "train.effective_batch_size=2"]
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM.*; a stopped profile is not saved"):
        profiler.run(str(QUICKSTART), given, str(tmp_path), [Tells()])
    assert list(tmp_path.iterdir()) == []
