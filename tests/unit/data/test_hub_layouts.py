"""Datasets of the Hub have the rows that `datasets` reads from a copy of the repository."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import yaml
from pyarrow import parquet

from finetune.data import source_loading
from finetune.data.examples import Row
from finetune.recipe.schema import Source
from support.hub_server import Hub


def of_parquet(count: int, name: str) -> bytes:
    table = pyarrow.table({"text": [f"{name}{number}" for number in range(count)], "k": [*range(count)]})
    parquet.write_table(table, file := io.BytesIO())
    return file.getvalue()


def card(content: dict[str, Any]) -> bytes:
    return f"---\n{yaml.safe_dump(content)}---\n# A dataset\n".encode()


def lines(*texts: str) -> bytes:
    return "".join(f"{json.dumps({'text': text})}\n" for text in texts).encode()


def saved() -> dict[str, bytes]:
    """The files of `save_to_disk`."""
    rows = {"train": ["a", "b"], "test": ["c"]}
    parts = {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in rows.items()}
    with tempfile.TemporaryDirectory() as folder:
        datasets.DatasetDict(parts).save_to_disk(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


LAYOUTS: dict[str, tuple[dict[str, bytes], str | None, str]] = {
    "levels": ({"train.jsonl": lines("a"), "more/train.jsonl": lines("b")}, None, "train"),
    "level of data": ({"train.jsonl": lines("a"), "data/train.jsonl": lines("b")}, None, "train"),
    "shards first": (
        {"train.jsonl": lines("a"), "data/train-00000-of-00001.jsonl": lines("b")},
        None,
        "train",
    ),
    "folders first": ({"train.jsonl": lines("a"), "train/x.jsonl": lines("b")}, None, "train"),
    "folders and files": ({"a/train/x.jsonl": lines("a"), "test.jsonl": lines("b")}, None, "train"),
    "without a split": ({"train.jsonl": lines("a"), "other.jsonl": lines("b")}, None, "train"),
    "old": ({"rows.jsonl": lines("a"), "old/rows.jsonl": lines("b")}, None, "train"),
    "old train": ({"rows.jsonl": lines("a"), "old/train.jsonl": lines("b")}, None, "train"),
    "ultrachat": (
        {
            "README.md": card(
                {
                    "configs": [
                        {
                            "config_name": "default",
                            "data_files": [
                                {"split": s, "path": f"data/{s}-*"} for s in ("train_sft", "test_sft")
                            ],
                        }
                    ],
                    "dataset_info": {
                        "features": [{"name": "text", "dtype": "string"}, {"name": "k", "dtype": "int64"}]
                    },
                }
            ),
            "data/train_sft-00000-of-00002-ab.parquet": of_parquet(3, "a"),
            "data/train_sft-00001-of-00002-cd.parquet": of_parquet(2, "b"),
            "data/test_sft-00000-of-00001.parquet": of_parquet(1, "t"),
        },
        None,
        "train_sft",
    ),
    "configs": (
        {
            "README.md": card(
                {
                    "configs": [
                        {
                            "config_name": "main",
                            "data_files": [
                                {"split": "train", "path": "main/train-*"},
                                {"split": "test", "path": "main/test-*"},
                            ],
                        },
                        {
                            "config_name": "socratic",
                            "data_files": [{"split": "train", "path": "socratic/train-*"}],
                        },
                    ]
                }
            ),
            "main/train-00000-of-00001.parquet": of_parquet(3, "m"),
            "main/test-00000-of-00001.parquet": of_parquet(1, "x"),
            "socratic/train-00000-of-00001.parquet": of_parquet(2, "s"),
        },
        "main",
        "train",
    ),
    "json array": (
        {
            "alpaca_data.json": json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode(),
            "README.md": b"# hi\n",
        },
        None,
        "train",
    ),
    "csv": (
        {
            "README.md": card({"license": "mit"}),
            "train.csv": b'text,label\nhello,x\n"a, b",y\n',
            "test.csv": b"text,label\nq,z\n",
        },
        None,
        "train",
    ),
    "dev": (
        {"train.jsonl": lines("a"), "dev.jsonl": lines("b"), "test.jsonl": lines("c")},
        None,
        "validation",
    ),
    "validation folder": (
        {"en/train/x.jsonl": lines("a"), "en/validation/x.jsonl": lines("b")},
        None,
        "validation",
    ),
    "list": (
        {
            "README.md": card(
                {"configs": [{"config_name": "default", "data_files": ["b.jsonl", "a.jsonl"]}]}
            ),
            "a.jsonl": lines("a"),
            "b.jsonl": lines("b"),
            "c.jsonl": lines("c"),
        },
        None,
        "train",
    ),
    "default flag": (
        {
            "README.md": card(
                {
                    "configs": [
                        {"config_name": "x", "data_files": "x.jsonl"},
                        {"config_name": "y", "data_files": "y.jsonl", "default": True},
                    ]
                }
            ),
            "x.jsonl": lines("x"),
            "y.jsonl": lines("y"),
        },
        None,
        "train",
    ),
    "dirs": (
        {
            "README.md": card(
                {"configs": [{"config_name": "x", "data_dir": "x"}, {"config_name": "y", "data_dir": "y"}]}
            ),
            "x/train.jsonl": lines("x"),
            "y/train.jsonl": lines("y"),
        },
        "y",
        "train",
    ),
    "nested": ({"data/a/b/c.jsonl": lines("1"), "data/a/d.jsonl": lines("2")}, None, "train"),
    "glob2": (
        {
            "README.md": card({"configs": [{"config_name": "default", "data_files": "**/*.jsonl"}]}),
            "q/b.jsonl": lines("b"),
            "q/r/a.jsonl": lines("a"),
            "z.jsonl": lines("z"),
        },
        None,
        "train",
    ),
    "shards3": ({f"train-{i:05d}-of-00012.jsonl": lines(str(i)) for i in range(12)}, None, "train"),
    "numbers": ({f"part_{i}.jsonl": lines(str(i)) for i in (10, 9, 2, 1)}, None, "train"),
    "saved": (saved(), None, "train"),
    "slice": ({"train.jsonl": lines(*"abcdefghij")}, None, "train[25%:75%]"),
    "slice2": ({"train.jsonl": lines(*"abcdefghij")}, None, "train[:33%]"),
    "pieces": ({"train.jsonl": lines(*"abc"), "test.jsonl": lines("t")}, None, "train[:2]+test"),
    "txt": ({"a.txt": b"one\r\ntwo\n\nthree"}, None, "train"),
    "txt2": ({"a.txt": b"one\x0ctwo\xe2\x80\xa8x\n"}, None, "train"),
    "brackets": (
        {
            "README.md": card({"configs": [{"config_name": "default", "data_files": "data/[ab].jsonl"}]}),
            "data/a.jsonl": lines("a"),
            "data/b.jsonl": lines("b"),
            "data/c.jsonl": lines("c"),
        },
        None,
        "train",
    ),
    "question": (
        {
            "README.md": card({"configs": [{"config_name": "default", "data_files": "data/?.jsonl"}]}),
            "data/a.jsonl": lines("a"),
            "data/bb.jsonl": lines("b"),
        },
        None,
        "train",
    ),
    "dot slash": (
        {
            "README.md": card({"configs": [{"config_name": "default", "data_files": "./data/a.jsonl"}]}),
            "data/a.jsonl": lines("a"),
        },
        None,
        "train",
    ),
    "trailing star": (
        {
            "README.md": card({"configs": [{"config_name": "default", "data_files": "data/*"}]}),
            "data/a.jsonl": lines("a"),
            "data/x/b.jsonl": lines("b"),
        },
        None,
        "train",
    ),
    "double star end": (
        {
            "README.md": card({"configs": [{"config_name": "default", "data_files": "data/**"}]}),
            "data/a.jsonl": lines("a"),
            "data/x/b.jsonl": lines("b"),
        },
        None,
        "train",
    ),
    "crlf": ({"train.jsonl": b'{"text": "a"}\r\n{"text": "b"}\r\n'}, None, "train"),
    "hidden": (
        {"train.jsonl": lines("a"), ".cache/train.jsonl": lines("x"), "__pycache__/train.jsonl": lines("y")},
        None,
        "train",
    ),
    "test only": ({"test.jsonl": lines("a")}, None, "test"),
    "parquet export": (
        {"default/train/0000.parquet": of_parquet(2, "a"), "default/test/0000.parquet": of_parquet(1, "b")},
        None,
        "train",
    ),
    "eval": ({"train.jsonl": lines("a"), "eval.jsonl": lines("b")}, None, "test"),
    "val": ({"train.jsonl": lines("a"), "val.jsonl": lines("b")}, None, "validation"),
    "custom": (
        {
            "README.md": card(
                {
                    "configs": [
                        {"config_name": "default", "data_files": [{"split": "special", "path": "a.jsonl"}]}
                    ]
                }
            ),
            "a.jsonl": lines("a"),
        },
        None,
        "special",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_that_datasets_reads(layout: str, datasets_hub: Hub, tmp_path: Path) -> None:
    files, subset, split = LAYOUTS[layout]
    datasets_hub.add("me/layout", **files)
    for name, content in files.items():
        (path := tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    source = Source(name="me/layout", subset=subset, split=split)
    rows = [row.value["text"] for row in source_loading.read(source, "data.name") if isinstance(row, Row)]
    assert rows == datasets.load_dataset(str(tmp_path / "copy"), subset, split=split)["text"][:]
