"""A chat template that asks for the date is told one date in training, a resumed run and evaluations."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.data import preparation
from finetune.data.examples import BadRow
from finetune.recipe import loader
from finetune.recipe.schema import Data
from finetune.run_folder.run_folder import RunFolder
from support.chat_tokenizers import TURNS, encoder_of, example, tokenizer_with

CLOCK = """{{- '<|im_start|>system\\nToday is ' ~ strftime_now('%d %B %Y, %H:%M') ~ '.<|im_end|>\\n' }}
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

ABLATION = """
measure: {{steps: 2, warm_up: 1, repeats: 1, held_out_rows: 0}}
baseline: {{mixed_precision: "no", set: {{speed.loss: trl}}}}
optimizations: [{{name: alpha, kind: memory, what: it, set: {{adapter.lora_alpha: {}}}}}]
"""


def text_of(tokenizer: Any, **data: Any) -> str:
    (found,) = encoder_of(tokenizer, **data)([example(TURNS)])
    assert not isinstance(found, BadRow)
    return tokenizer.decode(found.ids)


def test_a_template_that_reads_the_clock_is_told_the_date_of_the_recipe() -> None:
    tokenizer = tokenizer_with(CLOCK)
    assert "Today is 02 January 2020, 00:00." in text_of(tokenizer, template_date="2020-01-02")
    assert f"{datetime.date.today():%d %B %Y}, 00:00." in text_of(tokenizer)
    encoder = encoder_of(tokenizer, template_date="2020-01-02")
    assert "02 January 2020" in encoder.prompt_texts([example(TURNS)])[0]
    assert any("2020-01-02" in note for note in encoder.notes)


def test_prepared_data_depends_on_the_date_only_where_the_template_asks_for_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n")
    data = Data(name=str(file), cache_dir=str(tmp_path / "cache"))
    for template, depends in ((CLOCK, True), (None, False)):
        tokenizer = tokenizer_with(template)
        first, second = (
            preparation.prepare(data.model_copy(update={"template_date": date}), tokenizer, 0, None)
            for date in ("2020-01-02", "2020-01-03")
        )
        assert (first.path != second.path) == depends
        hashes = {one.report["train"].token_ids for one in (first, second)}
        assert len(hashes) == 1 + depends and "" not in hashes


@pytest.mark.parametrize("date", ["2020-13-01", "yesterday", "2020-02-30"])
def test_a_template_date_that_is_none_is_an_error(date: str, recipe_file, capsys) -> None:
    text = "model: {name: '{model}'}\ndata: {name: '{data}'}\nadapter: {type: lora}\n"
    assert main.main(["check", str(recipe_file(text)), f"data.template_date={date}"]) == 2
    assert "data.template_date" in capsys.readouterr().err


def test_a_resumed_run_and_its_evaluation_keep_the_date_of_its_start(
    recipe_file, small, two_layers, tmp_path: Path
) -> None:
    (tmp_path / "clock.jinja").write_text(CLOCK)
    text = (
        "model: {name: '{model}'}\nadapter: {type: lora, r: 4}\neval: {forgetting: false, generate: false}\n"
    )
    text += f"data: {{name: '{{data}}', validation_fraction: 0.1, chat_template: '{tmp_path}/clock.jinja'}}\n"
    text += "train: {max_steps: 3, effective_batch_size: 2, save_steps: 1, learning_rate: 1e-2}\n"
    recipe, then = str(recipe_file(text)), "data.template_date=2020-01-02"
    folder = RunFolder(tmp_path / "run")
    train = [
        "train",
        recipe,
        "--quiet",
        f"train.output_dir={folder.path}",
        small[0],
        f"model.name={two_layers}",
    ]
    assert main.main([*train, then, "--until=1"]) == 75
    assert main.main([*train, "--resume=auto"]) == 0, "the recipe names no date: that of the start holds"
    assert loader.load(folder.recipe).data.template_date == "2020-01-02"
    loss = folder.read("eval.json")["tuned"]["loss"]
    assert main.main(["evaluate", str(folder.path), "--quiet"]) == 0
    assert folder.read("eval.json")["tuned"]["loss"] == loss
    assert main.main([*train, "--resume=auto"]) == 0, "it is finished"
    assert main.main([*train, "--resume=auto", "data.template_date=2020-01-03"]) == 4


@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_runs_of_an_experiment_have_the_date_of_its_first_day(
    command: str, recipe_file, small, two_layers, tmp_path: Path, monkeypatch
) -> None:
    """An experiment may run over midnight, or be resumed on another day."""
    (tmp_path / "clock.jinja").write_text(CLOCK)
    text = (
        "model: {name: '{model}'}\nadapter: {type: lora, r: 4}\neval: {forgetting: false, generate: false}\n"
    )
    text += f"data: {{name: '{{data}}', validation_fraction: 0.1, chat_template: '{tmp_path}/clock.jinja'}}\n"
    text += "train: {max_steps: 2, effective_batch_size: 2, learning_rate: 1e-4}\n"
    (tmp_path / "space.yaml").write_text("search: {pruner: none}\nspace:\n  adapter.r: {choices: [2, 4]}\n")
    words = [command, str(recipe_file(text)), small[0], f"model.name={two_layers}", "--quiet"]
    words += ["--output", str(tmp_path / "all")]
    more = {
        "sweep": ["--space", str(tmp_path / "space.yaml"), "--trials"],
        "compare": ["--adapters", "lora", "--seeds"],
    }
    for count, zone in (("1", "Etc/GMT+12"), ("2", "Etc/GMT-14")):  # two days at any time
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert main.main([*words, *more[command], count]) == 0
    monkeypatch.undo()
    time.tzset()
    runs = [RunFolder(path.parent) for path in (tmp_path / "all").glob("*/eval.json")]
    assert len(runs) == 2
    assert len({loader.load(run.recipe).data.template_date for run in runs}) == 1
    ids = {run.read("data_report.json")["validation"]["token_ids"] for run in runs}
    assert command == "compare" or len(ids) == 1, "seeds hold out other examples"


def test_runs_of_an_ablation_have_the_date_of_its_first_run(
    recipe_file, small, two_layers, tmp_path: Path
) -> None:
    (tmp_path / "clock.jinja").write_text(CLOCK)
    text = "model: {name: '{model}'}\nadapter: {type: lora, r: 4}\n"
    text += f"data: {{name: '{{data}}', chat_template: '{tmp_path}/clock.jinja'}}\n"
    text += "train: {effective_batch_size: 2, learning_rate: 1e-4}\n"
    words = ["ablate", str(recipe_file(text)), small[0], f"model.name={two_layers}", "--quiet"]
    words += ["--output", str(tmp_path / "all"), "--optimizations"]
    for alpha in (1, 2):
        (tmp_path / f"{alpha}.yaml").write_text(ABLATION.format(alpha))
    assert main.main([*words, str(tmp_path / "1.yaml")]) == 0
    first = tmp_path / "all" / "baseline" / "recipe-baseline-1" / "recipe.resolved.yaml"
    today = loader.load(first).data.template_date
    assert today
    first.write_text(first.read_text().replace(today, "2020-01-02"))  # as if it had run on this day
    assert main.main([*words, str(tmp_path / "2.yaml")]) == 0
    files = [path for path in (tmp_path / "all").rglob("recipe.resolved.yaml") if "aside" not in path.parts]
    assert {loader.load(path).data.template_date for path in files} == {"2020-01-02"}


def test_a_checkpoint_of_other_token_ids_is_refused(recipe_file, tmp_path: Path, capsys) -> None:
    """The files, the template and the recipe are the same; what was made of them is not."""
    text = "model: {name: '{model}'}\ndata: {name: '{data}'}\nadapter: {type: lora, r: 4}\n"
    text += "train: {max_steps: 2, effective_batch_size: 2, save_steps: 1, learning_rate: 1e-2}\n"
    folder = tmp_path / "run"
    train = ["train", str(recipe_file(text)), "--quiet", f"train.output_dir={folder}"]
    assert main.main([*train, "--until=1"]) == 75
    (path,) = folder.glob("checkpoints/contract*.json")
    contract = json.loads(path.read_text())
    assert contract["facts"]["data: token ids"]
    path.write_text(json.dumps({**contract, "facts": {**contract["facts"], "data: token ids": "others"}}))
    for other in folder.glob("checkpoints/step-*/contract*.json"):
        other.write_text(path.read_text())
    assert main.main([*train, "--resume=auto"]) == 4
