"""Run folders that were made before the recipe keys were renamed: every later command still reads them.

tests/golden/run-format-1 holds a finished run and a stopped one, trained at commit 333d133 under bf16, with
every key that has a new name. The stopped run was killed before step 4. A resume is compared with no figures:
other CPUs round bf16 in other ways.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.evaluation import evaluator
from finetune.recipe import loader, renames
from finetune.run_folder import comparability, run_folder
from finetune.run_folder.run_folder import RunFolder
from support.paths import MODEL, QUICKSTART, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT = ROOT / "tests" / "golden" / "run-format-1"


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], RunFolder]:
    """`old_run(name)`: a copy of a stored run, whose files lie here."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")

    def copy(name: str) -> RunFolder:
        folder = tmp_path / name
        shutil.copytree(KEPT / name, folder)
        for path in folder.glob("*.*"):  # not in checkpoints/, whose files are hashed
            path.write_text(path.read_text().replace("/srv/finetune", str(ROOT)))
        if (folder / "adapter").exists():  # the base model's own; left out of the repository
            shutil.copy(MODEL / "tokenizer.json", folder / "adapter")
        return RunFolder(folder)

    return copy


def test_stored_runs_have_every_renamed_key() -> None:
    raw = yaml.safe_load((KEPT / "finished" / "recipe.resolved.yaml").read_text())
    held = {f"{section}.{key}" for section, keys in raw.items() for key in keys}
    assert renames.KEYS.keys() - held == {"adapter.from"}, "a key of other runs"
    for name, old in renames.FILES.items():
        assert (KEPT / "finished" / old).exists() and not (KEPT / "finished" / name).exists()


def test_old_recipe_is_read_under_todays_names(old_run) -> None:
    run = old_run("finished")
    recipe = run_folder.recipe_of(run)
    assert (recipe.model.quantization, recipe.speed.activation_checkpointing) == ("none", "full")
    assert (recipe.eval.eval_steps, recipe.eval.early_stopping_patience) == (2, 3)
    assert recipe.origin.where["speed", "activation_checkpointing"].startswith(str(run.recipe))
    assert recipe.origin.set_by["model.quantization"] == "recipe"
    resolved = comparability.resolved(run)
    assert resolved["model.storage"][0] == '"bf16"'
    assert resolved["model.quantization"] == ('"none"', "override")
    assert resolved["speed.activation_checkpointing"][0] == '"full"' and "speed.recompute" not in resolved
    (check,) = [row for row in run.read("checks.json") if row["option"] == "speed.recompute"]
    assert check["expected"] == check["actual"] == "6 of 6" and check["passed"] is True


def test_old_recipe_elsewhere_is_an_error_that_names_the_new_keys(old_run) -> None:
    with pytest.raises(UserError) as raised:
        loader.load(old_run("finished").recipe)
    found = {problem.key: problem.fix for problem in raised.value.problems}
    assert found["speed.base"] == "model.quantization: none"
    assert found["speed.recompute"] == "speed.activation_checkpointing: full"
    assert found["eval.keep_best"] == "eval.load_best_model_at_end: true"


def test_old_run_is_evaluated_reported_merged_and_published(old_run, capsys) -> None:
    run = old_run("finished")
    before = run.read("eval.json")
    assert main.main(["evaluate", str(run.path), "--quiet"]) == 0, capsys.readouterr().err
    after = run.read("eval.json")
    assert after["tuned"]["loss"] == pytest.approx(before["tuned"]["loss"], rel=0.02)
    assert main.main(["report", str(run.path), "--quiet"]) == 0
    page = (run.path / "report.html").read_text()
    assert "activation_checkpointing" in page and "not there" not in page
    assert main.main(["merge", str(run.path), "--quiet"]) == 0, capsys.readouterr().err
    assert main.main(["publish", str(run.path), "--dry-run", "--repo", "me/it"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "receipts.json" in said and "recipe.resolved.yaml" in said
    assert main.main(["compare", str(run.path), str(run.path), "--quiet"]) == 0, capsys.readouterr().err


def test_old_stopped_run_resumes(old_run, tmp_path, capsys) -> None:
    run = old_run("stopped")
    raw = yaml.safe_load(run.recipe.read_text())
    given = [f"model.name={MODEL}", f"data.name={KEPT / 'rows.jsonl'}", f"train.output_dir={run.path}"]
    given += [f"data.cache_dir={tmp_path / 'cache'}", f"data.validation={KEPT / 'validation.jsonl'}"]
    given += ["data.validation_fraction=null"]
    for key in ("adapter.r", "adapter.lora_alpha", "adapter.target_modules"):
        section, _, name = key.partition(".")
        given.append(f"{key}={json.dumps(raw[section][name])}")
    given += [
        "train.max_steps=4",
        "train.warmup_steps=0",
        "train.effective_batch_size=4",
        "train.save_steps=2",
    ]
    given += ["speed.activation_checkpointing=full", "model.quantization=none", "train.save_total_limit=1"]
    given += [
        "eval.eval_steps=2",
        "eval.early_stopping_patience=3",
        "eval.forgetting=false",
        "eval.samples=1",
    ]
    given += ["eval.max_new_tokens=4", "eval.metric_for_best_model=loss", "eval.load_best_model_at_end=true"]
    assert main.main(["train", str(QUICKSTART), *given, "--resume", "--quiet"]) == 0, capsys.readouterr().err
    assert [line["step"] for line in run.steps()] == [1, 2, 3, 4]
    assert run.format_version == run_folder.FORMAT_VERSION and run.finished
    assert not any((run.path / old).exists() for old in renames.FILES.values())


def test_old_bf16_base_under_another_precision_is_said(old_run, monkeypatch) -> None:
    """`speed.base: bf16` held under any precision; `none` is the launch's, here fp32."""
    run = old_run("finished")
    before = run.read("eval.json")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    found = evaluator.run(run.path)
    assert (
        "this evaluation stores the base model in fp32, but this run used bf16" in found["settings"]["notes"]
    )
    assert run.read("eval.json") == before, "the run's own figures stay"


def test_old_runs_with_their_general_text_elsewhere_are_comparable(old_run, tmp_path) -> None:
    texts = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        text = tmp_path / name / "general.jsonl"
        text.write_text('{"text": "A river runs to the sea."}\n')
        run = RunFolder(Path(shutil.copytree(old_run("finished").path, tmp_path / f"{name}-run")))
        shutil.rmtree(tmp_path / "finished")
        evaluator.run(run.path, [f"eval.forgetting={text}", "eval.generate=false"])
        texts.append(comparability.facts(run))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("stated", "fix"),
    [(99, "newer release"), ("2", "restore"), (None, "restore"), (0, "restore"), (True, "restore")],
)
def test_format_version_that_is_not_known_is_refused(stated: object, fix: str, old_run) -> None:
    run = old_run("finished")
    run.write("environment.json", {**run.read("environment.json"), "format_version": stated})
    with pytest.raises(UserError, match=fix):
        run_folder.recipe_of(run)
