"""`finetune report` of a run that has not come to its end: what ended it, and from where it can go on."""

import pytest
from transformers import TrainerCallback

from finetune.cli import main
from finetune.recipe import loader
from finetune.reporting import html_report, run_files
from finetune.training import pipeline
from support.paths import QUICKSTART


class Crashes(TrainerCallback):
    """A defect that nobody foresaw, in the second step."""

    def on_step_end(self, args, state, control, **given) -> None:
        if state.global_step == 2:
            raise RuntimeError("a kernel of hf_abcdefghijklmnopqrstuv is gone")


def test_a_crash_is_told_from_a_run_that_goes_on(small, two_layers, tmp_path, capsys) -> None:
    options = ["train.max_steps=4", "train.warmup_steps=0", "train.effective_batch_size=8", *small]
    options += [f"model.name={two_layers}", f"train.output_dir={tmp_path / 'run'}"]
    with pytest.raises(RuntimeError, match="a kernel"):
        pipeline.run(loader.load(QUICKSTART, options), verbosity="quiet", callbacks=[Crashes()])
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "\nerror: RuntimeError: a kernel of **** is gone\n" in log
    capsys.readouterr()
    assert main.main(["report", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "The run failed and saved no weights" in said and "error: RuntimeError: a kernel" in said


def test_a_stopped_run_says_what_it_saved_and_how_it_goes_on(train, capsys) -> None:
    run = train("train.max_steps=6", "train.logging_steps=2", "--until=3", code=75)
    capsys.readouterr()
    assert main.main(["report", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "The run is not finished" in said and "The run ended after step 3." in said
    assert "continue from the checkpoint of step 3, add --resume" in said


def test_a_failed_run_that_has_a_checkpoint(tmp_path) -> None:
    (tmp_path / "checkpoints" / "step-8").mkdir(parents=True)
    (tmp_path / "checks.json").write_text("[]")
    (tmp_path / "log.txt").write_text("begun\nerror: the loss is not finite\n")
    verdict = html_report.judge(run_files.read(tmp_path))
    assert verdict.title == "The run failed and saved only checkpoints" and verdict.kind == "bad"
    assert "checkpoint of step 8" in verdict.why and verdict.why.endswith("error: the loss is not finite")
    log = tmp_path / "log.txt"
    log.write_text(f"{log.read_text()}resumed\nstep 9/20  loss 1.0\n")
    assert html_report.judge(run_files.read(tmp_path)).title == "The run is not finished"
