"""finetune ablate: an ablation measured on the tiny model; what is kept and why; A against B; the docs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from finetune.cli import main
from finetune.core.console import Console
from finetune.core.errors import UserError
from finetune.experiments.ablation import ablation_report, optimizations
from finetune.experiments.runner import kept_runs, measured_run, worker_process
from finetune.hardware.detection import Hardware
from finetune.launch import accelerate_config
from finetune.recipe import loader
from finetune.reporting import plots
from finetune.run_folder.run_folder import RunFolder
from support import tables
from support.paths import MODEL, QUICKSTART, ROOT
from support.printed_commands import assert_commands_run
from support.runs import show_progress_at_once
from support.scripts import module_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIPPED = optimizations.read(ROOT / "recipes" / "ablation.yaml")
SHORT = """
measure: {steps: 3, warm_up: 1, repeats: 1, held_out_rows: 4, min_gain: 0}
baseline:
  mixed_precision: "no"
  set:
    {model.attention: eager, speed.activation_checkpointing: full, speed.loss: trl, train.optim: adamw_torch}
optimizations:
  - {name: no_recompute, kind: memory, what: it, set: {speed.activation_checkpointing: none}}
  - {name: broken, kind: data, what: it, set: {data.max_example_bytes: 1}}
  - {name: refused, kind: data, what: it, set: {train.effective_batch_size: 5}}
  - {name: faster_than_light, kind: precision, what: it, set: {train.tf32: true}, needs: {device: cuda}}
  - {name: packing, kind: data, what: it, set: {data.packing: true}, same_tokens: true, gate: held_out}
  - {name: nothing, kind: noop, what: it, noop: there is nothing to switch}
"""


class Climbed:
    """An ablation that was measured once for all tests."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words, self.printed = folder, words, io.StringIO()

    def again(self, folder: Path) -> int:
        return main.main([*self.words, "--output", str(folder)])

    def found(self, folder: Path) -> dict[str, Any]:
        return json.loads((folder / "quickstart" / "ablation.json").read_text())


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory, small, two_layers) -> Iterator[Climbed]:
    folder = tmp_path_factory.mktemp("ablation")
    (folder / "ablation.yaml").write_text(SHORT)
    words = ["ablate", str(QUICKSTART), *small, f"model.name={two_layers}", "train.effective_batch_size=4"]
    words.append("train.per_device_train_batch_size=4")  # more than a step of packed rows has
    made = Climbed(folder / "results", [*words, "--optimizations", str(folder / "ablation.yaml")])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        show_progress_at_once(patch)
        with contextlib.redirect_stdout(io.StringIO()) as made.printed:
            assert made.again(made.folder) == 0
    yield made
    shutil.rmtree(folder)


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["optimizations"]}


def test_an_ablation_is_measured_and_what_fails_is_named(climbed: Climbed) -> None:
    found = climbed.found(climbed.folder)
    row = rows(found)
    assert row["nothing"]["status"] == "no-op" and row["nothing"]["why"] == "there is nothing to switch"
    faster = row["faster_than_light"]
    assert (faster["status"], faster["why"]) == ("skipped", "this machine has no GPU")
    assert row["refused"]["status"] == "refused" and "is not a multiple" in row["refused"]["why"]
    assert row["broken"]["status"] == "error" and "too large to read into memory" in row["broken"]["why"]
    assert row["no_recompute"]["status"] in ("kept", "dropped")
    assert row["no_recompute"]["alone"]["apart"] < 1e-3, "recomputing changes no loss"
    packed = loader.load(
        climbed.folder / "data" / "packing_rank16" / "quickstart-alone-1" / "recipe.resolved.yaml"
    )
    assert packed.train.effective_batch_size == packed.train.per_device_train_batch_size == 2
    assert found["baseline"]["held_out"] is not None and found["as_is"]["tokens_per_second"] > 0
    text = (climbed.folder / "quickstart" / "ablation.md").read_text()
    assert "| no_recompute |" in text and "nothing no-op: there is nothing to switch" in text


def test_an_ablation_shows_its_progress(climbed: Climbed) -> None:
    printed = climbed.printed.getvalue()
    assert re.search(r"^each alone, no_recompute\S*: \d+%", printed, re.MULTILINE)


def test_runs_are_ordinary_run_folders_by_kind_name_and_rank(climbed: Climbed) -> None:
    run = climbed.folder / "memory" / "no_recompute_rank16" / "quickstart-alone-1"
    assert (run / "adapter").exists() and (run / "metrics.jsonl").exists()
    assert (climbed.folder / "baseline" / "quickstart-baseline-1" / "checks.json").exists()
    resolved = loader.load(run / "recipe.resolved.yaml")
    assert resolved.speed.activation_checkpointing == "none" and resolved.model.attention == "eager"
    assert measured_run.machine(RunFolder(run))["model"] == resolved.model.name


def test_a_repeat_without_held_out_rows_is_of_the_same_data(climbed: Climbed, small) -> None:
    """Only the first run of a variant evaluates; what it evaluates on is not trained on."""
    run = RunFolder(climbed.folder / "memory" / "no_recompute_rank16" / "quickstart-alone-1")
    assert len(run.read("data_report.json")["train"]["sources"]) == 2
    trained = hashlib.sha256(Path(small[0].removeprefix("data.name=")).read_bytes()).hexdigest()
    expected = hashlib.sha256(json.dumps([trained]).encode()).hexdigest()[:12]
    assert measured_run.machine(run)["train files"] == expected


@pytest.mark.soak
def test_what_runs_on_gpus_are_forked_from_asks_for_none() -> None:
    """A process that has asked for a GPU, as some packages do while they are imported, can't be forked."""
    asks = "print([name for name in ('bitsandbytes', 'torchao', 'peft') if name in sys.modules])"
    code = f"import sys, {', '.join(worker_process.PRELOADED)}; {asks}"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_the_next_run_s_process_imports_while_one_runs(tmp_path, monkeypatch) -> None:
    """On a GPU, where the server that runs are forked from may not import all; each has its own log."""
    monkeypatch.setattr(measured_run, "CORES", 1)
    logs, gpu = [tmp_path / f"{number}.log" for number in range(3)], {"CUDA_VISIBLE_DEVICES": ""}
    began = []
    with measured_run.stoppable():
        for log in logs[:2]:
            assert measured_run.start(["doctor"], str(log), gpu, cpu=False, more=True) == 0
            began.append(measured_run._waiting[0][0].pid)
        assert measured_run.start(["no-such-command"], str(logs[2]), {}, cpu=False) == 2, (
            "another environment"
        )
        (waits,) = measured_run._waiting
    assert not measured_run._waiting and not waits[0].is_alive() and began[0] != began[1] == waits[0].pid
    assert all("finetune-toolkit" in log.read_text() for log in logs[:2])
    assert "no-such-command" in logs[2].read_text()


def test_workers_of_a_forked_run_start_as_those_of_any_run(tmp_path) -> None:
    """By the server's method each imported everything anew, which a data loader's first batch waited for."""
    log = tmp_path / "log"
    code = "import multiprocessing\nfrom finetune.experiments.runner import worker_process\n"
    code += f"worker_process.begin({str(log)!r})\n"
    code += "print(multiprocessing.get_start_method(), flush=True)"
    process = multiprocessing.get_context("forkserver").Process(target=exec, args=(code,))
    process.start()
    process.join()
    assert log.read_text().split() == multiprocessing.get_all_start_methods()[:1]


def test_page_and_picture_need_nothing_else(climbed: Climbed) -> None:
    page = (climbed.folder / "quickstart" / "ablation.html").read_text()
    assert "<svg" in page and not re.search(r"(src|href)=.?https?:", page)
    assert (climbed.folder / "quickstart" / "ablation.svg").read_text().startswith("<svg")


def test_tables_of_an_ablation_fit_80_and_120_columns(climbed: Climbed, tmp_path) -> None:
    found = climbed.found(climbed.folder)
    tables.assert_tables_fit(lambda: ablation_report.show(Console(), found, tmp_path), count=2)
    assert_commands_run(climbed.printed.getvalue())


def test_the_best_recipe_checks_and_says_where_values_are_from(climbed: Climbed, capsys) -> None:
    best = climbed.folder / "quickstart" / "best.yaml"
    assert main.main(["check", str(best)]) == 0, capsys.readouterr().err
    text = best.read_text()
    assert re.search(r"activation_checkpointing: .*ablation: no_recompute, (kept|dropped)", text)
    assert re.search(r"max_example_bytes: \S+ .*ablation: broken, error", text)
    assert loader.load(best).model.attention == "auto", "no optimization was about it"


def test_the_launch_of_what_was_kept_is_written_where_a_plain_run_has_another_precision(tmp_path) -> None:
    cpu, ampere = (Hardware(kind, kind, 1, (8, 0), 24.0, 8) for kind in ("cpu", "cuda"))
    for machine, precision, other in ((cpu, "bf16", "no"), (ampere, "no", "bf16")):
        stack = {"stack": {"mixed_precision": precision}}
        assert ablation_report.launch_config({"stack": {"mixed_precision": other}}, machine) == ""
        file = tmp_path / f"{machine.name}.yaml"
        file.write_text(ablation_report.launch_config(stack, machine))
        accelerate_config.check(file)
        assert accelerate_config.read(file)["mixed_precision"] == precision


def marks(folder: Path) -> dict[Path, str]:
    """Of the runs that did not fail."""
    every = {path: path.read_text() for path in folder.rglob(measured_run.MARK)}
    return {path: text for path, text in every.items() if not json.loads(text)["failed"]}


def test_a_measured_optimization_is_not_measured_again(climbed: Climbed, tmp_path, capsys) -> None:
    copy = tmp_path / "results"
    shutil.copytree(climbed.folder, copy)
    before = marks(copy)
    environment = copy / "memory" / "no_recompute_rank16" / "quickstart-alone-1" / "environment.json"
    changed = json.loads(environment.read_text())
    changed["packages"]["torch"] = "1.0"
    environment.write_text(json.dumps(changed))
    assert climbed.again(copy) == 0
    said = capsys.readouterr().out
    made = re.findall(r"^\S+-[1-9]: (kept: )?.*tokens/s$", said, re.M)
    assert len(made) >= 5 and all(made), "nothing was measured again"  # the stack, by what is kept now
    assert marks(copy) == before
    assert re.search(r"^data/broken_rank16/quickstart-alone-1: FAILED", said, re.M), (
        "what failed is run again"
    )
    row = rows(climbed.found(copy))["no_recompute"]
    assert row["status"] == "NOT COMPARABLE" and "torch: 1.0 against" in row["why"]


def test_a_kept_baseline_of_another_torch_is_refused(climbed: Climbed, tmp_path, capsys) -> None:
    """Its second run, by which the noise is known."""
    copy = tmp_path / "results"
    shutil.copytree(climbed.folder, copy)
    environment = copy / "baseline" / "quickstart-baseline-2" / "environment.json"
    changed = json.loads(environment.read_text())
    changed["packages"]["torch"] = "1.0"
    environment.write_text(json.dumps(changed))
    assert climbed.again(copy) == 2
    said = capsys.readouterr().err
    assert "NOT COMPARABLE" in said and "torch: 1.0 against" in said


def test_results_of_another_recipe_of_that_name_are_not_replaced(climbed: Climbed, tmp_path, capsys) -> None:
    copy = tmp_path / "results" / "quickstart"
    shutil.copytree(climbed.folder / "quickstart", copy)
    other = tmp_path / "quickstart.yaml"
    other.write_text(QUICKSTART.read_text().replace("examples/", f"{ROOT}/examples/"))
    before = {path: path.read_bytes() for path in copy.iterdir()}
    for words in ([*climbed.words, "adapter.r=8"], ["ablate", str(other), "adapter.r=8"]):
        assert main.main([*words, "--output", str(copy.parent)]) == 2
        said = capsys.readouterr().err
        assert (
            "the folder holds an experiment with other values of" in said
            and "adapter.r" in said
            and "--output" in said
        )
    assert {path: path.read_bytes() for path in copy.iterdir()} == before


def test_a_run_is_of_the_content_of_its_data_and_its_base_model(tmp_path, small) -> None:
    """Not of their names alone: a file that was changed is another run's."""
    files = [tmp_path / f"{name}.jsonl" for name in ("train", "test")]
    for file, given in zip(files, small, strict=True):
        shutil.copy(given.partition("=")[2], file)
    model = shutil.copytree(MODEL, tmp_path / "model")
    words = [f"data.name={files[0]}", f"data.validation={files[1]}", f"model.name={model}"]
    job = measured_run.RunCommand(str(QUICKSTART), words, tmp_path / "run")
    found = [measured_run.identity(job)]
    for file in (*files, model / "tokenizer.json", model / "model.safetensors", model / "config.json"):
        was, now = (b"1e-06", b"1e-05") if file.name == "config.json" else (b"a", b"b")
        content = file.read_bytes()
        assert was in content
        file.write_bytes(now.join(content.rsplit(was, 1)))
        found.append(measured_run.identity(job))
    assert len({*found}) == 6 and measured_run.identity(job) == found[-1]


def test_a_run_that_failed_is_made_again_and_a_finished_one_is_not(tmp_path, monkeypatch) -> None:
    """What it failed by may be mended, in a launch config too: its content counts, not its name."""
    codes = iter([5, 0, 0])
    monkeypatch.setattr(kept_runs, "set_aside", shutil.rmtree)
    monkeypatch.setattr(measured_run, "start", lambda words, log, *_, **__: Path(log).touch() or next(codes))
    config = tmp_path / "cpu.yaml"
    config.write_text("use_cpu: true\n")
    job = measured_run.RunCommand(str(QUICKSTART), [], tmp_path / "run", accelerate=str(config))
    assert [measured_run.make(job, cpu=True) for _ in range(3)] == [True, True, False]
    config.write_text("use_cpu: true\nnum_processes: 2\n")
    assert measured_run.make(job, cpu=True) and next(codes, None) is None


def test_a_run_whose_files_change_meanwhile_has_no_result(tmp_path, two_layers, monkeypatch) -> None:
    model = shutil.copytree(two_layers, tmp_path / "model")

    def changes(*_: object, **__: object) -> int:
        (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + "\n")
        return 0

    monkeypatch.setattr(measured_run, "start", changes)
    job = measured_run.RunCommand(str(QUICKSTART), [f"model.name={model}"], tmp_path / "run")
    with pytest.raises(UserError, match="a file that the runs read changed"):
        measured_run.make(job, cpu=True)
    assert not (tmp_path / "run" / measured_run.MARK).exists()


def test_the_table_shows_when_runs_were_made(climbed: Climbed, tmp_path) -> None:
    copy = tmp_path / "results"
    shutil.copytree(climbed.folder, copy)
    mark = copy / "baseline" / "quickstart-baseline-1" / measured_run.MARK
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "date": "2020-02-02"}))
    assert climbed.again(copy) == 0
    assert re.search(r", 2020-02-02 to 20\d\d-\d\d-\d\d: ", (copy / "quickstart" / "ablation.md").read_text())


def test_results_of_other_hardware_are_refused(climbed: Climbed, tmp_path, capsys) -> None:
    copy = tmp_path / "results"
    shutil.copytree(climbed.folder / "baseline", copy / "baseline")
    environment = copy / "baseline" / "quickstart-baseline-1" / "environment.json"
    changed = json.loads(environment.read_text())
    changed["hardware"]["name"] = "NVIDIA H100"
    environment.write_text(json.dumps(changed))
    assert climbed.again(copy) == 2
    assert "NOT COMPARABLE" in capsys.readouterr().err


@pytest.mark.soak
def test_an_optimized_recipe_is_held_to_its_promises(small, two_layers, tmp_path, capsys) -> None:
    script = module_of("scripts", "validate_optimizations")
    base = str(ROOT / "recipes" / "baselines" / "quickstart.yaml")
    words = ["--baseline", base, "--optimized", str(QUICKSTART), "--output", str(tmp_path), *small]
    words += ["--steps", "3", "--warm-up", "1", "--repeats", "1", "--price-per-hour", "2"]
    words += [f"model.name={two_layers}"]
    assert script.main([*words, "--min-speedup", "0.01", "--max-loss-delta", "0.5%"]) == 0
    assert "cost per billion tokens, 1 x 2 per hour" in capsys.readouterr().out
    place = tmp_path / "ab" / "quickstart-against-quickstart"
    assert "| optimized |" in (place / "quickstart" / "ablation.md").read_text()
    before = marks(place)
    assert script.main([*words, "--min-speedup", "99", "--max-memory-gib", "0.01"]) == 5
    said = capsys.readouterr().err
    assert "speed-up misses its limit" in said and "peak memory misses its limit" in said
    assert marks(place) == before, "finished runs are kept"
    with pytest.raises(SystemExit):
        script.main(["--help"])
    assert "Exit codes:\n0 " in capsys.readouterr().out


# Judged without training


def test_a_folder_that_cannot_be_made_is_said_before_a_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(measured_run, "make", lambda *_, **__: pytest.fail("a run began"))
    (tmp_path / "file").touch()
    assert main.main(["ablate", str(QUICKSTART), "--output", str(tmp_path / "file")]) == 2
    assert "`ablate` can't use this folder" in capsys.readouterr().err
    words = ["--baseline", str(QUICKSTART), "--optimized", str(QUICKSTART), "--min-speedup", "1"]
    script = module_of("scripts", "validate_optimizations")
    assert script.main([*words, "--output", str(tmp_path / "file")]) == 2
    assert "finetune can't write to this path" in capsys.readouterr().err


def test_why_a_run_failed_is_its_log_s_last_error() -> None:
    log = "warning\nerror: out of memory (a.yaml)\n  found:     at 1 row\n"
    assert measured_run.why(log, 5) == "out of memory (a.yaml): at 1 row"
    assert measured_run.why(log + "error: and then\n", 5).endswith("; and then")
    assert "signal 9" in measured_run.why("", -9)


def test_held_out_rows_are_cut_at_ends_of_lines_alone(tmp_path) -> None:
    rows = ['{"text": "a\u2028b"}', '{"text": "c"}', '{"text": "d"}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    kept = measured_run.cut_held_out(str(tmp_path / "rows.jsonl"), tmp_path, 2, Console(quiet=True))
    assert Path(str(kept)).read_text(encoding="utf-8") == "\n".join(rows[:2]) + "\n"


def test_held_out_rows_are_those_of_all_files_that_are_named(tmp_path, capsys) -> None:
    """A glob or a folder; of what is no lines it is said that it does not count."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    for name in (f"{tmp_path}/*.jsonl", str(tmp_path)):
        kept = measured_run.cut_held_out(name, tmp_path / "out", 9, Console(quiet=False))
        assert Path(str(kept)).read_text() == '{"text": "a"}\n{"text": "b"}\n'
    with pytest.raises(UserError, match="does not exist"):
        measured_run.cut_held_out(f"{tmp_path}/c*.jsonl", tmp_path / "out", 9, Console(quiet=False))
    assert capsys.readouterr().out == ""
    (tmp_path / "c.csv").touch()
    for name in (f"{tmp_path}/c.csv", "organization/name"):
        assert measured_run.cut_held_out(name, tmp_path / "out", 9, Console(quiet=False)) is None
        assert f"data.validation is not .jsonl: {name}" in capsys.readouterr().out.replace("\n", " ")


def test_tokens_of_a_cpu_second_are_each_step_s_own(tmp_path) -> None:
    """Steps have other numbers of tokens, the first one most of all."""
    place, tokens, seconds = RunFolder(tmp_path), (100, 200, 400, 500), (50.0, 60.0, 80.0, 95.0)
    place.write(measured_run.MARK, {"identity": "a", "failed": "", "date": "2026-01-01", "seconds": 1.0})
    one = {"loss": "nan", "gpu_memory_gib": None, "host_memory_gib": 1.0, "mfu": None}
    one |= {"tokens_per_second": 1.0, "step_seconds": 1.0}
    lines = [
        {"step": at, "tokens": have, "cpu_seconds": took, **one}
        for at, (have, took) in enumerate(zip(tokens, seconds, strict=True), 1)
    ]
    place.write_text("metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_run, "machine", lambda _: {})
        for warm_up in (0, 1):
            found = measured_run.figures(tmp_path, warm_up)
            assert (found["tokens_per_cpu_second"], found["tokens"]) == (10.0, 125.0)
            assert all(map(math.isnan, found["losses"])), "what is not finite is written as text"


def test_cores_are_those_that_may_be_used(monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert measured_run.cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert measured_run.cores() == 64


def test_bars_of_an_optimization_that_was_not_stacked() -> None:
    drawn = plots.bars([plots.Bar("a", [1.0, None], [0.1, 0.0])], ("alone", "stacked"), "times")
    assert drawn.startswith("<svg") and "alone" in drawn


def test_the_optimizations_of_the_guide_are_those_that_were_measured() -> None:
    found = json.loads((ROOT / "benchmarks" / "ablation.json").read_text())
    readme = (ROOT / "docs" / "guides" / "ablate.md").read_text()
    for name in ("bf16", "sdpa", "packing", "chunked_loss", "no_recompute"):
        row = rows(found)[name]
        line = re.search(rf"^{name} .*$", readme, re.MULTILINE)
        assert line and line[0].endswith(f"{row['status']}: {row['why']}")
        if row["status"] != "skipped":
            assert f"{row['alone']['speedup']:.2f} ±{row['alone']['noise']:.2f}" in line[0]
