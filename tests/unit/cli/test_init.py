"""`finetune init` writes a recipe that passes `finetune check`."""

import io
import json
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.recipe import loader, new_recipe
from support.paths import DATA, MODEL

ROWS = {
    "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "text": {"text": "a b c"},
    "prompt": {"prompt": "a", "completion": "b"},
}


class Terminal(io.StringIO):
    """Standard input of a person who types answers."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("adapter", new_recipe.MAIN_TYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_recipe_of_each_method_and_format_passes_check(adapter, rows, tmp_path, capsys) -> None:
    data, recipe = tmp_path / "my rows: 1.jsonl", tmp_path / "new" / "recipe.yaml"
    texts = json.dumps(ROWS[rows])
    data.write_text(
        "".join(texts.replace('"a"', f'"{n} a"').replace('"a b c"', f'"{n} b"') + "\n" for n in range(64))
    )
    given = ["--model", str(MODEL), "--data", str(data), "--adapter", adapter, "--output", str(recipe)]
    assert main.main(["init", *given]) == 0, capsys.readouterr().err
    written = loader.load(recipe)
    assert written.adapter.type == adapter and written.data.name == str(data)
    assert written.data.validation_fraction == 0.1
    assert f"train {str(recipe)!r}"[:5] in capsys.readouterr().out.splitlines()[-1]


def test_columns_of_a_csv_file_are_guessed_from_their_names(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"My parcel {number} is late,shipping" for number in range(64)]
    Path("tickets.csv").write_text("\n".join(["Email text,Team", *lines]))
    given = ["init", "--model", str(MODEL), "--data", "tickets.csv"]
    assert main.main(given) == 0, capsys.readouterr().err
    assert loader.load("recipe.yaml").data.columns == {"instruction": "Email text", "output": "Team"}
    assert "note: the names of the columns suggest data.columns: " in capsys.readouterr().out
    assert "#   finetune check recipe.yaml" in Path("recipe.yaml").read_text()
    Path("tickets.csv").write_text("\n".join(["Email text,Team,Date", *(f"{line},1" for line in lines)]))
    assert main.main([*given, "--output", "other.yaml"]) == 2
    assert "wrote other.yaml" in (said := capsys.readouterr()).out and "output: ..." in said.err


def test_note_on_few_optimizer_steps_says_what_to_change(tmp_path, capsys) -> None:
    data, recipe = tmp_path / "few.jsonl", tmp_path / "recipe.yaml"
    data.write_text("".join(json.dumps({"prompt": f"{n} a", "completion": "b"}) + "\n" for n in range(32)))
    words = ["--model", str(MODEL), "--data", str(data), "--validation", "0.25", "--output", str(recipe)]
    assert main.main(["init", *words]) == 0
    what = "an epoch has 3 optimizer steps, often too few to learn; try num_train_epochs: 17"
    assert f"note: train.num_train_epochs: {what}" in capsys.readouterr().out
    for override in ("train.num_train_epochs=7", "train.max_steps=3"):
        assert main.main(["check", str(recipe), override]) == 0
        assert "optimizer steps" not in capsys.readouterr().out


def test_terminal_asks_only_for_missing_answers(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    answers = f"\n{DATA / 'train.jsonl'}\n{DATA / 'test.jsonl'}\n\nmine.yaml\n"  # a model is asked for again
    monkeypatch.setattr("sys.stdin", Terminal(answers.replace("\n", f"\n{MODEL}\n", 1)))
    assert main.main(["init"]) == 0, capsys.readouterr().err
    written = loader.load("mine.yaml")
    assert (written.model.name, written.data.validation) == (str(MODEL), str(DATA / "test.jsonl"))
    assert written.adapter.type == "lora"
    monkeypatch.setattr("sys.stdin", Terminal(""))
    other = ["--validation", "0.2", "--adapter", "ia3", "--output", "other.yaml"]
    assert main.main(["init", "--model", str(MODEL), "--data", str(DATA / "train.jsonl"), *other]) == 0
    assert loader.load("other.yaml").data.validation_fraction == 0.2


@pytest.mark.parametrize("typed", ["", f"{MODEL}\n", f"{MODEL}\n{DATA / 'train.jsonl'}\n\n\n"])
def test_end_of_the_input_at_a_question_interrupts(typed, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    assert main.main(["init"]) == 130
    assert capsys.readouterr().err == "interrupted before it was done\n" and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "--model and --data must be given"),
        (["--model", "a"], "--data must be given"),
        (["--model", str(MODEL), "--data", "a", "--adapter", "lroa"], "--adapter lora"),
        (["--model", str(MODEL), "--data", "a", "--output", "{folder}"], "exists"),
    ],
)
def test_missing_and_wrong_answers_are_errors(given, expected, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main.main(["init", *(word.format(folder=tmp_path) for word in given)]) == 2
    assert expected in capsys.readouterr().err and not Path("recipe.yaml").exists()
