"""What a plan says of rows that are not prepared: how many, how long, and what becomes of those too long."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from datasets import Dataset

from finetune.autoconfig.batch_size import count_steps
from finetune.planning import dataset_estimate, plan_report, suggestions
from finetune.recipe import loader
from finetune.recipe.schema import Data, Model
from finetune.training import load_data
from support.paths import MODEL, QUICKSTART
from support.plans import planned


def test_rows_are_counted_and_steps_follow(large) -> None:
    made = planned(large, "train.max_steps=null", "train.num_train_epochs=2")
    assert made.steps == 2 * 3 and made.row_tokens == pytest.approx(2500, rel=0.01)  # 9 rows, 4 a step
    packed = planned(large, "data.packing=true")
    assert packed.row_tokens == 4096 and packed.choices["attention"].value in ("varlen", "flex_attention")


@pytest.fixture
def tall(large: Path) -> Path:
    """The recipe on 40 rows of 4,000 characters, every other one twice as long."""
    lines = [json.dumps({"text": "w" * 4 * (1000 + 1000 * (n % 2))}) for n in range(40)]
    (large.parent / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return large


def test_no_change_drops_more_rows_than_a_run_lets_pass(large) -> None:
    """Rows of 2,500 tokens: half of max_length would drop each of them."""
    slow = ["model.quantization=none", "speed.activation_checkpointing=full"]
    now, loaded = planned(large, *slow), loader.load(large, slow)
    offered = [change.overrides for change in suggestions.changes(loaded, slow, now)]
    assert ("data.max_length=2048",) in [given for given, _ in suggestions.candidates(loaded, now)]
    assert offered and ("data.max_length=2048",) not in offered
    made = planned(large, *slow, "data.max_length=2048")
    assert made.refused and "100% of the examples are longer than data.max_length (2048)" in made.refused
    assert plan_report.headline(loaded, made).count("`finetune train` does not accept the data") == 1
    assert not now.refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"text": "a row"}\n' * 3, "the data has 3 sequences, and one step needs 4"),
        ('{"text": "a row"}', "the data has 1 sequence, and one step needs 4"),
        ("no json\n" * 9, "not valid JSON: Expecting value (in 9 examples)"),
        ("", "the data has no example"),
        ('{"text": "a row"}\n' * 3 + '{"text": "the last has no end"}', ""),
    ],
    ids=("three", "one", "bad lines", "empty", "four"),
)
def test_rows_that_are_too_few_for_a_step_are_refused(large, text: str, said: str) -> None:
    (large.parent / "rows.jsonl").write_text(text)
    made, loaded = planned(large), loader.load(large)
    assert made.refused.startswith(said) and bool(made.refused) is bool(said)
    assert ("`finetune train` does not accept the data" in plan_report.headline(loaded, made)) is bool(said)
    assert not [note for note in made.notes if "not in local jsonl files" in note]
    assert not said or made.refused in made.notes
    counted = dataset_estimate.rows_of(loaded.data, loaded.model, 1)
    assert counted and counted.number == text.count("text")


@pytest.mark.parametrize(
    ("too_long", "rows", "tokens", "refused"),
    [
        ("drop", 20, 1000, True),
        ("truncate_prompt", 40, 1250, False),
        ("split", 60, 1000, False),
        ("error", 20, 1000, True),
    ],
)
def test_rows_that_are_too_long_count_as_a_run_treats_them(
    tall: Path, too_long: str, rows: int, tokens: int, refused: bool
) -> None:
    data = Data(name=str(tall.parent / "rows.jsonl"), max_length=1500, too_long=too_long)
    found = dataset_estimate.rows_of(data, Model(name=str(tall.parent / "8b")), 1)
    assert found and found.long == 0.5
    assert (found.number, round(found.tokens)) == (rows, tokens)
    said, no = dataset_estimate.too_long(found, data)
    assert no is refused and said.startswith("50% of the examples are longer than data.max_length (1500)")


def test_chats_are_not_split(tmp_path) -> None:
    """`data.too_long: split` is for plain text; a run drops a chat that is too long."""
    chat = {"role": "user", "content": "why"}, {"role": "assistant", "content": "w" * 8000}
    lines = [
        json.dumps({"messages": chat}),
        json.dumps({"messages": [chat[0], chat[0] | {"role": "assistant"}]}),
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(lines * 10) + "\n")
    data = Data(name=str(tmp_path / "c.jsonl"), max_length=1500, too_long="split")
    found = dataset_estimate.rows_of(data, Model(name="nowhere/model"), 1)
    assert found and found.number == 10 and found.long == 0.5 and found.tokens < 10
    said, refuses = dataset_estimate.too_long(found, data)
    assert refuses and "finetune drops 50%, because it splits only plain text" in said


def test_rows_that_are_all_held_out_are_refused(large) -> None:
    """As a run says: of one row, the share that is held out is that row."""
    (large.parent / "rows.jsonl").write_text('{"text": "a row"}\n')
    given = ("data.validation_fraction=0.05", "train.effective_batch_size=1")
    made = planned(large, *given, "train.max_steps=2")
    assert made.refused == "no example would be left for training (data.validation_fraction: 0.05)"
    (large.parent / "rows.jsonl").write_text('{"text": "a row"}\n{"text": "another"}\n')
    assert not planned(large, *given).refused


def test_packed_rows_are_made_of_those_that_are_kept(tall) -> None:
    name = str(tall.parent / "rows.jsonl")
    data = Data(name=name, max_length=1500, packing=True, expect={"dropped": 0.6})
    found = dataset_estimate.rows_of(data, Model(name=str(tall.parent / "8b")), 1)
    assert found and found.number == round(20 * 1000 / 1500)
    assert dataset_estimate.too_long(found, data)[1] is False


def test_rows_are_as_long_as_the_tokenizer_and_template_make_them(tmp_path) -> None:
    """The quickstart's chats: 118 tokens, 59 by characters."""
    loaded = loader.load(QUICKSTART)
    found = dataset_estimate.rows_of(loaded.data, loaded.model, 1)
    report = load_data.prepare_data(loaded)[1].report["train"]
    assert found and found.number == report.kept
    assert found.tokens == pytest.approx(report.tokens / report.kept, rel=0.01)
    assert any(
        "by the model's tokenizer and template, from 500 examples" in note
        for note in planned(QUICKSTART, f"data.cache_dir={tmp_path}").notes
    )


def test_texts_are_tokenized_with_their_end(tmp_path) -> None:
    texts = ["a word or two", "another " * 40, "x" * 3 * dataset_estimate.TOKENIZED]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:2]))
    data, model = Data(name=str(tmp_path / "t.jsonl"), format="text", train_on="all"), Model(name=str(MODEL))
    path = tmp_path / "t.jsonl"
    exact, how = dataset_estimate.lengths_in_tokens(data, model, {path: dataset_estimate.SAMPLED})
    loaded = loader.load(
        QUICKSTART, [f"data.name={path}", "data.format=text", "data.train_on=all", "data.validation=null"]
    )
    rows = load_data.prepare_data(loaded)[1].train
    assert exact == [len(row["input_ids"]) for row in rows] and "from 2 examples" in how
    with path.open("a") as file:
        file.write(json.dumps({"text": texts[2]}) + "\n" + "no json\n")
    more, how = dataset_estimate.lengths_in_tokens(data, model, {path: dataset_estimate.SAMPLED})
    assert more[:2] == exact and more[3] == 0 and "from 2 examples" in how
    assert more[2] == pytest.approx(len(texts[2]) * sum(exact) / sum(map(len, texts[:2])))


def test_without_a_tokenizer_or_template_characters_are_counted(tmp_path) -> None:
    (tmp_path / "c.jsonl").write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "efgh"}]}
        )
        + "\n"
    )
    data, path = Data(name=str(tmp_path / "c.jsonl")), tmp_path / "c.jsonl"
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    for name, why in (
        ("nowhere/model", "the model's tokenizer is not on this machine"),
        (str(tmp_path / "bare"), "there is no chat template"),
    ):
        found, how = dataset_estimate.lengths_in_tokens(
            data, Model(name=name), {path: dataset_estimate.SAMPLED}
        )
        assert found == [sum(map(len, ("user", "abcd", "assistant", "efgh"))) / 4] and how.endswith(why)


# ---- every kind of file, and prepared data


def chats(number: int) -> list[dict]:
    """Chats of growing length."""
    return [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "word " * n}]}
        for n in range(1, number + 1)
    ]


def written(folder: Path, kind: str, rows: list[dict]) -> Path:
    """The same examples as a file or folder of each kind that finetune reads."""
    path, table = folder / f"rows.{kind}", Dataset.from_list(rows)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "parquet":
        table.to_parquet(str(path))
    elif kind == "saved":
        table.save_to_disk(str(path))
    elif kind == "folder":
        path.mkdir()
        table.to_parquet(str(path / "train-00000-of-00001.parquet"))
        table.to_parquet(str(path / "test-00000-of-00001.parquet"))
    else:
        with tarfile.open(path, "w") as archive:
            for number, row in enumerate(rows):
                content = json.dumps(row).encode()
                member = tarfile.TarInfo(f"{number:05d}.json")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved", "folder", "tar"])
def test_rows_of_any_kind_of_file_are_those_of_jsonl(kind: str, tmp_path: Path) -> None:
    data = {"name": str(written(tmp_path, kind, chats(40))), "max_length": 512}
    found = dataset_estimate.rows_of(Data.model_validate(data), Model(name=str(MODEL)), 4)
    plain = Data(name=str(written(tmp_path, "jsonl", chats(40))), max_length=512)
    assert found and found.number == 40
    assert found == dataset_estimate.rows_of(plain, Model(name=str(MODEL)), 4)


def test_rows_of_csv_count_quoted_lines_once(tmp_path: Path) -> None:
    rows = "".join(f'"What is {n}?","a\nb ""{n}"""\n' for n in range(30))
    (tmp_path / "rows.csv").write_text("prompt,completion\n" + rows)
    found = dataset_estimate.rows_of(Data(name=str(tmp_path / "rows.csv")), Model(name=str(MODEL)), 1)
    assert found and found.number == 30 and "from 30 examples" in found.how


@pytest.mark.parametrize(
    ("name", "content"), [("a.parquet", b"PAR1"), ("a.json", b"["), ("a.csv", b"a;b\n1;2\n")]
)
def test_rows_of_a_damaged_file_are_refused_by_the_plan(large, name: str, content: bytes) -> None:
    (large.parent / name).write_bytes(content)
    made = planned(large, f"data.name={large.parent / name}")
    assert made.refused and name in made.refused


PREPARED: list[dict] = [
    {},
    {"packing": True},
    {"padding_free": True},
    {"max_length": 64},
    {"validation_fraction": 0.2},
]


@pytest.mark.parametrize("options", PREPARED, ids=str)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_of_prepared_data_are_exact(kind: str, options: dict, tmp_path: Path, recipe_file) -> None:
    path = tmp_path / f"rows.{kind}"
    rows = [{"prompt": f"{n}?", "completion": "word " * n} for n in range(1, 81)]
    table = Dataset.from_list(rows)
    table.to_parquet(str(path)) if kind == "parquet" else table.to_csv(str(path), index=False)
    said = {"max_length": 128, "expect": {"dropped": 1.0}} | options
    more = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in said.items())
    text = f"model: {{name: '{MODEL}'}}\ndata:\n  name: '{path}'\n  cache_dir: '{tmp_path / 'cache'}'\n{more}"
    loaded = loader.load(recipe_file(f"{text}adapter: {{type: lora}}\ntrain: {{effective_batch_size: 4}}\n"))
    prepared = load_data.prepare_data(loaded)[1]
    found = dataset_estimate.rows_of(loaded.data, loaded.model, 4, loaded.train.seed)
    assert found and found.how == "prepared data" and found.number == len(prepared.train)
    tokens = [len(row["input_ids"]) for row in prepared.train]
    assert found.tokens == pytest.approx(sum(tokens) / len(tokens))
    assert found.long == pytest.approx(
        prepared.report["train"].counts.get("too_long", 0) / prepared.report["train"].rows
    )
    assert found.tokens <= found.padded <= max(tokens)
    made = planned(loaded.origin.path)
    assert made.steps == count_steps(loaded.train, len(prepared.train), made.batch, 1)
    path.touch()  # the file may be another one now
    assert dataset_estimate.rows_of(loaded.data, loaded.model, 4, loaded.train.seed) != found


@pytest.mark.parametrize("fraction", [0.2, 0.5])
@pytest.mark.parametrize("content", ["repeated", "conversations"])
def test_rows_less_the_validation_set_are_those_of_the_run(
    content: str, fraction: float, tmp_path: Path, recipe_file
) -> None:
    """Equal examples and those of one conversation stay together: a share of the rows is not what is left."""
    pairs = [(0, n % 3) if content == "repeated" else (n // 6, n) for n in range(24)]
    rows = [{"prompt": f"Question {one}?", "completion": f"Answer {two}."} for one, two in pairs]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {"validation_fraction": fraction, "expect": {"duplicates": 1.0}, "name": "rows.jsonl"}
    said["cache_dir"] = str(tmp_path / "cache")
    text = f"model: {{name: '{MODEL}'}}\ndata: {json.dumps(said)}\nadapter: {{type: lora}}\n"
    loaded = loader.load(recipe_file(f"{text}train: {{effective_batch_size: 4}}\n"))
    found = dataset_estimate.rows_of(loaded.data, loaded.model, 4, loaded.train.seed)
    assert found and found.number == len(load_data.prepare_data(loaded)[1].train)
