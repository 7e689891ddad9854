"""The files of a folder that are read: those of the split that `datasets` would read."""

import contextlib
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict
from datasets.data_files import SPLIT_KEYWORDS

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.data import dataset_folders, source_loading
from finetune.data.readers import PLAIN
from finetune.recipe.schema import Data, Source
from support.paths import MODEL


def text(name: str) -> dict[str, str]:
    return {"text": f"This is an example of {name}."}


def write(folder: Path, *names: str) -> Path:
    """Files of these names, each with one example that says its name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = Dataset.from_list([text(name)])
        if path.suffix == ".parquet":
            table.to_parquet(str(path))
        elif path.suffix == ".csv":
            table.to_csv(str(path), index=False)
        elif path.suffix == ".jsonl":
            path.write_text(json.dumps(text(name)) + "\n")
        else:
            path.write_text("{}")
    return folder


def card(folder: Path, configs: str) -> Path:
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configs}---\n# A dataset\n")
    return folder


def save(folder: Path, *names: str) -> Path:
    Dataset.from_list([text(name) for name in names]).save_to_disk(str(folder))
    return folder


def read(folder: Path, key: str = "data.name") -> list[str]:
    """The names that the examples of a folder say."""
    rows: Any = source_loading.read(Source(name=str(folder)), key)
    return sorted(row.value["text"].removeprefix("This is an example of ").rstrip(".") for row in rows)


def chosen(folder: Path) -> list[str]:
    return [path.name for path in dataset_folders.choose_files(folder, "data.name").read]


def read_by_datasets(folder: Path, split: str = "train") -> list[str]:
    rows: Any = datasets.load_dataset(str(folder), split=split, cache_dir=str(folder.parent / "hf"))
    return sorted(row["text"].removeprefix("This is an example of ").rstrip(".") for row in rows)


def test_split_words_are_those_of_datasets() -> None:
    assert {str(split): set(words) for split, words in SPLIT_KEYWORDS.items()} == {
        split: set(words) for split, words in dataset_folders.KEYWORDS.items()
    }


SHARDS = [f"data/{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")]
HASHED = "data/train-00000-of-00001-0123abcd.parquet"
TOP = ["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"]
LAYOUTS: dict[str, Any] = {  # files, those that are trained on
    "no split": (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
    "train and test": (["train.jsonl", "test.jsonl"], ["train.jsonl"]),
    "train and dev": (["train.jsonl", "dev.jsonl"], ["train.jsonl"]),
    "train and val": (["my-train.jsonl", "my-val.jsonl"], ["my-train.jsonl"]),
    "training and eval": (["training.csv", "evaluation.csv"], ["training.csv"]),
    "numbered": (["train1.jsonl", "train2.jsonl", "test1.jsonl"], ["train1.jsonl", "train2.jsonl"]),
    "in the middle": (["chat_train_v2.jsonl", "chat.test.v2.jsonl"], ["chat_train_v2.jsonl"]),
    "words that hold a keyword": (["contest.jsonl", "device.jsonl", "latest.jsonl"],) * 2,
    "train and other": (["train.jsonl", "extra.jsonl"], ["train.jsonl"]),
    "sub-folders": (["train/a.jsonl", "train/b.jsonl", "test/c.jsonl"], ["train/a.jsonl", "train/b.jsonl"]),
    "sub-folders of other names": (["math/a.jsonl", "code/b.jsonl"], ["code/b.jsonl", "math/a.jsonl"]),
    "a test file in the train folder": (["train/a.jsonl", "train/test.jsonl"],) * 2,
    "a cloned repository": ([*SHARDS, "README.md", "dataset_infos.json"], SHARDS[:1]),
    "shards": ([*SHARDS, HASHED], [HASHED, SHARDS[0]]),
    "deep": (["a/b/train/c.jsonl", "a/b/valid/c.jsonl"], ["a/b/train/c.jsonl"]),
    "hidden": (["train.jsonl", ".cache/train.jsonl", "__pycache__/train.jsonl"], ["train.jsonl"]),
    "shards at the top": (TOP, TOP[:1]),
    "names with spaces": (["my train data.jsonl", "my test data.jsonl"], ["my train data.jsonl"]),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_choose_files_any_layout_reads_what_datasets_reads(layout: str, tmp_path: Path) -> None:
    names, expected = LAYOUTS[layout]
    folder = write(tmp_path / "rows", *names)
    assert read(folder) == expected
    assert read_by_datasets(folder) == expected


OWN_LAYOUTS: dict[str, tuple[list[str], list[str]]] = {  # where datasets reads no train split, or a backup
    "no split beside test": (["a.jsonl", "b.jsonl", "test.jsonl"], ["a.jsonl", "b.jsonl"]),
    "capitals": (["Train.jsonl", "TEST.jsonl"], ["Train.jsonl"]),
    "a backup in a folder": (["train.jsonl", "old/train.jsonl"], ["train.jsonl"]),
    "a backup beside other names": (["a.jsonl", "old/train.jsonl"], ["a.jsonl"]),
    "train beside a test folder": (["train.jsonl", "test/a.jsonl"], ["train.jsonl"]),
    "dev beside a test folder": (["a.jsonl", "dev.jsonl", "test/a.jsonl"], ["a.jsonl"]),
}


@pytest.mark.parametrize("layout", OWN_LAYOUTS)
def test_choose_files_never_trains_on_another_split(layout: str, tmp_path: Path) -> None:
    names, expected = OWN_LAYOUTS[layout]
    assert read(write(tmp_path / "rows", *names)) == expected


VALIDATION: dict[str, tuple[list[str], list[str]]] = {
    "all three": (["train.jsonl", "validation.jsonl", "test.jsonl"], ["validation.jsonl"]),
    "dev folder": (["train/a.jsonl", "dev/a.jsonl"], ["dev/a.jsonl"]),
    "test alone": (["train.jsonl", "test.jsonl"], ["test.jsonl"]),
    "no split": (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
    "one split": (["train.jsonl"], ["train.jsonl"]),
}


@pytest.mark.parametrize("layout", VALIDATION)
def test_choose_files_for_validation_reads_the_validation_split(layout: str, tmp_path: Path) -> None:
    names, expected = VALIDATION[layout]
    assert read(write(tmp_path / "rows", *names), "data.validation") == expected


@pytest.mark.parametrize(
    "names", [["test.jsonl"], ["dev/a.jsonl", "test/b.jsonl"], ["data/math-00000-of-00001.parquet"]]
)
def test_choose_files_without_a_training_split_is_an_error_that_names_one(
    names: list[str], tmp_path: Path
) -> None:
    folder = write(tmp_path / "rows", *names)
    with pytest.raises(ValueError, match="Unknown split"):
        read_by_datasets(folder)
    with pytest.raises(UserError, match="has no training split") as error:
        read(folder)
    key, _, name = error.value.problems[0].fix.partition(": ")
    assert key == "data.name" and read(Path(name)) == [names[0]]


def test_choose_files_of_several_kinds_in_folders_below_is_an_error(tmp_path: Path) -> None:
    """As in a project's folder, whose configs are no examples."""
    folder = write(tmp_path / "rows", "corpus/a.jsonl", "corpus/b.jsonl", "model/tokenizer.json")
    with pytest.raises(UserError, match="files of several types") as error:
        read(folder)
    assert error.value.problems[0].found == "2 .jsonl, 1 .json"
    assert read(Path(error.value.problems[0].fix.removeprefix("data.name: "))) == [
        "corpus/a.jsonl",
        "corpus/b.jsonl",
    ]


def test_notes_on_folders_count_what_is_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "rows", "train.jsonl", "validation.jsonl", "extra.jsonl", *SHARDS[2:])
    (folder / "validation.jsonl").write_text((json.dumps(text("x")) + "\n") * 3)
    (note,) = source_loading.notes_on_folders(Data(name=str(folder)))
    assert "validation: 1 file with 3 examples (validation.jsonl)" in note
    assert "no split: 1 file with 1 example (extra.jsonl)" in note and "test: 1 file with 1 example" in note
    assert f"set data.validation: {folder / 'validation.jsonl'}" in note
    (note,) = source_loading.notes_on_folders(Data(name=str(folder), validation=str(folder)))
    assert "validation" not in note.partition("ignores")[2]
    both = Data(name=[str(folder / "train.jsonl"), str(folder / "extra.jsonl")])
    assert source_loading.notes_on_folders(both) == []
    assert source_loading.notes_on_folders(Data(name=str(write(tmp_path / "one", "train.jsonl")))) == []


# ---- save_to_disk


def test_saved_dataset_reads_the_files_of_its_state_alone(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", "a", "b")
    loaded = datasets.load_from_disk(str(folder))
    loaded.map(lambda row: {"text": row["text"].upper()})
    loaded.filter(lambda row: "a" in row["text"])
    Dataset.from_list([text("older")]).to_parquet(str(folder / "data-00000-of-00002.parquet"))
    assert len(list(folder.glob("cache-*.arrow"))) == 2
    assert read(folder) == read(folder, "data.validation") == ["a", "b"]
    (note,) = source_loading.notes_on_folders(Data(name=str(folder)))
    assert "not part of the saved dataset: 3 files" in note and "cache-" in note


def test_saved_dataset_after_filter_shuffle_and_select_reads_those_rows(tmp_path: Path) -> None:
    rows = Dataset.from_list([text(name) for name in "abcdef"])
    chosen: Any = rows.filter(lambda row: "b." not in row["text"]).shuffle(seed=1).select(range(3))
    chosen.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    loaded: Any = datasets.load_from_disk(str(tmp_path / "saved"))
    found: Any = source_loading.read(Source(name=str(tmp_path / "saved")), "data.name")
    assert [row.value["text"] for row in found] == [row["text"] for row in loaded]  # in their order


@pytest.mark.parametrize("names", [["train", "test"], ["train", "dev"], ["train", "validation", "test"]])
def test_saved_dataset_dict_reads_its_train_split(names: list[str], tmp_path: Path) -> None:
    saved = DatasetDict({name: Dataset.from_list([text(name)]) for name in names})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == ["train"]
    assert read(tmp_path / "saved", "data.validation") == [names[1]]
    (note,) = source_loading.notes_on_folders(Data(name=str(tmp_path / "saved")))
    assert "1 file with 1 example" in note
    assert read(tmp_path / "saved" / names[-1]) == [names[-1]]


def test_saved_dataset_dict_without_train_names_its_splits(tmp_path: Path) -> None:
    saved = DatasetDict({name: Dataset.from_list([text(name)]) for name in ("train_sft", "test_sft")})
    saved.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="has no training split") as error:
        read(tmp_path / "saved")
    problem = error.value.problems[0]
    assert "train_sft (1 file), test_sft (1 file)" in problem.found
    assert read(Path(problem.fix.removeprefix("data.name: "))) == ["train_sft"]


def test_saved_datasets_in_a_folder_are_read_without_their_caches(tmp_path: Path) -> None:
    save(tmp_path / "rows" / "math", "a")
    datasets.load_from_disk(str(save(tmp_path / "rows" / "code", "b"))).map(lambda row: {"text": "x"})
    assert read(tmp_path / "rows") == ["a", "b"]
    assert (
        "not part of the saved dataset: 1 file"
        in source_loading.notes_on_folders(Data(name=str(tmp_path / "rows")))[0]
    )
    assert read(tmp_path / "rows" / "*") == ["a", "b"]


def test_saved_dataset_dict_in_a_folder_reads_its_train_split(tmp_path: Path) -> None:
    saved = DatasetDict({name: Dataset.from_list([text(name)]) for name in ("train", "test")})
    saved.save_to_disk(str(tmp_path / "rows" / "saved"))
    assert read(tmp_path / "rows") == ["train"]


def test_cache_of_load_dataset_reads_the_train_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "rows", "train.jsonl", "test.jsonl")
    loaded: Any = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "hf"))
    loaded["train"].map(lambda row: {"text": "x"})
    cache = Path(loaded["train"].cache_files[0]["filename"]).parent
    assert len(list(cache.glob("*.arrow"))) == 3 and read(cache) == ["train.jsonl"]


@pytest.mark.parametrize("lost", ["data-00001-of-00002.arrow", "state.json"])
def test_saved_dataset_with_a_missing_file_is_an_error(lost: str, tmp_path: Path) -> None:
    saved = DatasetDict({"train": Dataset.from_list([text("a"), text("b")])})
    saved.save_to_disk(str(tmp_path / "saved"), num_shards={"train": 2})
    (tmp_path / "saved" / "train" / lost).unlink()
    with pytest.raises(UserError, match="missing"):
        read(tmp_path / "saved")


# ---- the card of a repository


CARDS = {
    "one config": (
        "- config_name: default\n  data_files:\n"
        "  - split: train\n    path: a/*\n  - split: test\n    path: b/*\n",
        ["a/x.jsonl", "b/x.jsonl"],
        ["a/x.jsonl"],
    ),
    "a default among several": (
        "- config_name: one\n  data_files: a/*\n"
        "- config_name: two\n  default: true\n  data_files: [b/*, c/*]\n",
        ["a/x.jsonl", "b/x.jsonl", "c/x.jsonl"],
        ["b/x.jsonl", "c/x.jsonl"],
    ),
    "a folder": (
        "- config_name: one\n  data_dir: sub\n", ["sub/train.jsonl", "sub/test.jsonl"], ["sub/train.jsonl"],
    ),
    "a pattern in a folder": (
        "- config_name: one\n  data_dir: sub\n  data_files: '*.csv'\n", ["sub/a.csv", "b.csv"], ["sub/a.csv"],
    ),
    "names that say another split": (
        "- config_name: one\n  data_files:\n  - split: train\n    path: test.jsonl\n",
        ["test.jsonl", "train.jsonl"],
        ["test.jsonl"],
    ),
    "folders at any depth": (
        "- config_name: one\n  data_files:\n  - split: train\n    path: ['a/**']\n",
        ["a/b/x.jsonl", "c.jsonl"],
        ["a/b/x.jsonl"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_card_with_configs_reads_what_datasets_reads(name: str, tmp_path: Path) -> None:
    configs, names, expected = CARDS[name]
    folder = card(write(tmp_path / "repo", *names), configs)
    assert read(folder) == expected == read_by_datasets(folder)


def test_card_with_several_configs_and_no_default_names_them(tmp_path: Path) -> None:
    configs = "- config_name: en\n  data_files: en/*\n- config_name: de\n  data_files: de/*\n"
    folder = card(write(tmp_path / "repo", "en/x.jsonl", "de/x.jsonl"), configs)
    with pytest.raises(UserError, match="several configs") as error:
        read(folder)
    assert error.value.problems[0].found == "en, de"
    assert read(Path(error.value.problems[0].fix.removeprefix("data.name: "))) == ["en/x.jsonl"]


@pytest.mark.parametrize("pattern", ["../*.jsonl", "/etc/*.txt"])
def test_card_that_leads_out_of_its_folder_is_not_followed(pattern: str, tmp_path: Path) -> None:
    write(tmp_path, "secret.jsonl")
    folder = card(write(tmp_path / "repo", "a.jsonl"), f"- config_name: one\n  data_files: {pattern}\n")
    with pytest.raises(UserError, match=r"can't use .*, which lists") as error:
        read(folder)
    assert pattern in error.value.problems[0].found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# no front matter",
        b"---\nlicense: mit\n---\n",
        b"---\n: [\n---\n",
        b"-----\nA title\n",
        b"---\ndataset_info:\n- config_name: default\n---\n",
        b"# caf\xe9\n",
        b"---\n# A title\n",
        b"data_files: a.jsonl\n",
    ],
)
def test_card_without_configs_leaves_it_to_the_names(content: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path / "repo", "train.jsonl", "test.jsonl")
    (folder / "README.md").write_bytes(content)
    assert read(folder) == ["train.jsonl"]


CONFIG = "- config_name: default\n  data_files: a.jsonl\n"
CARD = f"---\nlicense: mit\nconfigs:\n{CONFIG}---\n# A dataset\n"


def test_card_with_a_flipped_bit_names_the_same_files_or_is_refused(tmp_path: Path) -> None:
    """Without the card, all files of the folder would be read."""
    folder = write(tmp_path / "repo", "a.jsonl", "b.jsonl")
    refused = 0
    for place, bit in product(range(len(CARD)), range(8)):
        content = bytearray(CARD.encode())
        content[place] ^= 1 << bit
        (folder / "README.md").write_bytes(content)
        try:
            assert chosen(folder) == ["a.jsonl"], content
        except UserError:
            refused += 1
    assert refused > 400


@pytest.mark.parametrize(
    "content",
    [
        f"---\nconfigs:\n{CONFIG}",
        "---\nconfigs: 3\n---\n",
        "---\nconfigs:\n- 3\n---\n",
        CARD[:50],
        CARD.replace("a.jsonl", "[a.jsonl, c.jsonl]"),
        CARD.replace("a.jsonl", "c.jsonl"),
        CARD.replace("a.jsonl", "[{split: train, pats: a.jsonl}]"),
        CARD.replace("data_files", "data_dir"),
    ],
)
def test_card_with_missing_parts_or_files_is_refused(content: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "repo", "a.jsonl", "b.jsonl")
    (folder / "README.md").write_text(content)
    with pytest.raises(UserError, match=r"can't use .*, which lists"):
        read(folder)


@pytest.mark.parametrize(
    "content",
    [
        "\ufeff" + CARD,
        CARD.replace("---\n#", "--- \n#"),
        CARD.removesuffix("\n# A dataset\n"),
        "\n" + CARD,
        CARD.replace("\n", "\r\n"),
        CARD.replace("mit", "&x mit").replace("configs", "name: *x\nconfigs"),
    ],
)
def test_card_in_an_odd_form_is_read(content: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "repo", "a.jsonl", "b.jsonl")
    (folder / "README.md").write_bytes(content.encode())
    assert read(folder) == ["a.jsonl"]
    (folder / "README.md").unlink()
    (folder / ".huggingface.yaml").write_text(f"configs:\n{CONFIG}")
    assert read(folder) == ["a.jsonl"]


def test_manifest_with_a_flipped_bit_names_the_same_files_or_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    Dataset.from_list([{"text": "a"}]).save_to_disk(folder)
    shutil.copy(next(folder.glob("*.arrow")), folder / "data-00001-of-00002.arrow")  # of an earlier copy
    (whole,), content = chosen(folder), (folder / "state.json").read_bytes()
    for place, bit in product(range(len(content)), range(8)):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        (folder / "state.json").write_bytes(changed)
        with contextlib.suppress(UserError):
            assert chosen(folder) == [whole], changed
    (folder / "state.json").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"can't use state\.json"):
        read(folder)


def test_missing_shard_of_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "rows", "train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl", "test.jsonl")
    notes = source_loading.notes_on_folders(Data(name=str(tmp_path / "rows")))
    said = f"by the names of its files, {tmp_path}/rows lacks 1 file: train-00001-of-00003.jsonl"
    assert said in notes
    write(tmp_path / "rows", "train-00001-of-00003.jsonl")
    assert said not in source_loading.notes_on_folders(Data(name=str(tmp_path / "rows")))


def test_repository_of_files_that_finetune_cannot_unpack_says_to_unpack_them(tmp_path: Path) -> None:
    (tmp_path / "repo" / "data").mkdir(parents=True)
    (tmp_path / "repo" / "data" / "train.jsonl.zst").write_bytes(b"x")
    with pytest.raises(UserError, match=r"has no data file") as error:
        read(tmp_path / "repo")
    assert "train.jsonl.zst" in error.value.problems[0].found and "unpack" in error.value.problems[0].fix


@pytest.mark.parametrize("suffix", [*PLAIN, ".jsonl.gz"])
def test_lfs_pointer_of_any_kind_names_the_command(suffix: str, tmp_path: Path, recipe_file, capsys) -> None:
    path = tmp_path / f"train{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n")
    recipe = f"model: {{name: '{MODEL}'}}\ndata: {{name: '{path}'}}\nadapter: {{type: lora}}\n"
    assert main.main(["check", str(recipe_file(recipe))]) == 2
    said = capsys.readouterr().err
    assert "Git LFS pointer" in said and "git lfs pull" in said


def test_check_and_data_say_what_of_a_folder_is_not_read(tmp_path: Path, recipe_file, capsys) -> None:
    folder = write(tmp_path / "rows", "train.jsonl", "test.jsonl")
    (folder / "train.jsonl").write_text("".join(json.dumps(text(str(n))) + "\n" for n in range(8)))
    recipe = f"""
    model: {{name: '{MODEL}'}}
    data: {{name: '{folder}', train_on: all, cache_dir: '{tmp_path / "cache"}'}}
    adapter: {{type: lora}}
    train: {{effective_batch_size: 4}}
    """
    for command in ("check", "data", "data"):
        assert main.main([command, str(recipe_file(recipe))]) == 0
        said = capsys.readouterr().out
        assert (
            f"note: finetune ignores these data files of {folder}: test: 1 file with 1 example (test.jsonl)"
            in said
        )


def test_saved_dataset_dict_with_two_validation_splits_reads_one_and_counts_the_other(tmp_path: Path) -> None:
    """`val` and `dev` both mean `validation`; neither may get lost."""
    splits = {name: Dataset.from_list([text(name)]) for name in ("train", "val", "dev", "eval")}
    DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved", "data.validation") == ["dev"]
    (note,) = source_loading.notes_on_folders(Data(name=str(tmp_path / "saved")))
    assert all(f"{name}: 1 file" in note for name in ("validation", "val", "test"))
    assert set(dataset_folders.all_splits(tmp_path / "saved", "dataset_path")) == set(splits)


def test_card_with_two_validation_splits_reads_one_and_counts_the_other(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "b.jsonl", "c.jsonl")
    listed = "".join(
        f"  - split: {split}\n    path: {file}.jsonl\n"
        for split, file in (("train", "a"), ("valid", "b"), ("dev", "c"))
    )
    card(tmp_path, f"- config_name: default\n  data_files:\n{listed}")
    assert read(tmp_path, "data.validation") == ["b.jsonl"]
    (note,) = source_loading.notes_on_folders(Data(name=str(tmp_path)))
    assert "validation: 1 file" in note and "dev: 1 file" in note


def test_folder_with_links_into_itself_reads_each_file_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", "parts/a.jsonl", "parts/more/b.jsonl")
    (folder / "parts" / "loop").symlink_to(folder)
    (folder / "again").symlink_to(folder / "parts")
    (folder / "parts" / "more" / "up").symlink_to("..")
    names = ["parts/a.jsonl", "parts/more/b.jsonl"]
    assert read(folder) == names
    found = source_loading.files(f"{folder}/**/*.jsonl", "data.name")
    assert found is not None and [path.name for path in found] == ["a.jsonl", "b.jsonl"]
    card(folder, '- config_name: default\n  data_files: "**/*.jsonl"\n')
    assert read(folder) == names


def read_split(folder: Path, split: str) -> list[str]:
    data = Data(name=str(folder), split=split)
    source_loading.check_of_the_hub(data)
    (source,) = source_loading.sources(data)
    rows: Any = source_loading.read(source, "data.name")
    return sorted(row.value["text"].removeprefix("This is an example of ").rstrip(".") for row in rows)


def test_a_split_of_a_folder_is_read_by_its_name(tmp_path: Path) -> None:
    """Of file names, of a `DatasetDict`, of a card and of shards; as `datasets` reads them."""
    named = write(tmp_path / "named", "train.jsonl", "test.jsonl", "dev.jsonl")
    assert read_split(named, "test") == read_by_datasets(named, "test") == ["test.jsonl"]
    assert read_split(named, "validation") == read_by_datasets(named, "validation") == ["dev.jsonl"]
    assert read_split(named, "train") == ["train.jsonl"]
    rows = {name: Dataset.from_list([text(name)]) for name in ("train_sft", "test_sft")}
    DatasetDict(rows).save_to_disk(str(tmp_path / "saved"))
    assert read_split(tmp_path / "saved", "train_sft") == ["train_sft"]
    configs = "- config_name: default\n  data_files:\n  - {split: gold, path: a.jsonl}\n"
    configs += "  - {split: train, path: b.jsonl}\n"
    carded = card(write(tmp_path / "carded", "a.jsonl", "b.jsonl"), configs)
    assert read_split(carded, "gold") == read_by_datasets(carded, "gold") == ["a.jsonl"]
    shards = write(
        tmp_path / "shards", "data/train-00000-of-00001.parquet", "data/odd-00000-of-00001.parquet"
    )
    assert read_split(shards, "odd") == ["data/odd-00000-of-00001.parquet"]


def test_a_split_that_a_folder_lacks_is_an_error_with_its_splits(tmp_path: Path) -> None:
    folder = write(tmp_path / "named", "train.jsonl", "test.jsonl")
    with pytest.raises(UserError) as raised:
        read_split(folder, "tset")
    (problem,) = raised.value.problems
    assert problem.what == f"the folder {folder} has no split tset" and problem.found == "test, train"
    assert problem.fix == "data.split: test"
    with pytest.raises(UserError, match="has no split validation"):
        read_split(folder, "validation")


def test_two_splits_of_a_folder_are_two_sources(tmp_path: Path) -> None:
    folder = write(tmp_path / "named", "train.jsonl", "test.jsonl")
    both = Data(name=[Source(name=str(folder)), Source(name=str(folder), split="test")])
    source_loading.check_of_the_hub(both)
    assert [source_loading.title(s) for s in source_loading.sources(both)] == [str(folder), f"{folder} test"]
    files = [source_loading.files_of(s, "data.name") for s in source_loading.sources(both)]
    assert files == [[folder / "train.jsonl"], [folder / "test.jsonl"]]


@pytest.mark.parametrize("name", ("**/*.jsonl", "*/*.jsonl", "[ar]*/*.jsonl", "*", ""))
def test_files_of_runs_in_a_folder_of_data_are_not_read(name: str, tmp_path: Path) -> None:
    write(tmp_path, "a/rows.jsonl", "runA/metrics.jsonl", "runA/checkpoints/step-1/rows.jsonl")
    (tmp_path / "runA" / "recipe.resolved.yaml").touch()
    assert source_loading.files_of(Source(name=f"{tmp_path}/{name}"), "data.name") == [
        tmp_path / "a/rows.jsonl"
    ]


@pytest.mark.parametrize("name", ("runA/*.jsonl", "*/validation.jsonl", "runA"))
def test_a_run_that_is_named_is_read(name: str, tmp_path: Path) -> None:
    write(tmp_path, "runA/validation.jsonl")
    (tmp_path / "runA" / "recipe.resolved.yaml").touch()
    found = source_loading.files_of(Source(name=f"{tmp_path}/{name}"), "data.validation")
    assert found == [tmp_path / "runA/validation.jsonl"]
