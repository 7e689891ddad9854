"""The surface of the command line, and how fast it answers."""

import argparse
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
import yaml
from transformers import AutoTokenizer

import finetune
from finetune.cli import arguments, main
from finetune.core import command_lines, error_codes, errors
from finetune.distributed import collectives, launch_environment
from finetune.hub import client
from finetune.models import tokenizer_setup
from support.paths import MODEL, QUICKSTART, ROOT

TUNE = ["space", "trials", "hours", "storage", "output", "accelerate", "final", "export-wandb"]


def fastest(command: list[str], limit: float) -> float:
    """The least seconds of wall time. A shared machine has slow minutes, so there are up to 20 attempts."""
    least = float("inf")
    for _ in range(20):
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "finetune", *command], check=True, capture_output=True, cwd=ROOT
        )
        least = min(least, time.monotonic() - started)
        if least < limit:
            break
    return least


@pytest.mark.parametrize("name", ["shop**", "[a", "a[", "**", "x***y"])
def test_name_of_a_missing_run_is_no_pattern(name: str, tmp_path, monkeypatch, capsys) -> None:
    """The shell passes on a pattern that matches nothing."""
    monkeypatch.chdir(tmp_path)
    for words in (["evaluate"], ["merge"], ["publish", "--dry-run"], ["report"], ["compare", "b"]):
        assert main.main([*words, f"runs/{name}"]) == 2
        assert "internal-error" not in capsys.readouterr().err


def test_the_surface() -> None:
    """A new command or option is decided, not slipped in."""
    surface = {
        name: sorted(
            option for action in command._actions for option in action.option_strings or [action.dest]
        )
        for name, command in main.parser()[1].items()
    }
    common = ["--debug", "--help", "--json", "--quiet", "-h"]
    assert surface == {
        "train": sorted(
            [*common, "--accelerate", "--resume", "--until", "--dry-run", "--verbose", "recipe", "overrides"]
        ),
        "check": sorted([*common, "--verify-resume", "--rehearse", "recipe", "overrides"]),
        "data": sorted([*common, "--show", "--html", "--prepare", "recipe", "overrides"]),
        "plan": sorted(
            [*common, "recipe", "overrides", "--accelerate", "--gpu", "--gpus", "--price-per-hour"]
        ),
        "profile": sorted([*common, "recipe", "overrides", "--output"]),
        "ablate": sorted([*common, "recipe", "overrides", "--optimizations", "--output"]),
        "evaluate": sorted([*common, "run", "overrides", "--tasks"]),
        "merge": sorted([*common, "run", "overrides", "--dtype", "--quantize", "--output"]),
        "export": sorted([*common, "run", "overrides", "--to", "--quantize", "--adapter", "--output"]),
        "publish": sorted([*common, "run", "overrides", "--dry-run", "--merged", "--repo", "--public"]),
        "compare": sorted(
            [*common, "what", "overrides", "--adapters", "--seeds", "--budget", "--output", "--assert-equal"]
        ),
        "sweep": sorted(
            [*common, "recipe", "overrides", *(f"--{name}" for name in TUNE)],
        ),
        "chat": sorted([*common, "run", "overrides", "--prompt", "--max-new-tokens", "--temperature"]),
        "report": sorted([*common, "--output", "run"]),
        "recipes": sorted([*common, "--copy", "name"]),
        "init": sorted([*common, "--model", "--data", "--validation", "--adapter", "--output"]),
        "import": sorted([*common, "file", "--from", "--gpus", "--output", "--verify"]),
        "explain": sorted([*common, "code"]),
        "doctor": sorted([*common, "recipe", "overrides", "--measure"]),
    }


@pytest.mark.alone
def test_help_answers_in_a_third_of_a_second() -> None:
    assert fastest(["--help"], 0.3) < 0.3


@pytest.mark.alone
def test_check_answers_in_a_second() -> None:
    assert fastest(["check", str(QUICKSTART)], 1) < 1


def test_check_imports_nothing_large() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "finetune", "check", str(QUICKSTART)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pydantic" in imported and not imported & {"torch", "transformers", "datasets", "pyarrow", "scipy"}


def test_overrides_may_follow_options() -> None:
    options = main.parse(["train", "a.yaml", "a.b=1", "--quiet", "c.d=2"])
    assert options.overrides == ["a.b=1", "c.d=2"]


@pytest.mark.parametrize("command", [["train"], ["nothing"], ["evaluate"], ["check", "a", "--fast"]])
def test_a_wrong_command_line_is_exit_2(command: list[str]) -> None:
    assert main.main(command) == 2


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("quickstart", "quickstart"),
        ("recipes/quickstart.yaml", "quickstart"),
        ("recipes/llama3_8b/dora.yaml", "llama3_8b/dora"),
    ],
)
def test_shipped_recipe_runs_by_name_and_an_absent_path_names_it(
    given, name, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main.main(["check", given])
    said = capsys.readouterr().err
    if given == name:  # it runs where it is
        assert code == 0, said
        return
    assert code == 2
    assert f"help:      finetune recipes {name} --copy .\n" in said
    assert main.main(["recipes", name, "--copy", "."]) == 0
    assert main.main(["check", "my/absent.yaml"]) == 2
    assert "--copy" not in capsys.readouterr().err


def with_closed(stream: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command whose reader of stdout or stderr has left, as after `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writer}
    given = {"text": True, "check": False, "cwd": ROOT, "env": os.environ | environment, **streams}
    try:
        return subprocess.run([sys.executable, "-m", "finetune", *command], **given)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "command", [("recipes",), ("check", "recipes/quickstart.yaml"), ("train", "--help"), ("doctor",)]
)
def test_command_whose_output_is_read_in_part_exits_with_0(command: tuple[str, ...]) -> None:
    """`finetune doctor | head -1`, and `| true`, which reads nothing."""
    done = with_closed("stdout", *command)
    assert (done.returncode, done.stderr) == (0, "")
    if command != ("doctor",):  # which imports torch
        done = with_closed("stdout", *command, PYTHONUNBUFFERED="1")
        assert (done.returncode, done.stderr) == (0, "")


def test_command_whose_output_nobody_reads_keeps_its_exit_code() -> None:
    for stream, other in (("stdout", "stderr"), ("stderr", "stdout")):
        done = with_closed(stream, "check", "recipes/absent.yaml")
        assert done.returncode == 2
        assert "Traceback" not in (getattr(done, other) or "")


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_command_whose_output_is_on_a_full_disk_is_an_error(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "finetune", "recipes", *options]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
        both = subprocess.run(command, stdout=full, stderr=full, cwd=ROOT, check=False)
    assert done.returncode == both.returncode == 3
    assert "error: the disk is full" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("program", ["finetune", "python -m finetune"])
@pytest.mark.parametrize("name", [b"deleted", b"odd\xff"])
def test_command_in_a_folder_that_has_no_usable_name_is_an_error(name: bytes, program, tmp_path) -> None:
    folder = os.fsencode(tmp_path) + b"/" + name
    os.mkdir(folder)
    gone = b"rmdir " + folder if name == b"deleted" else b"true"
    finetune = os.fsencode(Path(sys.executable).parent / program)
    command = b"; ".join([b"cd " + folder, gone, finetune + b" check " + os.fsencode(QUICKSTART)])
    done = subprocess.run([b"sh", b"-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr.startswith("error: finetune can't use the working directory")


@pytest.mark.soak
def test_training_goes_on_when_nobody_reads_its_output(tmp_path) -> None:
    options = ["train.max_steps=3", "train.warmup_steps=0", "data.validation=null", "eval.forgetting=false"]
    done = with_closed("stdout", "train", str(QUICKSTART), *options, f"train.output_dir={tmp_path}/run")
    assert done.returncode == 0 and (tmp_path / "run" / "adapter" / "adapter_config.json").exists()


def test_recipes_are_listed_and_copied(capsys, tmp_path, monkeypatch) -> None:
    assert main.main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert "quickstart" in listed and "llama3_8b/dora" in listed
    assert main.main(["recipes", "quickstart", "--copy", str(tmp_path)]) == 0
    assert (tmp_path / "examples" / "tiny_llama" / "model" / "model.safetensors").exists()
    monkeypatch.chdir(tmp_path)
    assert main.main(["check", "quickstart.yaml"]) == 0
    assert main.main(["recipes", "quickstart", "--copy", str(tmp_path)]) == 2
    assert "does not overwrite an existing file" in capsys.readouterr().err
    for missing in ("quickstart.yaml", "examples/tiny_llama/model/config.json"):  # the first call was killed
        (tmp_path / missing).unlink()
    assert main.main(["recipes", "quickstart", "--copy", str(tmp_path)]) == 0
    assert main.main(["check", "quickstart.yaml"]) == 0
    assert main.main(["recipes", "--copy", str(tmp_path)]) == 2
    assert "the name of the recipe is missing" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main.main(["recipes", "quickstart", "--copy", str(tmp_path / "file")]) == 2
    assert "finetune can't write to this path" in capsys.readouterr().err
    assert main.main(["recipes", "quickstrat", "--copy", str(tmp_path)]) == 2
    assert "quickstart" in capsys.readouterr().err


def test_evaluate_wants_a_run(tmp_path, capsys) -> None:
    assert main.main(["evaluate", str(tmp_path)]) == 2
    assert "no recipe.resolved.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "run", "tasks"),
    [
        (["--tasks", "a", "b", "RUN"], "RUN", ["a", "b"]),
        (["--tasks", "a,b", "RUN", "eval.limit=4", "--quiet"], "RUN", ["a,b", "eval.limit=4"]),
        (["--tasks", "my/a.yaml", "me/notes@main"], "me/notes@main", ["my/a.yaml"]),
        (["--tasks", "a", "--quiet", "RUN"], "RUN", ["a"]),
        (["RUN", "--tasks", "a", "b"], "RUN", ["a", "b"]),
    ],
)
def test_tasks_may_stand_before_the_run(words, run, tasks, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").mkdir()
    options = main.parse(["evaluate", *words])
    assert (options.run, options.tasks) == (run, tasks)
    with pytest.raises(errors.UserError):
        main.parse(["evaluate", "--tasks", "a", "my/b.yaml"])


@pytest.mark.parametrize(
    ("words", "key", "read"),
    [
        (["evaluate", "RUN", "train.learning_rate=3"], "train.learning_rate", "model, data, speed, eval"),
        (["evaluate", "RUN", "--tasks", "a", "adapter.r=3"], "adapter.r", "model, data, speed, eval"),
        (["merge", "RUN", "train.seed=3"], "train.seed", "model, data, speed, eval"),
        (["chat", "RUN", "publish.repo=a/b"], "publish.repo", "model, data, speed, eval"),
        (["publish", "RUN", "adapter.type=ia3"], "adapter.type", "publish, model, data"),
        (["evaluate", "RUN", "data.chat_template=chatml"], "data.chat_template", ""),
        (["chat", "RUN", "data.chat_template=null"], "data.chat_template", ""),
    ],
)
def test_an_override_that_a_finished_run_does_not_read_is_refused(words, key, read, capsys) -> None:
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert f"error: {key}: `{words[0]}` does not use this key" in said
    expected = f"expected:  keys of {read}" if read else "the tokenizer of the run contains its chat template"
    assert expected in said


def test_several_processes_are_launched(monkeypatch) -> None:
    """`finetune train --accelerate FILE` becomes `accelerate launch`: the line printed is the one run."""
    seen = []
    for name, value in (("ACCELERATE_USE_CPU", "false"), (launch_environment.ACCELERATE, "")):
        monkeypatch.setenv(name, value)  # which is set on the way, and set back here
    monkeypatch.setattr("os.execv", lambda path, command: seen.append(command) or sys.exit(0))
    with pytest.raises(SystemExit):
        main.main(["train", str(QUICKSTART), "--accelerate", "cpu_2", "train.seed=1"])
    (command,) = seen
    assert command[1:3] == ["-m", "finetune.launch"]
    assert command[command.index("-m", 3) :][:3] == ["-m", "finetune", "train"]
    assert "train.seed=1" in command and any(
        part.endswith("accelerate_configs/cpu_2.yaml") for part in command
    )
    again = arguments.go_on(main.parse(["train", str(QUICKSTART)]), "runs/a")  # as a process of it says
    assert again[again.index("--accelerate") + 1] == "cpu_2"


def test_an_unknown_accelerate_config(capsys) -> None:
    assert main.main(["train", str(QUICKSTART), "--accelerate", "cpu_3"]) == 2
    assert "cpu_2" in capsys.readouterr().err


def test_doctor_has_a_row_for_each_optimization(capsys) -> None:
    assert main.main(["doctor", str(QUICKSTART), "adapter.type=qlora"]) == 0
    text = capsys.readouterr().out
    for name in (
        "bf16 autocast",
        "TF32",
        "fused AdamW",
        "cuDNN benchmark",
        "set_to_none",
        "gradient accumulation",
    ):
        assert name in text
    for name in (
        "clipping",
        "pinned memory",
        "loader workers",
        "packing",
        "compile",
        "activation checkpointing",
        "attention",
    ):
        assert name in text
    assert "[flash]" in text
    assert main.main(["doctor"]) == 0


@pytest.mark.parametrize(
    ("words", "said", "found", "expected"),
    [
        (["plan", "--gpus", "0"], "--gpus: this value is not valid", "0", "an integer from 1"),
        (
            ["compare", "--seeds", "99999999999"],
            "--seeds: this value is not valid",
            "99999999999",
            "an integer from 1 to 1,000",
        ),
        (
            ["sweep", "--trials", "9" * 400],
            "--trials: this value is not valid",
            "9" * 20,
            "a number up to 1,000,000,000,000",
        ),
        (["sweep", "--trials", "many"], "--trials: this value is not valid", "many", "an integer from 1"),
        (
            ["plan", "--price-per-hour", "nan"],
            "--price-per-hour: this value is not valid",
            "nan",
            "a number from 0 up",
        ),
        (["data", "--show", "-1"], "--show: this value is not valid", "-1", "an integer from 0"),
        (["compare", "--budget", "1.2.3h"], "--budget: this value is not valid", "1.2.3h", "a time: 90s"),
        (
            ["train", "--until", "25:99"],
            "--until: this value is not valid",
            "25:99",
            "a step (500), or a time",
        ),
        (
            ["train", "--resume=best"],
            "--resume: this value is not valid",
            "best",
            "auto, or a checkpoint's name",
        ),
    ],
)
def test_option_with_a_wrong_value_is_an_error_with_found_and_expected(
    words: list[str], said: str, found: str, expected: str, capsys
) -> None:
    assert main.main([words[0], "recipe.yaml", *words[1:]]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == f"error: {said} [command-line]"
    assert lines[0] == f"  found:     {found}" and lines[1].startswith(f"  expected:  {expected}")
    assert lines[2] == f"  help:      finetune {words[0]} --help"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["export", "RUN", "--to", "ggf"],
            [
                "error: --to: unknown value [command-line]",
                "  found:     ggf",
                "  expected:  gguf, ollama, vllm, mlx, compressed-tensors",
                "  help:      --to gguf",
            ],
        ),
        (
            ["export", "RUN"],
            [
                "error: `finetune export` needs --to [command-line]",
                "  expected:  finetune export RUN|ADAPTER --to SERVER",
                "  help:      finetune export --help",
            ],
        ),
        (
            ["plan", "a.yaml", "--gpu"],
            [
                "error: --gpu: the value is missing [command-line]",
                "  expected:  --gpu NAME",
                "  help:      finetune plan --help",
            ],
        ),
        (
            ["check", "a.yaml", "--quiet=3"],
            [
                "error: --quiet: this option takes no value [command-line]",
                "  found:     3",
                "  help:      --quiet",
            ],
        ),
        (
            ["report", "RUN", "b"],
            [
                "error: this word is not expected here [command-line]",
                "  found:     b",
                "  help:      finetune report --help",
            ],
        ),
        ([], ["error: the command is missing [command-line]", "  help:      finetune --help"]),
    ],
)
def test_wrong_command_line_looks_like_every_error(words: list[str], lines: list[str], capsys) -> None:
    assert main.main(words) == 2
    assert capsys.readouterr().err.splitlines() == lines


def test_wrong_command_line_with_json_prints_an_object(capsys) -> None:
    assert main.main(["check", "quickstart", "--fst", "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert printed["command"] == "check" and printed["exit_code"] == 2 and printed["result"] is None
    assert printed["problems"][0]["what"] == "`finetune check` has no option `--fst`"


@pytest.mark.parametrize("name", ["check", "train"])
def test_failed_check_ends_with_the_number_of_errors_and_the_next_command(name, tmp_path, capsys) -> None:
    words = [name, str(QUICKSTART), f"train.output_dir={tmp_path}/run"]
    assert main.main([*words, "adapter.type=lroa", "train.max_steps=-3"]) == 2
    *lines, last, more = capsys.readouterr().err.splitlines()
    assert more == f"more about a code in brackets: {command_lines.command('explain', 'adapter-type')}"
    again = command_lines.command("check", str(QUICKSTART))
    assert last == f"2 errors; nothing was started. Correct them, then run: {again}"
    assert "  expected:  at least 1 step" in lines
    assert main.main([*words, "data.max_length=2"]) == 2
    *lines, last, _ = capsys.readouterr().err.splitlines()
    assert last == f"1 error; nothing was started. Correct it, then run: {again}"
    assert "  expected:  at least 8 tokens; the default is 1024" in lines
    assert not (tmp_path / "run").exists()
    assert main.main([name, "absent.yaml"]) == 2  # the file is not a recipe with errors
    assert "nothing was started" not in capsys.readouterr().err


def test_help_lists_every_command_once_in_a_screen_of_80_columns(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 42 and max(map(len, lines)) <= 80
    start, end = lines.index("Start:"), lines.index("First steps:")
    listed = [line.split()[0] for line in lines[start:end] if line.startswith("  ") and "--" not in line]
    assert sorted(listed) == sorted(main.parser()[1])


def test_a_full_disk_is_one_message(capsys) -> None:
    def fills(options: argparse.Namespace) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl")

    assert main.guarded(fills, argparse.Namespace(debug=False)).code == 3
    said = capsys.readouterr().err
    assert "the disk is full (runs/a/metrics.jsonl)" in said and "--resume=auto" in said
    assert main.guarded(fills, argparse.Namespace(debug=True)).code == 3
    assert "Traceback" in (traced := capsys.readouterr().err) and traced.endswith(said)


def test_failed_disk_is_one_message_with_the_file(capsys) -> None:
    def reads(options: argparse.Namespace) -> None:
        client.sha256(Path("/proc/self/mem"))  # its first page can't be read

    assert main.guarded(reads, argparse.Namespace(debug=False)).code == 3
    assert "error: the disk or the network drive failed (/proc/self/mem) [disk]" in capsys.readouterr().err


def test_too_many_open_files_are_one_message(capsys) -> None:
    def opens(options: argparse.Namespace) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "data.jsonl")

    assert main.guarded(opens, argparse.Namespace(debug=False)).code == 3
    assert "too many files are open (data.jsonl)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("unable to mmap 90 bytes from <x>: Cannot allocate memory (12)"),
            "the memory was full",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "the memory was full"),
        (
            RuntimeError("unable to allocate shared memory(shm) for file </torch_1>"),
            "shared memory (/dev/shm)",
        ),
        (OSError(errno.EROFS, "Read-only file system"), "shared memory (/dev/shm)"),  # of a semaphore
        (OSError("AF_UNIX path too long"), "export TMPDIR=/tmp"),
    ],
)
def test_limit_of_the_system_is_one_message(error: Exception, expected: str, capsys) -> None:
    def reaches(*_: object) -> NoReturn:
        raise error

    main.guarded(reaches, argparse.Namespace(debug=False))
    said = capsys.readouterr().err
    assert expected in said and "[internal-error]" not in said and "[library-error]" not in said


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        errors.Panic(
            "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError }"
        ),
    ],
)
def test_limit_of_processes_is_one_message(error: Exception, capsys, monkeypatch) -> None:
    def starts(*_: object) -> NoReturn:
        raise error

    assert main.guarded(starts, argparse.Namespace(debug=False)).code == 3
    said = capsys.readouterr().err
    assert "error: the system starts no more processes or threads [process-limit]" in said
    monkeypatch.setattr(tokenizer_setup, "_tells_apart", starts)
    backend = AutoTokenizer.from_pretrained(MODEL).backend_tokenizer
    with pytest.raises(type(error)):
        tokenizer_setup.can_encode(backend)


LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PARALLELISM_CONFIG_CP_SIZE", "ACCELERATE_GRADIENT_CLIPPING")
READ = (
    "ACCELERATE_MIXED_PRECISION", "ACCELERATE_LOG_LEVEL", "COLUMNS", "FINETUNE_AFTER_OUT_OF_MEMORY",
    "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEBUG_MODE",
    "FSDP_OFFLOAD_PARAMS", "HF_HUB_OFFLINE", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT",
    "HF_DATASETS_IN_MEMORY_MAX_SIZE", "FINETUNE_COMMITS",
)  # fmt: skip


@pytest.mark.parametrize("name", (*LAUNCHED, *READ))
def test_a_launcher_variable_with_a_wrong_value_is_one_message(name: str, capsys, monkeypatch) -> None:
    for value in ("x", "1.5.0", "bf16\n", "9" * 5000):
        monkeypatch.setenv(name, value)
        assert main.main(["explain", "--json"]) == 3
        shown = capsys.readouterr()
        assert json.loads(shown.out)["problems"][0]["code"] == "launch-config"
        assert f"{name}=" in shown.err and f"unset {name}" in shown.err and len(shown.err) < 1000


OUT_OF_RANGE = (
    *((name, "0") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PARALLELISM_CONFIG_CP_SIZE")),
    *(("MASTER_PORT", port) for port in ("-1", "65536", "99999", "")),
    ("PARALLELISM_CONFIG_TP_SIZE", "-3"), ("PARALLELISM_CONFIG_SP_BACKEND", "other"), ("MASTER_ADDR", "a b"),
    ("ACCELERATE_USE_MEGATRON_LM", "true"), ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "abc"),
    ("PYTHONOPTIMIZE", "2"),
    ("SOURCE_DATE_EPOCH", "abc"),
    ("SOURCE_DATE_EPOCH", "1e9"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_launcher_variable_out_of_range_is_one_message(name: str, value: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    assert main.main(["explain"]) == 3
    assert f"unset {name}" in capsys.readouterr().err
    for good in ("0", "80", "6553", "29500", "65535"):
        monkeypatch.setenv("MASTER_PORT", good)
        assert main.main(["explain"]) == 0


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "ACCELERATE_USE_CPU", "FSDP_OFFLOAD_PARAMS"])
def test_empty_switch_is_a_switch_that_is_not_set(name: str, monkeypatch) -> None:
    monkeypatch.setenv(name, "")
    assert main.main(["explain"]) == 0
    assert name not in os.environ


def test_world_size_without_a_launch_is_one_message(capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main.main(["explain"]) == 0, "no process group is made"
    with pytest.raises(errors.UserError, match="unset WORLD_SIZE") as raised:
        collectives.joined("cpu")
    assert raised.value.code == 3


def test_import_of_torch_that_fails_is_no_bug_of_finetune() -> None:
    words = [sys.executable, "-P", "-m", "finetune", "doctor"]
    done = subprocess.run(
        words, env={**os.environ, "TORCH_LOGS": "bogus"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3 and "error: torch failed while finetune" in done.stderr
    assert "Invalid log settings: bogus" in done.stderr and "[library-error]" in done.stderr
    assert "correct or unset TORCH_LOGS, which torch reads when it is imported" in done.stderr


def test_guarded_exception_of_a_library_is_one_message(capsys) -> None:
    """It names the library, the place and the stage; `--debug` shows the traceback."""

    def reads(options: argparse.Namespace) -> None:
        with errors.stage("read the config", "model.name", "another model"):
            yaml.safe_load("[")

    assert main.guarded(reads, argparse.Namespace(debug=False)).code == 3
    said = capsys.readouterr().err
    assert said.startswith("error: model.name: yaml failed while finetune read the config (yaml/")
    assert "ParserError: " in said and "help:      another model; run the command again with --debug" in said
    assert "Traceback" not in said
    assert main.guarded(reads, argparse.Namespace(debug=True)).code == 3
    assert "Traceback" in (traced := capsys.readouterr().err) and traced.endswith(said)


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt(), errors.UserError("odd")])
def test_json_has_its_object_with_debug_too(error: BaseException, tmp_path, monkeypatch, capsys) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("finetune.recipe.loader.load", fails)
    codes = []
    for options in ([], ["--debug"]):
        codes.append(main.main(["check", "quickstart", "--json", *options]))
        said = capsys.readouterr()
        assert json.loads(said.out)["exit_code"] == codes[-1]
        assert ("Traceback" in said.err) == bool(options)
    assert codes[0] == codes[1]


STOPPED_IN_AN_IMPORT = """
import sys
class Stop:
    def find_spec(self, name, *_):
        if name == {name!r}:
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
from finetune.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("name", ["finetune.core.errors", "finetune.cli.sweep", "pydantic"])
def test_ctrl_c_during_the_first_imports_prints_no_traceback(name: str) -> None:
    command = [sys.executable, "-c", STOPPED_IN_AN_IMPORT.format(name=name), "check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == json.loads(done.stdout)["exit_code"] == 130
    assert done.stderr == "interrupted before it was done\n"


LOSES_CTRL_C = """
import argparse, os, signal, sys
from finetune.cli import interrupt, main
def loses(options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("cannot load module more than once per process") from None
signal.signal(signal.SIGINT, signal.default_int_handler)  # the jobs of a shell in the background ignore it
interrupt.note()
sys.exit(main.guarded(loses, argparse.Namespace(debug=False)).code)
"""


def test_ctrl_c_that_a_library_turns_into_another_error_is_still_an_interrupt() -> None:
    done = subprocess.run([sys.executable, "-c", LOSES_CTRL_C], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted before it was done\n")


def test_guarded_exception_of_finetune_itself_is_called_a_bug(capsys) -> None:
    def fails(options: argparse.Namespace) -> None:
        errors.nearest("a", 1)  # pyright: ignore[reportArgumentType] (a bug)

    assert main.guarded(fails, argparse.Namespace(debug=False)).code == 3
    said = capsys.readouterr().err
    assert (
        "error: finetune failed while it ran `finetune fails` (finetune/core/" in said and "this bug" in said
    )


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(f"{errors.NO_MEMORY}: you tried ...")])
def test_guarded_exception_for_lack_of_memory_is_no_bug(error: Exception, capsys) -> None:
    def reads(options: argparse.Namespace) -> None:
        with errors.stage("trained the model", code=errors.Exit.TRAINING):
            raise error

    assert main.guarded(reads, argparse.Namespace(debug=False)).code == 5
    said = capsys.readouterr().err
    assert (
        said.startswith("error: the memory was full while finetune trained the model") and "bug" not in said
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["trian", "x.yaml"],
            "there is no command `trian` [command-line]\n  help:      finetune train x.yaml",
        ),
        (["tune", "x.yaml"], "there is no command `tune` [command-line]\n  help:      finetune sweep x.yaml"),
        (
            ["check", "x.yaml", "--preflight"],
            "no option `--preflight` [command-line]\n  help:      --rehearse",
        ),
        (["ablate", "x.yaml", "--ladder", "a"], "no option `--ladder` [command-line]\n  help:      --opt"),
        (
            ["ablate", "x.yaml", "--ladder=a"],
            "no option `--ladder` [command-line]\n  help:      --optimizations",
        ),
        (["zzz"], "there is no command `zzz` [command-line]\n  help:      finetune --help"),
        (["train"], "`finetune train` needs RECIPE [command-line]\n  expected:  finetune train RECIPE\n"),
        (
            ["train", str(QUICKSTART), "--quite"],
            "`finetune train` has no option `--quite` [command-line]\n  help:      --quiet",
        ),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_mistyped_command_is_told_what_there_is(given: list[str], said: str, capsys) -> None:
    assert main.main(given) == 2
    assert said in capsys.readouterr().err


def test_overrides_of_one_command_are_not_the_next_one_s() -> None:
    assert main.parse(["plan", "x.yaml", "--gpu", "l4", "adapter.r=4"]).overrides == ["adapter.r=4"]
    assert main.parse(["plan", "x.yaml", "--gpu", "l4"]).overrides == []


def test_recipes_prints_a_shipped_recipe(capsys) -> None:
    assert main.main(["recipes", "quickstart"]) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    assert main.main(["recipes", "quickstrat"]) == 2
    assert "help:      finetune recipes quickstart" in capsys.readouterr().err


def test_version_and_names_of_other_tools(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"finetune {finetune.__version__}\n"
    for given, meant in (("serve", "chat"), ("eval", "evaluate"), ("trian", "train")):
        assert main.main([given]) == 2
        assert f"help:      finetune {meant}\n" in capsys.readouterr().err


def test_explain_describes_every_code_and_suggests_the_nearest(capsys) -> None:
    for code, text in error_codes.CODES.items():
        assert main.main(["explain", f"[{code}]"]) == 0
        printed = capsys.readouterr().out.split("\n")
        assert printed[0] == code and " ".join(printed[1:]).strip() == text
        assert max(map(len, printed)) <= 80
    assert main.main(["explain"]) == 0
    assert capsys.readouterr().out.split("\n")[: len(error_codes.CODES)] == sorted(error_codes.CODES)
    assert main.main(["explain", "unknown_key"]) == 2
    assert "finetune explain unknown-key" in capsys.readouterr().err


def test_error_shows_the_line_of_the_recipe_with_a_caret(tmp_path, capsys) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("model: {name: absent}\ndata:\n  name: absent\nadapter:\n  type: lora\n  r: 0\n")
    assert main.main(["check", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"({path}:6:3) [value-range]\n     6 |   r: 0\n       |   ^\n" in said


def test_line_with_a_secret_is_not_shown(tmp_path, capsys) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("model: {name: absent, token: opensesame}\ndata: {name: a}\nadapter: {type: lora}\n")
    assert main.main(["check", str(path)]) == 2
    said = capsys.readouterr().err
    assert "[secret-in-recipe]" in said and "opensesame" not in said


HUGE = "1" + "0" * 310


@pytest.mark.parametrize(
    "key", ["weight_decay", "adam_epsilon", "router_aux_loss_coef", "neftune_noise_alpha"]
)
def test_integer_that_no_float_can_hold_is_an_error_of_the_recipe(key: str, tmp_path, capsys) -> None:
    assert main.main(["check", str(QUICKSTART), f"train.{key}={HUGE}"]) == 2
    assert f"train.{key}" in (said := capsys.readouterr().err) and "[library-error]" not in said
    (tmp_path / "theirs.yaml").write_text(
        f"model_name_or_path: {MODEL}\nstage: sft\nfinetuning_type: lora\ndataset: a\n{key}: {HUGE}\n"
    )
    assert main.main(["import", str(tmp_path / "theirs.yaml"), "--output", str(tmp_path / "r.yaml")]) in (
        0,
        2,
    )
    assert "[library-error]" not in capsys.readouterr().err


@pytest.mark.parametrize("key", ["attention_dropout", "hidden_size", "initializer_range", "rope_theta"])
def test_integer_that_no_float_can_hold_is_an_error_of_the_config(key: str, tmp_path, capsys) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: 10**310}))
    assert main.main(["check", str(QUICKSTART), f"model.name={model}"]) == 2
    assert "[internal-error]" not in capsys.readouterr().err
