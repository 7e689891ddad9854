"""Real models and real data through the same recipe format, where they are at hand."""

import json
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.run_folder.run_folder import RunFolder
from support.paths import ASSETS
from support.runs import metrics

pytestmark = pytest.mark.skipif(
    not ASSETS.is_dir(), reason=f"no test assets in {ASSETS} (FINETUNE_TEST_ASSETS)"
)

RECIPE = """model: {{name: {assets}/{model}}}
data: {{name: {data}, {more}}}
adapter: {{type: {kind}}}
train: {{learning_rate: {rate}, max_steps: {steps}, effective_batch_size: {batch}, logging_steps: 1}}
eval: {{max_new_tokens: 8, samples: 1, forgetting: false}}
"""


def run_recipe(tmp_path: Path, **values: object) -> RunFolder:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(assets=ASSETS, **values))
    assert main.main(["train", str(path), f"train.output_dir={tmp_path / 'run'}", "--quiet"]) == 0
    return RunFolder(tmp_path / "run")


@pytest.mark.soak
def test_a_real_tinystories_llama_learns_to_tell_spam(tmp_path) -> None:
    more = f"validation: {ASSETS}/ci-sms/test.jsonl, max_length: 512"
    data = f"{ASSETS}/ci-sms/train.jsonl"
    settings = {"model": "stories260K-eos-hf", "kind": "lora", "rate": "1e-2", "steps": 80, "batch": 16}
    scores = run_recipe(tmp_path, data=data, more=more, **settings).read("eval.json")
    assert scores["base"]["exact_match"] < 0.05
    assert scores["tuned"]["exact_match"] >= 0.85


@pytest.mark.soak
def test_real_instructions_on_a_sharded_bf16_model(tmp_path) -> None:
    """DoRA reads the base's weights too; LoRA on a base in bf16: test_adapter_option_corners.py."""
    rows = json.loads((ASSETS / "instruct-rasbt-1100" / "instruction-data.json").read_text())
    lines = []
    for row in rows[:120]:
        asked = f"{row['instruction']}\n{row['input']}".strip()
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        lines.append(json.dumps({"messages": turns}))
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(lines) + "\n")
    settings = {"model": "books-16m", "kind": "dora", "rate": "2e-3", "steps": 6, "batch": 8}
    run = run_recipe(tmp_path, data=data, more="validation_fraction: 0.05", **settings)
    assert metrics(run)[-1]["loss"] < metrics(run)[0]["loss"]
    scores = run.read("eval.json")
    assert scores["tuned"]["loss"] < scores["base"]["loss"]


def test_real_questions_as_prompt_and_completion(tmp_path) -> None:
    with (ASSETS / "gsm8k" / "train.jsonl").open() as file:
        rows = [json.loads(line) for line, _ in zip(file, range(60), strict=False)]
    data = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"{row['question']}\n", "completion": row["answer"]} for row in rows]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = {"model": "books-16m", "kind": "ia3", "rate": "5e-2", "steps": 2, "batch": 4}
    run = run_recipe(tmp_path, data=data, more="validation_fraction: 0.1", **settings)
    report = run.read("data_report.json")["train"]
    assert list(report["formats"].values()) == ["prompt_completion"] and report["kept"] == 54
    assert "no_end_of_turn" not in report["counts"]
