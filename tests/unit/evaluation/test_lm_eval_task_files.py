"""Task files in lm-eval's form: `check` knows their metrics and renders their examples."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from finetune.core.errors import UserError
from finetune.evaluation import lm_eval_harness, lm_eval_tasks, tasks
from finetune.recipe.schema import Eval

if TYPE_CHECKING:
    from pathlib import Path

CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices",
    "doc_to_target": "answer",
}  # fmt: skip
GENERATED = {
    "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{gold}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 4},
}  # fmt: skip
TAKEN = {"filter": [{"function": "take_first"}]}
OWN_METRICS = {"metric_list": [{"metric": "acc"}]}
FILTERS = {"filter_list": [{"name": "none", **TAKEN}, {"name": "first", **TAKEN}]}


def write_task(folder: Path, content: dict[str, Any]) -> Path:
    rows = [{"question": f"{n}?", "choices": ["a", "b"], "answer": 0, "gold": "x"} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = {"data_files": {"test": "rows.jsonl"}}
    given = {"task": "mine", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **content}
    (folder / "mine.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items())
    )
    return folder / "mine.yaml"


@pytest.mark.parametrize(
    "content", [CHOICE, {**CHOICE, **OWN_METRICS}, GENERATED, {**GENERATED, **FILTERS}], ids=range(4)
)
def test_check_of_a_task_file_knows_the_metrics_that_lm_eval_computes(
    content: dict[str, Any], tmp_path: Path
) -> None:
    path = write_task(tmp_path, content)
    settings = Eval(tasks=[str(path)])
    found = tasks.check(settings)
    assert {name: sorted(its) for name, its in found.items()} == {
        name: sorted(its) for name, its in lm_eval_harness.check(settings).items()
    }
    tasks.check_metric(
        settings.model_copy(update={"metric_for_best_model": f"mine/{found['mine'][0]}"}), found
    )
    with pytest.raises(UserError, match="has no metric `none`"):
        tasks.check_metric(settings.model_copy(update={"metric_for_best_model": "mine/none"}), found)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"doc_to_text": "{{missing}}"}, "'missing' is undefined"),
        ({"doc_to_target": "{{missing}}"}, "'missing' is undefined"),
        ({"doc_to_choice": "not a list"}, "gives no list of choices"),
    ],
    ids=str,
)
def test_check_of_a_task_file_refuses_examples_that_do_not_render(
    odd: dict[str, str], said: str, tmp_path: Path
) -> None:
    path = write_task(tmp_path, {**CHOICE, **odd})
    with pytest.raises(UserError, match=said):
        tasks.check(Eval(tasks=[str(path)]))


def test_metrics_of_each_output_type_are_those_of_lm_eval() -> None:
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY

    assert {kind: list(its) for kind, its in lm_eval_tasks.METRICS.items()} == DEFAULT_METRIC_REGISTRY
