"""The way of rows into the cache: found again by content, and by nothing else."""

import json
import os
import shutil
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.data import hub_datasets, prepared_cache, read_limits, source_loading, streaming
from finetune.data.chat_templates import read_template
from finetune.data.examples import Row
from finetune.data.preparation import prepare
from finetune.hub import client, dataset_repository
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe import loader
from finetune.recipe.schema import Data, Model, Source
from finetune.training import load_data
from support.paths import ASSETS, MODEL


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Model(name=str(MODEL)))


def write(path: Path, *answers: str, **more: object) -> str:
    rows = [
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": answer}], **more}
        for answer in answers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(prepared, tokenizer) -> list[str]:
    """What is trained on of each row."""
    return [tokenizer.decode([i for i in row["labels"] if i != -100]) for row in prepared.train]


def test_the_second_start_finds_it_and_a_change_does_not(tmp_path, tokenizer) -> None:
    name, cache = write(tmp_path / "a.jsonl", "Maria.", "Omar."), str(tmp_path / "cache")

    def cached(**more: object) -> bool:
        data = Data.model_validate({"name": name, "cache_dir": cache, **more})
        return prepare(data, tokenizer, 0, None).cached

    assert not cached() and cached()
    assert not cached(train_on="all") and not cached(packing=True) and not cached(max_length=99)
    write(tmp_path / "a.jsonl", "Maria.", "Paul.")
    assert not cached() and cached()
    moved = str(tmp_path / "b.jsonl")
    (tmp_path / "a.jsonl").rename(moved)
    assert not cached(name=moved), "its rows would be a.jsonl's"


@pytest.mark.parametrize("written", ["a", "b", "a with its earlier time"])
def test_data_that_changes_while_it_is_read_is_not_stored_under_its_old_hash(
    written: str, tmp_path, tokenizer, monkeypatch
) -> None:
    (folder := tmp_path / "data").mkdir()
    cache, start = tmp_path / "cache", prepared_cache.start
    write(folder / "a.jsonl", "Maria.", "Omar.")

    def saved_by_another_program(place: Path) -> Path:
        before = (folder / "a.jsonl").stat()
        write(folder / f"{written[0]}.jsonl", "Clara.", "Anna.")  # in as many characters as before
        if len(written) > 1:  # as `cp -p` and `rsync` do
            os.utime(folder / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
        return start(place)

    data = Data.model_validate({"name": str(folder), "cache_dir": str(cache)})
    monkeypatch.setattr(prepared_cache, "start", saved_by_another_program)
    with pytest.raises(UserError, match=r"the data changed while finetune read it[^$]*data-changed"):
        prepare(data, tokenizer, 0, None)
    monkeypatch.undo()
    assert not [*cache.rglob(prepared_cache.ROWS)]
    (folder / f"{written[0]}.jsonl").unlink()
    write(folder / "a.jsonl", "Maria.", "Omar.")
    made = prepare(data, tokenizer, 0, None)
    assert not made.cached and "Omar." in trained(made, tokenizer)[1]


def test_stream_ends_if_another_program_writes_to_its_file(tmp_path, tokenizer) -> None:
    name = write(tmp_path / "a.jsonl", *(f"Maria {number}." for number in range(8)))
    data = Data.model_validate({"name": name, "streaming": True, "shuffle_buffer": 2})
    rows = iter(streaming.stream(data, tokenizer, 0, None, passes=2).train)
    next(rows)
    write(tmp_path / "a.jsonl", *["Omar."] * 8)
    with pytest.raises(UserError, match="the data changed while finetune read it"):
        list(rows)


def test_file_that_comes_into_a_streamed_folder_is_an_error(tmp_path) -> None:
    path = Path(write(tmp_path / "a.jsonl", "Maria."))
    shards = [(str(path), 0, path.stat().st_size, read_limits.DEFAULT)]
    with pytest.raises(UserError, match="the data changed while finetune read it"):
        list(streaming._generate(shards, {}))


def test_prepared_data_of_a_tokenizer_with_other_settings_is_not_used(tokenizer, tmp_path) -> None:
    """The setting changes token ids, but tokenizer.json does not hold it."""
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "split_special_tokens": True}))
    other = load_tokenizer(Model(name=str(tmp_path / "model")))
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hello", "completion": "world"}\n')
    data = Data.model_validate({"name": str(tmp_path / "a.jsonl"), "cache_dir": str(tmp_path / "cache")})
    assert [prepare(data, one, 0, None).cached for one in (tokenizer, tokenizer, other, other)] == [
        False, True, False, True,
    ]  # fmt: skip


def test_what_is_found_prepared_names_the_files_of_this_run(tmp_path, tokenizer, monkeypatch) -> None:
    """The same recipe in another folder: what was prepared is found, and called by where it is now."""
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        write(Path("a.jsonl"), "Maria.", "Omar.")
        data = Data.model_validate({"name": "a.jsonl", "cache_dir": str(tmp_path / "cache")})
        made = prepare(data, tokenizer, 0, None)
        assert made.cached == (place == "two")
        assert [*made.report["train"].sources] == [str(tmp_path / place / "a.jsonl")]


def test_weights_that_change_places_are_another_mix(tmp_path, tokenizer) -> None:
    one, two = write(tmp_path / "a.jsonl", "Maria."), write(tmp_path / "b.jsonl", "Omar.")
    for often, once, answer in ((one, two, "Maria."), (two, one, "Omar.")):
        names = [{"name": often, "weight": 3.0}, {"name": once, "weight": 1.0}]
        data = Data.model_validate({"name": names, "cache_dir": str(tmp_path / "cache")})
        assert trained(prepare(data, tokenizer, 0, None), tokenizer).count(f"{answer}<|im_end|>") == 3


def test_equal_rows_stay_on_one_side_whatever_their_ids(tmp_path, tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    for number in range(100):
        write(tmp_path / "one.jsonl", f"Name {number // 2}.", id=number)
        with path.open("a") as file:
            file.write((tmp_path / "one.jsonl").read_text())
    data = Data(
        name=str(path), validation_fraction=0.1, cache_dir=str(tmp_path / "c"), expect={"duplicates": 1}
    )
    report = prepare(data, tokenizer, 0, None).report
    assert "in_validation" not in report["train"].counts and report["validation"].kept == 10
    assert report["train"].kept == 90 and any("id" in said for said in report["train"].remarks())


def test_a_row_that_is_split_is_one_row_to_its_duplicates(tmp_path, tokenizer) -> None:
    """By its pieces there were more duplicates than rows, which no `data.expect` could allow."""
    texts = [f"{name} went to the market. " * 40 for name in ("Ann", "Ann", "Bob", "Eve")]
    path, held_out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file, rows in ((path, texts), (held_out, texts[2:3])):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    split = {"too_long": "split", "max_length": 32, "train_on": "all", "cache_dir": str(tmp_path / "c")}
    allowed = {"duplicates": 0.25, "in_validation": 1}
    data = Data.model_validate({"name": str(path), "validation": str(held_out), "expect": allowed, **split})
    report = prepare(data, tokenizer, 0, None).report["train"]
    assert (report.kept, report.counts["duplicates"], report.counts["in_validation"]) == (4, 1, 1)
    assert report.places["duplicates"] == [f"{path}:2"] and report.places["in_validation"] == [f"{path}:3"]


def test_held_out_rows_of_sources_in_two_formats(tmp_path, tokenizer) -> None:
    chats = write(tmp_path / "a.jsonl", *(f"Name {n}." for n in range(20)))
    alpaca = tmp_path / "b.jsonl"
    rows = [{"instruction": f"{n}?", "output": f"{n}!"} for n in range(20)]
    alpaca.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(name=[chats, str(alpaca)], validation_fraction=0.5, cache_dir=str(tmp_path / "c"))
    report = prepare(data, tokenizer, 0, None).report
    assert set(report["validation"].formats.values()) == {"messages", "alpaca"}
    assert report["train"].kept == report["validation"].kept == 20


def test_a_column_of_mappings_gives_no_row_the_keys_of_others(tmp_path, tokenizer) -> None:
    """Parquet pads every mapping with the keys of all; the model must not learn to say null."""
    calls = [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "sum", "arguments": {"x": 1}}]
    rows = []
    for call in calls:
        turns = [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        rows.append({"messages": turns})
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = Data(name=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "c"), chat_template="qwen3")
    loaded = load_tokenizer(Model(name=str(MODEL)), read_template("qwen3"))
    said = trained(prepare(data, loaded, 0, None), loaded)
    assert "Paris" in said[0] and not any("null" in text or "None" in text for text in said)


def test_nothing_left_is_a_message_whatever_the_cause(tmp_path, tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": 1}\n')
    seldom = {"name": write(tmp_path / "b.jsonl", "x"), "weight": 0.001}
    for more in ({"expect": {"malformed": 1.0}}, {"name": [seldom]}):
        data = Data.model_validate({"name": str(path), "cache_dir": str(tmp_path / "c"), **more})
        with pytest.raises(UserError, match=r"none of the 1 examples has a token|uses none of its examples"):
            prepare(data, tokenizer, 0, None)


def test_all_and_a_message_s_own_no_exclude_each_other(tmp_path, tokenizer) -> None:
    write(tmp_path / "a.jsonl", "b")
    row = json.loads((tmp_path / "a.jsonl").read_text())
    row["messages"][1]["train"] = False
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    data = Data(name=str(tmp_path / "a.jsonl"), train_on="all", cache_dir=str(tmp_path / "c"))
    with pytest.raises(UserError, match="`train: false` of a message excludes `train_on: all`"):
        prepare(data, tokenizer, 0, None)


def test_a_template_that_leaves_contents_out_is_refused(tmp_path, recipe_file, capsys) -> None:
    name = write(tmp_path / "a.jsonl", "Maria.")
    text = "model: {name: '{model}'}\ndata: {name: NAME, chat_template: smolvlm}\nadapter: {type: lora}\n"
    text = text.replace("NAME", name)
    assert main.main(["train", str(recipe_file(text)), "--quiet"]) == 2
    assert "ignores the content of messages" in capsys.readouterr().err


def test_a_typo_in_a_folder_is_no_hub_id(tmp_path, recipe_file, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", "Maria.")
    text = "model: {name: '{model}'}\ndata: {name: data/train.jsnl}\nadapter: {type: lora}\n"
    assert main.main(["check", str(recipe_file(text))]) == 2
    assert "data/train.jsonl" in capsys.readouterr().err


def test_a_tokenizer_without_an_end_is_refused(tmp_path, recipe_file, capsys) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    text = "model: {name: FOLDER}\ndata: {name: '{data}'}\nadapter: {type: lora}\n".replace(
        "FOLDER", str(folder)
    )
    assert main.main(["data", str(recipe_file(text)), "--quiet"]) == 2
    assert "no eos token" in capsys.readouterr().err


@pytest.mark.skipif(not ASSETS.is_dir(), reason="no shared assets (FINETUNE_TEST_ASSETS)")
def test_a_completion_has_no_space_of_the_tokenizer_s_own(tmp_path) -> None:
    """A SentencePiece tokenizer opens every text with a space: prompt and completion are one text."""
    loaded = load_tokenizer(Model(name=str(ASSETS / "stories260K-eos-hf")))
    rows = [{"prompt": "Q: 2+2=", "completion": "4"}, {"prompt": "Hello", "completion": " world"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = prepare(Data(name=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "c")), loaded, 0, None)
    said = [loaded.decode(row["input_ids"], skip_special_tokens=True).strip() for row in found.train]
    assert said == ["Q: 2+2=4", "Hello world"]
    assert all(row["labels"][0] == -100 and row["labels"][-1] != -100 for row in found.train)


def test_parts_of_hub_data_sets_are_not_asked_of_files(tmp_path) -> None:
    from finetune.data import source_loading

    name = write(tmp_path / "a.jsonl", "Maria.")
    source_loading.check_of_the_hub(Data(name=name))
    source_loading.check_of_the_hub(Data(name=[name, "org/rows"], split="test", subset="en", revision="v1"))
    for key, value in (("split", "test"), ("subset", "en"), ("revision", "v1")):
        with pytest.raises(
            UserError, match=rf"data.{key}: this key is only for a dataset on the Hub(.|\n)*{value}"
        ):
            source_loading.check_of_the_hub(Data.model_validate({"name": name, key: value}))
        with pytest.raises(
            UserError, match=rf"data.name: this key is only for a dataset on the Hub(.|\n)*{key}: {value} of "
        ):
            source_loading.check_of_the_hub(
                Data(name=["org/rows", Source.model_validate({"name": name, key: value})])
            )


def test_check_refuses_revisions_and_splits_of_what_is_here(tmp_path, capsys) -> None:
    here = ["data.split=test", "model.revision=v1", f"model.name={MODEL}"]
    assert main.main(["check", "recipes/quickstart.yaml", *here]) == 2
    said = capsys.readouterr().err
    loaded = loader.load("recipes/quickstart.yaml", ["data.subset=en", "data.name=org/rows"])
    assert loaded.data.subset == "en", "overridden too"
    assert (
        "data.split: this key is only for a dataset on the Hub" in said
        and "model.revision: a model in a local folder has no revisions" in said
    )


def test_a_hub_data_set_that_does_not_load_says_which_choices_there_are(datasets_hub) -> None:
    configs = "".join(f"- config_name: {name}\n  data_files: a.jsonl\n" for name in ("en", "de"))
    card = f"---\nconfigs:\n{configs}---\n".encode()
    datasets_hub.add("me/en", **{"a.jsonl": b'{"text": "a"}\n', "README.md": card})
    datasets_hub.add("me/script", **{"script.py": b""})
    for name, asked, says in (
        ("en", {}, "en, de"),
        ("en", {"subset": "fr"}, "en, de"),
        ("en", {"subset": "en", "split": "tset"}, "has no split tset"),
        ("script", {}, "refs/convert/parquet"),
    ):
        source = Source(name=f"me/{name}", split=asked.pop("split", "train"), **asked)
        with pytest.raises(UserError) as raised:
            list(hub_datasets.rows(source))
        assert raised.value.code == 2 and says in str(raised.value)
    with pytest.raises(UserError, match="can't load the dataset") as raised:
        list(hub_datasets.rows(Source(name="me/none", split="train")))
    assert raised.value.code == 3


def test_dataset_without_an_answer_of_the_hub_has_the_commit_of_the_last_time(
    datasets_hub, monkeypatch, capsys
) -> None:
    data = Data(name="me/rows", split="train")
    datasets_hub.add("me/rows", **{"a.jsonl": b'{"text": "a"}\n'})
    (source,) = source_loading.sources(data)
    dataset_repository.say_once.cache_clear()
    before = source_loading.fingerprints(data), [row.value for row in hub_datasets.rows(source)]
    monkeypatch.delenv(client.COMMITS)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets_hub.fail("", "cut", times=99)
    assert before == (
        source_loading.fingerprints(data),
        [row.value for row in hub_datasets.rows(source)],
    )
    assert capsys.readouterr().err.count("reads me/rows at the last commit") == 1


def test_two_subsets_of_one_hub_set_are_two_sources(tmp_path, tokenizer, monkeypatch) -> None:
    """Each of a format of its own, and with its own share of the mix."""
    held = {"a": {"prompt": "Who?", "completion": "Maria."}, "b": {"instruction": "Who?", "output": "Omar."}}
    monkeypatch.setattr(
        hub_datasets, "rows", lambda one, _: iter([Row(held[one.subset], f"{one.name}/a.jsonl:1")])
    )
    monkeypatch.setattr(hub_datasets, "commit", lambda source: "c0ffee42" * 5)
    names = [{"name": "org/rows", "subset": subset, "split": "train"} for subset in held]
    data = Data.model_validate({"name": names, "cache_dir": str(tmp_path / "cache")})
    made = prepare(data, tokenizer, 0, None)
    report = made.report["train"]
    assert report.kept == 2 and len(report.formats) == len(report.mix) == 2, report
    assert [*report.mix] == ["org/rows a train", "org/rows b train"]


def test_a_cache_that_can_only_be_read_and_holds_the_data_serves_a_run(tmp_path, recipe_file) -> None:
    """Nobody can write the small file that names a recipe's data for `plan`."""
    name, cache = write(tmp_path / "a.jsonl", "Maria.", "Omar."), tmp_path / "cache"
    text = (
        f"model: {{name: '{MODEL}'}}\ndata: {{name: '{name}', cache_dir: '{cache}'}}\nadapter: {{type: lora}}"
    )
    recipe = loader.load(recipe_file(text))
    load_data.prepare_data(recipe)
    shutil.rmtree(cache / prepared_cache.POINTERS)
    (cache / prepared_cache.POINTERS).write_text("no folder can be made here")
    _, prepared = load_data.prepare_data(recipe)
    assert prepared.cached


def test_the_code_of_every_module_of_data_decides_on_what_is_prepared(tmp_path, monkeypatch) -> None:
    """A module that is new needs no entry in a list."""
    here = Path(shutil.copytree(Path(prepared_cache.__file__).parent, tmp_path / "data"))
    monkeypatch.setattr(prepared_cache, "__file__", str(here / "prepared_cache.py"))
    digests = [prepared_cache.code_digest.__wrapped__()]
    (here / "a_new_module.py").write_text("x = 1")
    digests.append(prepared_cache.code_digest.__wrapped__())
    assert digests[0] == prepared_cache.code_digest() and digests[0] != digests[1]


@pytest.mark.parametrize(
    "text", ["word " * 400, "\U00012000" * 300, "\U0001f600 hello there " * 90, "ab" * 900]
)
@pytest.mark.parametrize("format", ["chat", "completion", "completion, all"])
@pytest.mark.parametrize("name", ["tiny", "stories"])
def test_long_prompts_of_any_characters_are_cut_to_fit(name, format, text, tmp_path, tokenizer) -> None:
    """SentencePiece puts a mark without a character before a text; rare characters have several tokens."""
    if name == "stories":
        if not ASSETS.is_dir():
            pytest.skip("the assets are absent")
        tokenizer = load_tokenizer(Model(name=str(ASSETS / "stories260K-eos-hf")))
    user, answer = {"role": "user", "content": text}, {"role": "assistant", "content": "yes"}
    row = {"messages": [user, answer]} if format == "chat" else {"prompt": text, "completion": "yes"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    more = {"train_on": "all"} if format.endswith("all") else {}
    options = {"name": str(tmp_path / "a.jsonl"), "cache_dir": str(tmp_path / "cache"), "max_length": 128}
    data = Data.model_validate({**options, "too_long": "truncate_prompt", **more})
    prepared = prepare(data, tokenizer, 0, None)
    (ids,) = (one["input_ids"] for one in prepared.train)
    assert 100 < len(ids) <= 128 and "yes" in tokenizer.decode(ids)


@pytest.mark.parametrize("options", [{"train_on": "all"}, {"too_long": "truncate_prompt", "max_length": 40}])
def test_the_longest_prompt_is_the_one_that_is_asked(options, tmp_path, tokenizer) -> None:
    held_out = tmp_path / "held.jsonl"
    asked = {"role": "user", "content": "Who came, and who went? " * 12}
    held_out.write_text(json.dumps({"messages": [asked, {"role": "assistant", "content": "Omar."}]}) + "\n")
    name = write(tmp_path / "a.jsonl", "Maria.")
    data = Data.model_validate(
        {"name": name, "validation": str(held_out), "cache_dir": str(tmp_path / "c"), **options}
    )
    whole = tokenizer.apply_chat_template([asked], add_generation_prompt=True)["input_ids"]
    assert prepare(data, tokenizer, 0, None).report["validation"].longest_prompt == len(whole) > 40


def test_shortened_prompt_keeps_what_the_tokenizer_writes_before_a_text(tmp_path) -> None:
    tokenizer = load_tokenizer(Model(name=str(MODEL)))
    opening = [5, 6]
    tokens = {name: tokenizer.convert_ids_to_tokens(name) for name in opening}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*tokens.values(), "$A"],
        pair="$A $B",
        special_tokens=[(text, number) for number, text in tokens.items()],
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "word " * 200, "completion": "yes"}) + "\n")
    options = {"name": str(tmp_path / "a.jsonl"), "cache_dir": str(tmp_path / "cache"), "max_length": 64}
    prepared = prepare(Data.model_validate({**options, "too_long": "truncate_prompt"}), tokenizer, 0, None)
    (row,) = prepared.train
    assert len(row["input_ids"]) == 64 and row["input_ids"][:2] == opening
