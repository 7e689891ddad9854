"""Datasets of the Hub: their files come from their repository, and only readers of plain data open them."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import pickle
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import yaml
from pyarrow import ipc, parquet

from finetune.core.errors import Exit, UserError
from finetune.data import hub_datasets, source_loading
from finetune.data.examples import BadRow, Row
from finetune.evaluation import task_data, task_datasets, task_guard
from finetune.hub import client, dataset_repository
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
    with task_guard.guarded(), contextlib.suppress(UserError, datasets.exceptions.DatasetGenerationError):
        rows = datasets.load_dataset("me/hidden")["train"] if of_task else read("me/hidden")
        assert not of_task and any(isinstance(row, BadRow) for row in rows)
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
    with task_guard.guarded():
        rows = datasets.load_dataset("me/version")["train"] if of_task else read("me/version")
    assert len(rows) == 1
    assert not list(tmp_path.rglob("OWNED"))


@pytest.mark.parametrize("kind", ["Image", "Audio"])
def test_dataset_of_a_task_has_no_column_that_is_fetched(kind: str, datasets_hub: Hub) -> None:
    """The decoder of such a column asks any address."""
    seen = [{"bytes": None, "path": "http://127.0.0.1:9/x.png"}]
    features = {"text": {"dtype": "string", "_type": "Value"}, "seen": {"_type": kind}}
    kept = {"huggingface": json.dumps({"info": {"features": features}})}
    pair = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({"text": ["a"], "seen": pyarrow.array(seen, pair)}).replace_schema_metadata(kept)
    parquet.write_table(table, file := io.BytesIO())
    datasets_hub.add("me/seen", **{"train.parquet": file.getvalue()})
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


NAMED = ["train.csv.zip", "train.jsonl.ZIP", "train.csv.zip.gz", "train.csv.gz.gz", "train.csv.x.gz"]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("of_task", [False, True])
def test_file_with_the_name_of_an_archive_is_refused(name: str, of_task: bool, datasets_hub: Hub) -> None:
    """pandas unpacks a file by its name, also if other bytes stand before the archive."""
    content = b"text\n" + HIDDEN["zip"]
    datasets_hub.add("me/named", **{f"data/{name}": gzip.compress(content) if "gz" in name else content})
    with pytest.raises(UserError, match=r"can't load the dataset|can't evaluate"), task_guard.guarded():
        datasets.load_dataset("me/named") if of_task else read("me/named")


@pytest.mark.parametrize("form", ["gz", "bz2", "xz"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.csv"])
def test_compressed_file_is_read(form: str, name: str, datasets_hub: Hub) -> None:
    pack: Any = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[form]
    content = b"text\na\n" if name.endswith("csv") else ROW
    datasets_hub.add("me/packed", **{f"data/{name}.{form}": pack(content)})
    with task_guard.guarded():
        assert [row["text"] for row in read("me/packed")] == ["a"]
        assert datasets.load_dataset("me/packed")["train"]["text"] == ["a"]


def tar_of_pickles() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("a.pth")
        member.size = len(pickle.dumps(Path))
        archive.addfile(member, io.BytesIO(pickle.dumps(Path)))
    return content.getvalue()


OUTSIDE = "(?s)lists the files of the dataset.*no data file for"
READER = "can't load the dataset|can't evaluate on these files"
CARD = "lists the files of the dataset"
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
    "a card that is no YAML": ({"README.md": b"---\nconfigs: [\n---\n"}, CARD),
    "a card that expands": ({"README.md": f"---\nconfigs:\n{BOMB}---\n".encode()}, CARD),
    "a card in levels": ({"README.md": b"---\nconfigs: " + b"[" * 9000 + b"]" * 9000 + b"\n---\n"}, CARD),
    "another card that expands": ({".huggingface.yaml": f"configs:\n{BOMB}".encode()}, CARD),
    "numbers of HDF5": ({"train.h5": b"\x89HDF"}, READER),
    "images": ({"train/a.png": b"\x89PNG"}, READER),
    "pages": ({"train.xml": b"<a/>"}, READER),
}


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
    assert not [
        line for line in datasets_hub.requests if line.endswith((".jsonl", ".tar", ".h5", ".png", ".xml"))
    ]


def test_pickles_in_an_archive_are_not_opened(datasets_hub: Hub, monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle is opened"))
    datasets_hub.add("me/evil", **{"train.tar": tar_of_pickles()})
    assert all(isinstance(row, BadRow) for row in read("me/evil"))
    with pytest.raises(UserError, match="can't evaluate on these files"), task_guard.guarded():
        datasets.load_dataset("me/evil")


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
    with pytest.raises(UserError, match="does not apply the options of a reader") as raised:
        read("me/options")
    assert raised.value.code == 2


READERS, NO_IDS = ("webdataset", "json", "imagefolder", "sql"), ("buckets/me", "../other", "me/a/b")


@pytest.mark.parametrize("name", [*READERS, *NO_IDS])
def test_name_of_a_dataset_is_no_reader_and_no_path(name: str, monkeypatch, tmp_path) -> None:
    """For the name of a reader, `datasets` reads the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(ROW)
    (tmp_path / "a.tar").write_bytes(tar_of_pickles())
    said = "is a reader of `datasets`, not a dataset" if name in READERS else "not the id of a dataset"
    with pytest.raises(UserError, match=said):
        list(hub_datasets.rows(Source(name=name, split="train")))


def test_names_of_readers_are_those_of_datasets() -> None:
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    assert set(task_datasets.LOADERS.values()) < {*_PACKAGED_DATASETS_MODULES}
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
    with pytest.raises(UserError, match=r"the uncompressed file is too large|too large to read"):
        read("me/bomb")
    with pytest.raises(UserError, match=r"the uncompressed file is too large"), task_guard.guarded():
        datasets.load_dataset("me/bomb")


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.parquet", "train.jsonl.zst"])
@pytest.mark.parametrize("kind", ["zip", "zstd", "tar"])
def test_archive_of_the_hub_is_refused_under_any_name(name: str, kind: str, datasets_hub: Hub) -> None:
    """`datasets` unpacks a file by its first bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", ROW)
    content = {"zip": file.getvalue(), "zstd": b"\x28\xb5\x2f\xfd" + bytes(20), "tar": tar_of_pickles()}
    datasets_hub.add("me/packed", **{f"data/{name}": content[kind]})
    says = r"does not read this kind of archive|can't evaluate on these files|can't load the dataset"
    with pytest.raises(UserError, match=says), task_guard.guarded():
        datasets.load_dataset("me/packed")
    if name != "train.jsonl.zst":
        with contextlib.suppress(UserError):
            assert not [row for row in read("me/packed") if isinstance(row, dict)]


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
    with pytest.raises(UserError, match="a file at an address"), task_guard.guarded():
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
    assert read("me/rows") == [json.loads(ROW)] * 20
    with task_guard.guarded():
        assert datasets.load_dataset("me/rows")["train"].column_names == ["text"]


@pytest.mark.parametrize("of_task", [False, True])
def test_pattern_of_a_card_with_many_stars_is_fast(of_task: bool, datasets_hub: Hub) -> None:
    """fsspec would match it in exponential time."""
    files = {"README.md": card(data_files=f"{'*a' * 40}*b.jsonl"), f"{'a' * 200}.jsonl": ROW}
    datasets_hub.add("me/stars", **files)
    start = time.perf_counter()
    with pytest.raises(UserError, match="no data file for"), task_guard.guarded():
        datasets.load_dataset("me/stars") if of_task else read("me/stars")
    assert time.perf_counter() - start < 20


LAYOUTS: dict[str, dict[str, bytes]] = {
    "names": {"train.jsonl": b'{"text": "1"}\n', "test.jsonl": b'{"text": "2"}\n', "notes.txt": b"3"},
    "folders": {
        "data/train/b.jsonl": b'{"text": "1"}\n',
        "data/train/a.jsonl": b'{"text": "2"}\n',
        "dev/a.jsonl": ROW,
    },
    "shards": {f"data/train-0000{n}-of-00002.jsonl": b'{"text": "%d"}\n' % n for n in range(2)},
    "one file": {"rows.jsonl": ROW},
    "a license": {"rows.jsonl": ROW, "more.jsonl": ROW, "LICENSE.txt": b"a", "requirements.txt": b"b"},
    "two types": {"a.jsonl": ROW, "b.json": b'[{"text": "b"}]', "c.csv": b"text\nc\n"},
    "lines": {"train.txt": b"a\n\nb\n"},
    "config": {
        "README.md": card(data_files=[{"split": "train", "path": "b/*.jsonl"}]),
        "b/x.jsonl": ROW,
        "a.jsonl": b"",
    },
    "folder of a config": {"README.md": card(data_dir="b"), "b/x.jsonl": ROW, "a.jsonl": b""},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_those_that_datasets_reads(layout: str, datasets_hub: Hub, tmp_path: Path) -> None:
    files = LAYOUTS[layout]
    datasets_hub.add("me/layout", **files)
    for name, content in files.items():
        (path := tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    theirs = datasets.load_dataset(str(tmp_path / "copy"))
    assert read("me/layout") == theirs["train"].to_list()
    with task_guard.guarded():
        ours = datasets.load_dataset("me/layout")
    assert {split: rows.to_list() for split, rows in ours.items()} == {
        split: rows.to_list() for split, rows in theirs.items()
    }


@pytest.mark.parametrize(
    ("split", "texts"),
    [
        ("train", "01234"), ("train[:2]", "01"), ("train[-2:]", "34"), ("train[20%:60%]", "12"),
        ("train[1:]", "1234"), ("train[:1]+test", "09"), ("test+train[4:]", "94"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["jsonl", "txt", "jsonl.gz", "txt.gz"])
def test_part_of_a_split_is_read(split: str, texts: str, kind: str, datasets_hub: Hub) -> None:
    lines = [
        f"{number}\n" if kind.startswith("txt") else f'{{"text": "{number}"}}\n' for number in (*range(5), 9)
    ]
    pack: Any = gzip.compress if kind.endswith("gz") else bytes
    files = {"train": "".join(lines[:5]), "test": lines[5]}
    datasets_hub.add("me/parts", **{f"{name}.{kind}": pack(text.encode()) for name, text in files.items()})
    assert "".join(row["text"] for row in read("me/parts", split=split)) == texts


@pytest.mark.parametrize(
    "split",
    ["train[", "train[1]", "a b", "../x", "train[:5", "nothing", "train[:200%]", f"train[:{'9' * 5000}]"],
)
def test_odd_split_is_an_error(split: str, datasets_hub: Hub) -> None:
    datasets_hub.add("me/parts", **{"train.jsonl": ROW})
    with pytest.raises(UserError, match=r"this is not a split|has no split"):
        read("me/parts", split=split)


def test_subset_is_a_config_or_a_folder(datasets_hub: Hub) -> None:
    configs = {"configs": [{"config_name": one, "data_files": f"{one}.jsonl"} for one in ("de", "en")]}
    text = f"---\n{yaml.safe_dump(configs)}---\n".encode()
    files = {"README.md": text, "de.jsonl": b'{"text": "de"}\n', "en.jsonl": b'{"text": "en"}\n'}
    datasets_hub.add("me/configs", **files)
    datasets_hub.add("me/folders", **{"de/train/0.jsonl": ROW, "en/train/0.jsonl": b'{"text": "en"}\n'})
    for name in ("me/configs", "me/folders"):
        assert read(name, subset="en") == [{"text": "en"}]
        with pytest.raises(UserError, match="has no config fr"):
            read(name, subset="fr")
    with pytest.raises(UserError, match="several configs, and none is the default"):
        read("me/configs")


def test_place_of_a_row_is_a_file_of_the_repository(datasets_hub: Hub) -> None:
    datasets_hub.add("me/rows", **{"data/train.jsonl": ROW + b"{\n"})
    first, second = source_loading.read(Source(name="me/rows", split="train"), "data.name")
    assert isinstance(first, Row) and first.where == "me/rows/data/train.jsonl:1"
    assert isinstance(second, BadRow) and second.problem.where == "me/rows/data/train.jsonl:2:1"


def test_list_of_files_of_a_commit_is_asked_once_and_kept(datasets_hub: Hub, monkeypatch) -> None:
    repo = datasets_hub.add("me/rows", **{"train.jsonl": ROW})
    assert read("me/rows") == read("me/rows") == [json.loads(ROW)]
    assert datasets_hub.asked("/tree/") == 1
    repo.commit("main", {"train.jsonl": b'{"text": "new"}\n'}, "other rows")
    monkeypatch.delenv(client.COMMITS)
    assert read("me/rows") == [{"text": "new"}]
    assert datasets_hub.asked("/tree/") == 2


def test_file_of_another_size_in_the_cache_is_an_error(datasets_hub: Hub) -> None:
    datasets_hub.add("me/rows", **{"train.jsonl": ROW * 5})
    assert len(read("me/rows")) == 5
    (path,) = hub_datasets.parts(Source(name="me/rows", split="train"))[0].files.values()
    path.resolve().write_bytes(ROW)
    with pytest.raises(UserError, match="in the Hub's cache is damaged"):
        read("me/rows")


@pytest.mark.parametrize("content", [b'{"text": "a"}\n{"text": \n', b"", b"\xff\xfe\0", b"PAR1"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.csv"])
def test_damaged_file_of_a_task_is_an_error(name: str, content: bytes, datasets_hub: Hub) -> None:
    datasets_hub.add("me/damaged", **{name: content})
    with task_guard.guarded():
        try:
            datasets.load_dataset("me/damaged")
        except UserError as error:
            assert error.code == 2 and "eval.tasks" in str(error)


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl", "ab::cd/a.jsonl"])
def test_name_of_a_file_is_no_pattern_and_no_address(name: str, datasets_hub: Hub) -> None:
    other = b'{"text": "other"}\n'
    datasets_hub.add("me/odd", **{name: ROW, "more/a1.jsonl": other})
    assert json.loads(ROW) in read("me/odd")
    with pytest.raises(UserError, match="takes for a pattern"), task_guard.guarded():
        datasets.load_dataset("me/odd")


@pytest.mark.parametrize(
    "name", ["a\n.jsonl", "a\\b.jsonl", "x" * 300 + ".jsonl", "a/" * 600 + "b.jsonl", "\x1b[2J.txt"]
)
@pytest.mark.parametrize("of_task", [False, True])
def test_odd_path_in_a_repository_is_an_error(name: str, of_task: bool, datasets_hub: Hub) -> None:
    datasets_hub.add("me/paths", **{"train.jsonl": ROW, name: ROW})
    with pytest.raises(UserError, match="can't read the list of files") as raised, task_guard.guarded():
        datasets.load_dataset("me/paths") if of_task else read("me/paths")
    assert raised.value.code == 2


def test_repository_with_many_files_is_read_or_refused_in_time(datasets_hub: Hub, monkeypatch) -> None:
    files = {f"data/{number}.bin": b"" for number in range(5000)}
    datasets_hub.add("me/many", **{**files, "train.jsonl": ROW})
    start = time.perf_counter()
    assert read("me/many") == [json.loads(ROW)]
    assert time.perf_counter() - start < 20
    monkeypatch.setattr(dataset_repository, "MOST_FILES", 100)
    datasets_hub.add("me/more", **files)
    with pytest.raises(UserError, match="more than 100 files"):
        read("me/more")


@pytest.mark.parametrize("name", ["train.parquet.gz", "train.jsonl.gz", "train.tar.gz", "train.csv.xz"])
def test_local_file_that_expands_is_refused(name: str, tmp_path: Path) -> None:
    pack = lzma.compress if name.endswith("xz") else gzip.compress
    (tmp_path / name).write_bytes(pack(bytes(10**9), 1) if pack is gzip.compress else pack(bytes(3 * 10**8)))
    start, before = time.perf_counter(), set(Path(tempfile.gettempdir()).glob("finetune-*"))
    with pytest.raises(UserError, match=r"too large|not a tar|damaged"):
        list(source_loading.read(Source(name=str(tmp_path / name)), "data.name"))
    assert time.perf_counter() - start < 30
    assert set(Path(tempfile.gettempdir()).glob("finetune-*")) == before


@pytest.mark.parametrize(
    "named", ["../x.jsonl", "OUTSIDE", "a/../../x.jsonl", "~/x.jsonl", "*/../../x.jsonl"]
)
def test_task_file_names_files_of_the_repository_alone(
    named: str, datasets_hub: Hub, tmp_path: Path, monkeypatch
) -> None:
    for place in (tmp_path, Path(tempfile.gettempdir())):
        (place / "x.jsonl").write_bytes(ROW)
    monkeypatch.setenv("HOME", str(tmp_path))
    datasets_hub.add("me/rows", **{"a/train.jsonl": ROW})
    named = named.replace("OUTSIDE", str(tmp_path / "x.jsonl"))
    task = {"dataset_path": "me/rows", "dataset_kwargs": {"data_files": named}}
    with pytest.raises(UserError, match=r"outside of its repository|no file has this name") as raised:
        task_data.source(task, tmp_path / "task.yaml")()
    assert raised.value.code == 2
    with pytest.raises(UserError, match=r"does not have|outside") as raised, task_guard.guarded():
        datasets.load_dataset("me/rows", data_files=named)
    assert raised.value.code == 2


def test_part_of_a_split_with_a_hyphen_is_read(datasets_hub: Hub) -> None:
    files = [{"split": "train-clean", "path": "a.jsonl"}, {"split": "other", "path": "b.jsonl"}]
    datasets_hub.add("me/hyphen", **{"README.md": card(data_files=files), "a.jsonl": ROW * 3, "b.jsonl": ROW})
    assert len(read("me/hyphen", split="train-clean[:2]")) == 2
    assert len(read("me/hyphen", split="train-clean+other")) == 4


def test_cards_and_manifests_have_limits(datasets_hub: Hub) -> None:
    files = {f"x{number}/state.json": b"{}" for number in range(200)}
    datasets_hub.add("me/many", **{"train.jsonl": ROW, **files})
    datasets_hub.add("me/large", **{"train.jsonl": ROW, "README.md": bytes(17 * 2**20)})
    for name in ("me/many", "me/large"):
        with pytest.raises(UserError, match="cards and manifests"):
            read(name)
    assert not datasets_hub.asked("/resolve/")
