"""What the masks are for: after training on a handful of rows, generation ends by itself."""

import json
from types import SimpleNamespace

import pytest

from finetune.core.run_checks import RunChecks
from finetune.data.audit import Report
from finetune.recipe import loader
from finetune.training import training_data
from support.paths import DATA, QUICKSTART
from support.runs import metrics


def test_the_run_check_allows_what_the_audit_allows() -> None:
    """7 of 10 are 0.7 of them, though 1 - 0.7 is a little more than 0.3 in floats."""
    checks, loaded = RunChecks(), loader.load(QUICKSTART, ["data.expect.no_end_of_turn=0.7"])
    for without in (7, 8):
        report = Report(kept=10, counts={"no_end_of_turn": without})
        run = SimpleNamespace(recipe=loaded, checks=checks)
        prepared = SimpleNamespace(report={"train": report})
        data = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None), prepared=prepared)
        training_data.add_data_checks(run, data)
    assert [(one["actual"], one["passed"]) for one in checks.as_json()] == [
        ("3 examples", True),
        ("2 examples", False),
    ]


@pytest.mark.soak
def test_200_steps_on_20_rows_and_every_answer_ends_by_itself(train, tmp_path) -> None:
    lines = (DATA / "train.jsonl").read_text().splitlines()[:20]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "same.jsonl").write_text("\n".join(lines) + "\n\n")
    run = train(
        f"data.name={tmp_path / 'train.jsonl'}",
        f"data.validation={tmp_path / 'same.jsonl'}",  # the question is whether it stops, not what it knows
        "data.expect.in_validation=1",
        "data.chat_template=mistral",  # the base has never seen its [INST]
        "data.packing=true",
        "data.max_length=256",
        "train.max_steps=200",
        "train.effective_batch_size=1",
        "train.learning_rate=8e-3",
        "eval.max_new_tokens=128",
    )
    scores = run.read("eval.json")
    assert scores["base"]["ended"] < 1.0, "the base did not know how"
    assert scores["tuned"]["ended"] == 1.0
    assert scores["tuned"]["exact_match"] >= 0.9
    assert metrics(run)[-1]["loss"] < 0.05
    report = json.loads((run.path / "data_report.json").read_text())["train"]
    assert report["kept"] == 20 and report["counts"] == {"in_validation": 20}
