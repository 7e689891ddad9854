"""Datasets of the Hub: their files come from their repository, and only readers of plain data open them."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import yaml
from pyarrow import ipc, parquet

from finetune.core import foreign_yaml
from finetune.core.errors import Exit, UserError
from finetune.data import hub_datasets, source_loading
from finetune.data.examples import Row
from finetune.evaluation import task_data, task_guard
from finetune.hub import client
from finetune.recipe.schema import Source
from support import mutated_imports
from support.hub_server import Hub

ROW = json.dumps({"text": "a"}).encode() + b"\n"


def card(**config: Any) -> bytes:
    import yaml

    return f"---\n{yaml.safe_dump({'configs': [{'config_name': 'default', **config}]})}---\n".encode()


def read(name: str, **asked: Any) -> list[Any]:
    rows = list(
        source_loading.read(Source(name=name, split=asked.pop("split", "train"), **asked), "data.name")
    )
    return [row.value if isinstance(row, Row) else row for row in rows]


def test_dataset_of_the_hub_is_read(datasets_hub: Hub) -> None:
    datasets_hub.add("me/plain", **{"data/train.jsonl": ROW, "data/test.jsonl": ROW * 2})
    assert read("me/plain") == [{"text": "a"}]
    assert len(read("me/plain", split="test")) == 2
    datasets_hub.add("me/configs", **{"README.md": card(data_files="rows.csv"), "rows.csv": b"text\na\n"})
    assert read("me/configs") == [{"text": "a"}]


def test_texts_of_a_csv_that_pandas_takes_for_missing_values_are_texts(
    datasets_hub: Hub, monkeypatch
) -> None:
    texts = ["NA", "null", "None", "nan", "", "a"]
    rows = "".join(f"{text},b\n" for text in texts)
    datasets_hub.add("me/texts", **{"data.csv": f"input,output\n{rows}".encode()})
    assert [row["input"] for row in read("me/texts")] == texts
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert [row["input"] for row in read("me/texts")] == texts, "from the cache, without a network"


@pytest.mark.parametrize(
    ("where", "answer"),
    [
        ("/tree/", b'{"id": "a"}'),
        ("/tree/", b"[1]"),
        ("/resolve/", "cut"),
        ("HEAD", 308),
        ("/resolve/", b"<html>"),
    ],
)
def test_odd_answers_and_lost_connections_are_errors_of_the_hub(where, answer, datasets_hub: Hub) -> None:
    datasets_hub.add("me/plain", **{"README.md": card(data_files="rows.jsonl"), "rows.jsonl": ROW})
    headers = {"Location": "/x"} if answer == 308 else {}
    datasets_hub.fail(where, answer, times=99, **headers)
    for load in (lambda: read("me/plain"), task_data.source({"dataset_path": "me/plain"}, Path("task.yaml"))):
        with pytest.raises(UserError, match="can't load the dataset from the Hub") as raised:
            load()
        assert raised.value.code == Exit.ENVIRONMENT


def tar_that_leads_outside(form: str) -> bytes:
    """A tar file whose links lead a member to the home folder, though each name looks inside."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, link in (("s", "."), ("escape", "s/s/s/s/s/../../../../..")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, link
            archive.addfile(member)
        for name in ("escape/../OWNED", "train.jsonl"):
            member = tarfile.TarInfo(name)
            member.size = len(ROW)
            archive.addfile(member, io.BytesIO(ROW))
    made, at = bytearray(content.getvalue()), 0
    while form == "v7" and made[at]:  # the form without `ustar`
        made[at + 257 : at + 265] = b"\0" * 8
        made[at + 148 : at + 156] = b" " * 8
        made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
        at += 512 + (int(made[at + 124 : at + 135], 8) + 511) // 512 * 512
    pack: Any = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
    return pack.get(form, bytes)(bytes(made))


def zip_after_a_row() -> bytes:
    content = io.BytesIO()
    content.write(ROW)
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", ROW)
    return content.getvalue()


HIDDEN = {form: tar_that_leads_outside(form) for form in ("gzip", "bzip2", "xz", "v7")}
HIDDEN["zip"] = zip_after_a_row()


@pytest.mark.parametrize("form", HIDDEN)
@pytest.mark.parametrize("of_task", [False, True])
def test_archive_that_only_its_content_shows_is_not_unpacked(
    form: str, of_task: bool, datasets_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` unpacks tar and zip files of any name, and looks into compressed files."""
    (home := tmp_path / "home").mkdir()
    cache = home / ".cache" / "huggingface" / "datasets"
    for name in ("EXTRACTED_DATASETS_PATH", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, cache / "downloads" / "extracted")
    datasets_hub.add("me/hidden", **{"data/train.jsonl": HIDDEN[form]})
    with pytest.raises((UserError, datasets.exceptions.DatasetGenerationError)), task_guard.guarded():
        if of_task:
            datasets.load_dataset("me/hidden")
        else:
            hub_datasets.load(Source(name="me/hidden", split="train"))
    assert not [path for path in tmp_path.rglob("*") if path.name in ("OWNED", "escape", "a.jsonl")]
    assert not [path for path in cache.rglob("*") if path.is_symlink()]


VERSION = {"version_str": "1.0.0", "/../../../../../../../../OWNED/": 1}


@pytest.mark.parametrize("version", [VERSION, "../../../../OWNED", "a/../../../../../OWNED"])
@pytest.mark.parametrize("of_task", [False, True])
def test_version_of_a_card_chooses_no_folder(
    version: Any, of_task: bool, datasets_hub: Hub, tmp_path: Path
) -> None:
    """`datasets` makes the version a part of the path of its cache."""
    datasets_hub.add(
        "me/version", **{"a.jsonl": ROW, "README.md": card(data_files="a.jsonl", version=version)}
    )
    with pytest.raises((UserError, ValueError)), task_guard.guarded():
        datasets.load_dataset("me/version") if of_task else read("me/version")
    assert not list(tmp_path.rglob("OWNED"))


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_dataset_of_a_task_has_no_column_that_is_fetched(kind: str, datasets_hub: Hub) -> None:
    """The decoder of such a column asks any address."""
    features = [{"name": "text", "dtype": "string"}, {"name": "seen", "dtype": kind}]
    info = yaml.safe_dump({"dataset_info": {"features": features}})
    row = {"text": "a", "seen": {"bytes": None, "path": "http://127.0.0.1:9/x.png"}}
    files = {"train.jsonl": f"{json.dumps(row)}\n".encode(), "README.md": f"---\n{info}---\n".encode()}
    datasets_hub.add("me/seen", **files)
    with pytest.raises(UserError, match="can't evaluate on the column seen"), task_guard.guarded():
        datasets.load_dataset("me/seen")


def test_dataset_of_a_task_is_read_at_one_commit(datasets_hub: Hub) -> None:
    """Its owner may push between the check of the card and the download."""
    datasets_hub.add("me/rows", **{"train.jsonl": ROW})
    commit = client.dataset_commit("me/rows", "main")
    assert client.COMMIT.fullmatch(commit)
    with task_guard.guarded():
        datasets.load_dataset("me/rows")
    files = [path for path in datasets_hub.requests if "/resolve/" in str(path)]
    assert files and all(commit in str(path) for path in files), files


@pytest.mark.parametrize("name", ["train.csv.zip", "train.csv.tar", "train.csv.tar.gz", "train.jsonl.ZIP"])
def test_file_with_the_name_of_an_archive_is_refused(name: str, datasets_hub: Hub) -> None:
    """pandas unpacks a file by its name, also if other bytes stand before the archive."""
    datasets_hub.add("me/named", **{f"data/{name}": b"text\n" + HIDDEN["zip"]})
    with pytest.raises(UserError, match=r"this kind of archive|load the dataset"):
        read("me/named")


@pytest.mark.parametrize("form", ["gzip", "bzip2", "xz"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train.csv"])
def test_compressed_file_of_any_name_is_read(form: str, name: str, datasets_hub: Hub) -> None:
    pack: Any = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}[form]
    datasets_hub.add("me/packed", **{f"data/{name}": pack(b"text\na\n" if name.endswith("csv") else ROW)})
    rows = hub_datasets.load(Source(name="me/packed", split="train"))
    with task_guard.guarded():
        assert [row["text"] for row in rows] == ["a"] == datasets.load_dataset("me/packed")["train"]["text"]


def tar_of_pickles() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("a.pth")
        member.size = len(pickle.dumps(Path))
        archive.addfile(member, io.BytesIO(pickle.dumps(Path)))
    return content.getvalue()


OUTSIDE = "names files outside of its repository"
READER = "does not allow the reader of the dataset"
CARD = "can't read the dataset card"
BOMB = "".join(f"  {name}\n" for name in mutated_imports.BOMB.splitlines())
ATTACKS: dict[str, tuple[dict[str, bytes], str]] = {
    "a card with an address": ({"README.md": card(data_files="http://127.0.0.1:9/x.jsonl")}, OUTSIDE),
    "a card with an address of a split": (
        {
            "README.md": card(
                data_files=[{"split": "train", "path": ["a.jsonl", "https://127.0.0.1:9/x.jsonl"]}]
            )
        },
        OUTSIDE,
    ),
    "a card with a scheme": ({"README.md": card(data_files="file:/usr/**")}, OUTSIDE),
    "a card with another scheme": ({"README.md": card(data_dir="memory:x")}, OUTSIDE),
    "a card with a chain": ({"README.md": card(data_files="zip://a::http://127.0.0.1:9/x.zip")}, OUTSIDE),
    "a card with another repository": (
        {"README.md": card(data_files="hf://datasets/me/other/a.jsonl")},
        OUTSIDE,
    ),
    "a card with a local file": ({"README.md": card(data_files="/etc/passwd")}, OUTSIDE),
    "a card with a parent": ({"README.md": card(data_files="../other/a.jsonl")}, OUTSIDE),
    "a folder elsewhere": ({"README.md": card(data_dir="http://127.0.0.1:9/")}, OUTSIDE),
    "another card": (
        {".huggingface.yaml": card(data_files="http://127.0.0.1:9/x.jsonl").strip(b"-\n")},
        OUTSIDE,
    ),
    "a card that libyaml reads otherwise": (
        {
            "README.md": "---\nconfigs:\n- config_name: default\n  data_files: http://127.0.0.1:9/x.jsonl\n"
            "\ufeff data_files: a.jsonl\n---\n".encode()
        },
        OUTSIDE,
    ),
    "a card with the line break of old systems": (
        {
            "README.md": b"---\n# a comment\r---\rconfigs:\n- config_name: default\n"
            b"  data_files: http://127.0.0.1:9/x.jsonl\n---\n"
        },
        OUTSIDE,
    ),
    "a card that is no YAML": ({"README.md": b"---\nconfigs: [\n---\n"}, CARD),
    "a card that expands": ({"README.md": f"---\nconfigs:\n{BOMB}---\n".encode()}, CARD),
    "a card in levels": ({"README.md": b"---\nconfigs: " + b"[" * 9000 + b"]" * 9000 + b"\n---\n"}, CARD),
    "another card that expands": ({".huggingface.yaml": f"configs:\n{BOMB}".encode()}, CARD),
    "pickles in an archive": ({"train.tar": tar_of_pickles()}, READER),
    "numbers of HDF5": ({"train.h5": b"\x89HDF"}, READER),
    "images": ({"train/a.png": b"\x89PNG"}, READER),
    "pages": ({"train.xml": b"<a/>"}, READER),
}


PARTS = (
    "---", "---", "\n", "\n", "\n", "\r", "\r\n", " ", "\ufeff", "\x85", "\u2028", "\x0c", "# c", "\t", "- a",
    "----", "configs:\n- config_name: a\n", "configs:\r- config_name: b\r", "x: y", "...", "'", "&a 1", "|\n",
    "%YAML 1.1",
)  # fmt: skip


def test_card_is_read_as_datasets_reads_it(tmp_path: Path) -> None:
    from huggingface_hub import DatasetCard

    drawn, path, compared = random.Random(0), tmp_path / "README.md", 0
    for _ in range(4000):
        path.write_bytes("".join(["---\n", *drawn.choices(PARTS, k=9), "\n---\n"]).encode())
        try:
            theirs = DatasetCard.load(path).data.to_dict().get("configs")
        except Exception:  # `datasets` refuses the card
            continue
        try:
            content = foreign_yaml.read(hub_datasets._yaml_of_readme(path), "", in_python=True)
        except UserError:
            continue
        ours = content.get("configs") if isinstance(content, dict) else None
        assert ours == theirs, path.read_bytes()
        compared += theirs is not None
    assert compared > 50


@pytest.mark.parametrize("key", ["data.name", "eval.tasks"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_dataset_of_the_hub_names_no_address_and_no_reader_of_code(
    attack, key: str, datasets_hub: Hub, monkeypatch
) -> None:
    import torch

    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle is opened"))
    files, says = ATTACKS[attack]
    datasets_hub.add("me/other", **{"a.jsonl": ROW})
    datasets_hub.add(
        "me/evil", **({"a.jsonl": ROW} if b"configs" in b"".join(files.values()) else {}), **files
    )
    with pytest.raises(UserError, match=says) as raised, task_guard.guarded():
        datasets.load_dataset("me/evil") if key == "eval.tasks" else read("me/evil")
    assert raised.value.code == 2 and key in str(raised.value)
    assert not datasets_hub.asked("/me/other/"), "another repository is read"
    assert not datasets_hub.asked("tree") or says is READER, "files are listed before the card is looked at"


OPTIONS: dict[str, dict[str, Any]] = {
    "a pattern that never ends": {"sep": "(,|,)*x", "engine": "python"},
    "some of the rows": {"skiprows": 1, "names": ["text"], "nrows": 1},
    "rows that are wrong": {"on_bad_lines": "skip"},
    "one row at a time": {"chunksize": 1},
    "missing values": {"na_values": ["a"]},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_card_sets_no_option_that_skips_rows_or_never_ends(options: str, datasets_hub: Hub) -> None:
    lines = b"text,b\n" + (b"a" + b"," * 28 + b"z\n") * 3
    datasets_hub.add(
        "me/options", **{"README.md": card(data_files="a.csv", **OPTIONS[options]), "a.csv": lines}
    )
    with pytest.raises(UserError, match="does not allow these options") as raised:
        read("me/options")
    assert raised.value.code == 2


def test_card_may_describe_a_csv_file(datasets_hub: Hub) -> None:
    described = card(data_files="a.tsv", sep="\t", quotechar="'", names=["text", "b"])
    datasets_hub.add("me/tabs", **{"README.md": described, "a.tsv": b"'a\tb'\tc\nd\te\n"})
    assert read("me/tabs") == [{"text": "a\tb", "b": "c"}, {"text": "d", "b": "e"}]


def test_features_of_a_card_that_are_none_are_an_error(datasets_hub: Hub) -> None:
    files = {"README.md": card(data_files="a.jsonl", features={"_type": "Value"}), "a.jsonl": ROW}
    datasets_hub.add("me/features", **files)
    with pytest.raises(UserError, match="can't load the dataset"):
        read("me/features")


READERS, NO_IDS = ("webdataset", "json", "imagefolder", "sql"), ("buckets/me", "../other", "me/a/b")


@pytest.mark.parametrize("name", [*READERS, *NO_IDS])
def test_name_of_a_dataset_is_no_reader_and_no_path(name: str, monkeypatch, tmp_path) -> None:
    """For the name of a reader, `datasets` reads the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(ROW)
    (tmp_path / "a.tar").write_bytes(tar_of_pickles())
    said = "is a reader of `datasets`, not a dataset" if name in READERS else "not the id of a dataset"
    with pytest.raises(UserError, match=said):
        hub_datasets.load(Source(name=name, split="train"))


def test_readers_that_are_allowed_are_packaged_in_datasets() -> None:
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    assert set(hub_datasets.READERS) < {*_PACKAGED_DATASETS_MODULES, "cache"}
    assert hub_datasets.packaged_readers() >= set(_PACKAGED_DATASETS_MODULES)


def repeated_texts(suffix: str) -> bytes:
    """A small file of one long text that 500 rows share."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500, pyarrow.int32()), ["a" * 1_000_000])
    table, file = pyarrow.table({"text": texts}), io.BytesIO()
    if suffix == "parquet":
        parquet.write_table(table, file, compression="zstd", store_schema=False)
    else:
        with ipc.new_file(file, table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.xz", "jsonl.bz2", "csv.gz", "parquet", "arrow"])
def test_small_file_that_expands_is_refused_before_it_is_read(kind: str, datasets_hub: Hub) -> None:
    suffix, _, packing = kind.partition(".")
    if packing:
        pack = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[packing]
        content = pack(b'{"text": "' + b"a" * 300_000_000 + b'"}\n')
    else:
        content = repeated_texts(suffix)
    assert len(content) < 2_000_000
    datasets_hub.add("me/bomb", **{f"data/train.{kind}": content})
    with pytest.raises(UserError, match="the uncompressed file is too large"):
        read("me/bomb")


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.parquet", "train.jsonl.zst"])
@pytest.mark.parametrize("kind", ["zip", "zstd", "tar"])
def test_archive_of_the_hub_is_refused_under_any_name(name: str, kind: str, datasets_hub: Hub) -> None:
    """`datasets` unpacks a file by its first bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", ROW)
    content = {"zip": file.getvalue(), "zstd": b"\x28\xb5\x2f\xfd" + bytes(20), "tar": tar_of_pickles()}
    datasets_hub.add("me/packed", **{f"data/{name}": content[kind]})
    with pytest.raises(UserError, match="does not read this kind of archive"):
        read("me/packed")


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_file_within_the_limits_is_read(kind: str, datasets_hub: Hub) -> None:
    table, file = pyarrow.table({"text": ["a" * 1000] * 500}), io.BytesIO()
    parquet.write_table(table, file)
    content = gzip.compress(ROW * 500) if kind == "jsonl.gz" else file.getvalue()
    datasets_hub.add("me/rows", **{f"data/train.{kind}": content})
    assert len(read("me/rows")) == len(read("me/rows", max_uncompressed_bytes=10**9)) == 500


def test_files_of_a_task_with_a_reader_have_the_limits_too(datasets_hub: Hub) -> None:
    """Some tasks of lm-eval name files of the Hub with `hf://` in place of a dataset."""
    row = json.dumps({"text": "a" * 300 * 2**20}).encode()
    datasets_hub.add("me/long", **{"data/train.jsonl": gzip.compress(row, 1)})
    files = "hf://datasets/me/long/data/train.jsonl"
    with pytest.raises(UserError, match=r"expands|too large"), task_guard.guarded():
        datasets.load_dataset("json", data_files=files)


@pytest.mark.parametrize("kind", ["text", "list", "splits"])
def test_files_of_a_task_are_read_at_one_commit(kind: str, datasets_hub: Hub) -> None:
    """The branch moves between two reads of the same command."""
    repo = datasets_hub.add("me/moving", **{"data/train.jsonl": b'{"text": "before"}\n'})
    address = "hf://datasets/me/moving/data/train.jsonl"
    files: Any = {"text": address, "list": [address], "splits": {"train": [address]}}[kind]
    with task_guard.guarded():
        before = datasets.load_dataset("json", data_files=files, split="train")
        repo.commit("main", {"data/train.jsonl": b'{"text": "after"}\n'}, "other rows")
        again = datasets.load_dataset("json", data_files=files, split="train")
    assert before["text"] == again["text"] == ["before"]


@pytest.mark.parametrize(
    "file", ["http://127.0.0.1:9/a.jsonl", "hf://buckets/me/a.jsonl", "zip://a::b.zip", "file:/a"]
)
def test_task_with_a_reader_asks_no_other_address(file: str) -> None:
    with pytest.raises(UserError, match="outside of its repository"), task_guard.guarded():
        datasets.load_dataset("json", data_files={"train": [file]})


FIXED = """---
dataset_info:
  features:
  - {name: text, dtype: string}
  - {name: x, list: int64, length: 100000000}
---
"""


def test_types_in_a_card_add_no_columns(datasets_hub: Hub) -> None:
    datasets_hub.add("me/rows", **{"README.md": FIXED.encode(), "train.jsonl": ROW * 20})
    rows = read("me/rows")
    assert len(rows) == 20 and rows[0] == json.loads(ROW)
    datasets_hub.add("me/task", **{"README.md": FIXED.encode(), "train.jsonl": ROW * 20})
    with pytest.raises(UserError, match="can't evaluate on the column x"), task_guard.guarded():
        datasets.load_dataset("me/task")


@pytest.mark.parametrize("key", ["data.name", "eval.tasks"])
@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("train.csv", {"names": ["text", *(f"c{number}" for number in range(1000))]}),
        ("train.txt", {"encoding": "punycode"}),
        ("train.jsonl", {"encoding": "unicode_escape"}),
    ],
)
def test_option_of_a_card_that_takes_long_is_refused(
    file: str, options: dict[str, Any], key: str, datasets_hub: Hub
) -> None:
    datasets_hub.add(
        "me/rows", **{"README.md": card(data_files=file, **options), file: b"-" + b"b" * 100_000}
    )
    with pytest.raises(UserError, match="does not allow these options"), task_guard.guarded():
        read("me/rows") if key == "data.name" else datasets.load_dataset("me/rows")


@pytest.mark.parametrize("name", ["utf-8", "UTF8", "latin-1", "cp1252", "windows-1252", "utf-16", "gb18030"])
def test_usual_encoding_in_a_card_is_allowed(name: str, datasets_hub: Hub) -> None:
    content = '{"text": "hello"}\n'.encode(name)
    datasets_hub.add(
        "me/rows", **{"README.md": card(data_files="train.jsonl", encoding=name), "train.jsonl": content}
    )
    assert read("me/rows") == [{"text": "hello"}]
