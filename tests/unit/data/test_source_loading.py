"""Rows from every kind of file, each with its place; what can't be read is said, not passed by."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import random
import shutil
import tarfile
import tempfile
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from finetune.core.errors import UserError
from finetune.data import source_loading
from finetune.data.examples import BadRow, Row
from finetune.data.formats import digest
from finetune.data.preparation import prepare
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.schema import Data, Model, Source
from support.chat_tokenizers import tokenizer_with
from support.paths import DATA, MODEL

VALUES = [{"prompt": f"{n}", "completion": "é \n 🦙"} for n in range(5)]
LINES = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in VALUES)


def read(path: Path | str) -> list[Row | BadRow]:
    return list(source_loading.training(Data(name="-"), Source(name=str(path)), set(), 0))


def values(path: Path | str) -> list[dict[str, Any]]:
    rows = read(path)
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.value for row in rows if isinstance(row, Row)]


def bad(path: Path) -> BadRow:
    """The one row of a file that can't be read."""
    (found,) = [row for row in read(path) if isinstance(row, BadRow)]
    assert found.kind == "unreadable"
    return found


def written(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---- kinds of files


def test_json_lines_and_json_arrays(tmp_path: Path) -> None:
    lines = written(tmp_path, "a.jsonl", LINES.replace("\n", "\n\n", 1))
    assert values(lines) == VALUES
    assert [row.where for row in read(lines) if isinstance(row, Row)][:2] == [f"{lines}:1", f"{lines}:3"]
    array = written(tmp_path, "a.json", json.dumps(VALUES, indent=2))
    assert values(array) == VALUES
    assert [row.where for row in read(array) if isinstance(row, Row)][:2] == [f"{array}[0]", f"{array}[1]"]
    assert values(written(tmp_path, "b.json", LINES)) == VALUES, "lines in a file of that name are read too"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_byte_order_mark_and_windows_line_ends_are_fine(name: str, tmp_path: Path) -> None:
    contents = {
        ".jsonl": '{"text": "é"}\r\n{"text": "b"}\r\n',
        ".json": '[{"text": "é"},\r\n{"text": "b"}]\r\n',
    }
    contents |= {".csv": "text\r\né\r\nb\r\n", ".txt": "é"}
    path = written(tmp_path, name, b"\xef\xbb\xbf" + contents[Path(name).suffix].encode())
    assert values(path) == [{"text": "é"}, {"text": "b"}][: 1 if name == "a.txt" else 2]


def test_csv_with_line_breaks_commas_and_quotes_in_its_fields(tmp_path: Path) -> None:
    rows = [["prompt", "completion"], ["a\nb", 'say "c", d'], ["", "e" * 200_000], ["f", "g"]]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    path = written(tmp_path, "a.csv", text.getvalue() + "\r\n\r\n")
    assert values(path) == [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    places = [row.where.rpartition(":")[2] for row in read(path) if isinstance(row, Row)]
    assert places == ["2", "4", "5"], "the line on which a row begins"


def test_csv_with_what_is_wrong_with_it(tmp_path: Path) -> None:
    for content, line, says in (
        ("a,b\n1,2\n3\n4,5\n", 3, "another number of fields"),
        ("a,b\n1,2\n3,4,5\n", 3, "another number of fields"),
        ('a,b\n1,2\n3,"4\n5,6\n', 3, "unexpected end of data"),
        ('a,b\n1,2\n3,"4"5\n5,6\n', 3, "not valid CSV"),
    ):
        found = bad(written(tmp_path, "a.csv", content))
        assert says in found.problem.what and found.problem.where.endswith(f"a.csv:{line}")
    with pytest.raises(UserError, match="two columns have the same name"):
        read(written(tmp_path, "a.csv", "a,a\n1,2\n"))


def test_parquet_and_both_kinds_of_arrow(tmp_path: Path) -> None:
    nested = [{"messages": [{"role": "user", "content": str(n)}], "n": n} for n in range(2500)]
    table = pyarrow.Table.from_pylist(nested)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    for name, new in (("file.arrow", ipc.new_file), ("stream.arrow", ipc.new_stream)):
        with pyarrow.OSFile(str(tmp_path / name), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=900)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        rows = read(tmp_path / name)
        assert [row.value for row in rows if isinstance(row, Row)] == nested
        assert [row.where for row in rows if isinstance(row, Row)][2499] == f"{tmp_path / name}[2499]"


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_a_damaged_columnar_file_is_an_error_wherever_it_is_cut(name: str, tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"text": f"{n} word " * 20} for n in range(300)])
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(table, path)
    else:
        new: Any = ipc.new_file if name.startswith("file") else ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    whole = path.read_bytes()
    for share in (0.0, 0.01, 0.3, 0.6, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(UserError) as raised:
            read(path)
        assert name in str(raised.value)
    written(tmp_path, name, b"this is no such file at all")
    with pytest.raises(UserError, match=r"is damaged or|no example"):
        read(path)


def tar(path: Path, members: list[tuple[str, bytes]], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def test_webdataset_tars_join_files_of_one_name(tmp_path: Path) -> None:
    members = [("x/0.prompt.txt", b"a"), ("x/0.json", b'{"completion": "b"}'), ("x/1.txt", "é".encode())]
    members += [("x/2.json", b'{"prompt": "c", "completion": "d"}')]
    path = tar(tmp_path / "a.tar", members)
    assert values(path) == [
        {"prompt.txt": "a", "completion": "b"},
        {"text": "é"},
        {"prompt": "c", "completion": "d"},
    ]
    assert [row.where for row in read(path) if isinstance(row, Row)] == [f"{path}!x/{n}" for n in range(3)]
    zipped = written(tmp_path, "b.tar", gzip.compress(path.read_bytes()))
    assert values(zipped) == values(path)


def test_a_bad_member_makes_its_row_bad_and_no_other(tmp_path: Path) -> None:
    members = [("0.json", b"{"), ("0.txt", b"a"), ("1.jpg", b"\xff\xd8"), ("2.txt", b"b")]
    path = tar(tmp_path / "a.tar", members)
    rows = read(path)
    assert [isinstance(row, BadRow) for row in rows] == [True, True, False]
    assert [row.problem.where for row in rows if isinstance(row, BadRow)] == [f"{path}!0", f"{path}!1"]


def test_a_damaged_tar_is_an_error_wherever_it_is_cut(tmp_path: Path) -> None:
    digits = random.Random(0).choices(b"0123456789", k=2800)
    path = tar(tmp_path / "a.tar", [(f"{n}.txt", bytes(digits[n * 700 : n * 700 + 700])) for n in range(4)])
    whole = path.read_bytes()
    header, content = 512, 1024
    lengths = (10, header + 3, header + content + 7, 2 * (header + content), 3 * (header + content) + 100)
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"damaged|cut off"):
            read(path)
    with pytest.raises(UserError, match="damaged"):
        read(written(tmp_path, "b.tar", gzip.compress(whole)[:900]))


def test_a_text_file_is_one_row(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "é\n\nb\n")
    assert read(path) == [Row({"text": "é\n\nb\n"}, str(path))]


# ---- what names a file


def test_folders_globs_and_lists(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    for name in ("a.jsonl", "b.jsonl", "deeper/c.jsonl"):
        written(tmp_path, name, LINES)
    written(tmp_path, "README.md", "no data")
    written(tmp_path, "dataset_info.json", "{\n}")  # what `datasets` leaves beside its files
    assert len(values(tmp_path)) == 10
    assert len(values(tmp_path / "*.jsonl")) == 10 and len(values(tmp_path / "**" / "*.jsonl")) == 15
    named = [str(tmp_path / "a.jsonl"), Source(name=str(tmp_path / "b.jsonl"), weight=2.0, split="test")]
    found = source_loading.sources(Data(name=named, split="train", revision="abc"))
    assert [(s.weight, s.split, s.revision) for s in found] == [(1, "train", "abc"), (2, "test", "abc")]
    assert source_loading.files("HuggingFaceH4/no_robots", "data.name") is None
    written(tmp_path, "x[1].jsonl", LINES)
    assert source_loading.files(str(tmp_path / "x[1].jsonl"), "data.name") == [tmp_path / "x[1].jsonl"]


def test_a_name_that_means_nothing_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, "train.jsonl", LINES)
    with pytest.raises(UserError, match=r"does not exist") as raised:
        read(tmp_path / "trian.jsonl")
    assert str(path) in str(raised.value), "the nearest name"
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "*.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no data file"):
        read(tmp_path / "empty")
    with pytest.raises(UserError, match="the data has no example"):
        read(written(tmp_path, "none.jsonl", b"\n \n"))


@pytest.mark.parametrize("name", ["a.py", "a.pkl", "a.pickle", "a.pt", "a.bin", "a.npy"])
def test_a_file_that_can_run_code_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w')"
    path = written(tmp_path, name, code if name == "a.py" else pickle.dumps(Attack(code)))
    with pytest.raises(UserError, match="can run code when it is opened") as raised:
        read(path)
    assert raised.value.code == 2 and ".jsonl, .json" in str(raised.value) and not marker.exists()


class Attack:
    """Runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


@pytest.mark.parametrize("name", ["a.xlsx", "a", "B.JSONL", "a.jsonl.zst", "a.txt.gz.gz"])
def test_a_kind_that_is_not_read_is_refused(name: str, tmp_path: Path) -> None:
    written(tmp_path, "good.jsonl", LINES)
    path = written(tmp_path, name, LINES)
    for named in (path, tmp_path) if name == "B.JSONL" else (path,):  # a folder does not pass it by
        with pytest.raises(UserError, match=f"can't read the type of {name}"):
            read(named)


# ---- lines that can't be read


@pytest.mark.parametrize(
    ("line", "place", "says"),
    [
        (b"{'prompt': 1}", ":2:2", "not valid JSON"),
        (b'{"prompt": }', ":2:12", "not valid JSON"),
        (b'{"a": "\xc3\xa9\xc3\xa9" "b"}', ":2:12", "not valid JSON"),
        (b"[1]", ":2", "an example must be a JSON object"),
        (b"null", ":2", "an example must be a JSON object"),
        (b'{"a": "\xe9"}', ":2, byte 20", "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', ":2, byte 20", "not UTF-8"),
        (rb'{"a": ["\ud83d"]}', ":2", "half of a surrogate pair"),
        (rb'{"\uDE00": 1}', ":2", "half of a surrogate pair"),
        (b'{"a": ' + b"[" * 100_000 + b"}", ":2", "finetune can't read this JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", ":2", "finetune can't read this JSON"),
    ],
)
def test_a_line_that_can_t_be_read_is_said_with_its_place(
    line: bytes, place: str, says: str, tmp_path: Path
) -> None:
    good = b'{"a": "b c"}\n'
    path = written(tmp_path, "a.jsonl", good + line + b"\n" + good)
    found = bad(path)
    assert says in found.problem.what and found.problem.where == f"{path}{place}"
    assert len(read(path)) == 3
    whole = b"[" + good + b"," + line + b"]"
    array = written(tmp_path, "a.json", whole)
    if "surrogate" in says or "object" in says:
        assert bad(array).problem.where == f"{array}[1]"
    else:
        with pytest.raises(UserError, match=says):
            read(array)


def test_a_whole_emoji_in_escapes_is_no_half_of_one(tmp_path: Path) -> None:
    assert values(written(tmp_path, "a.jsonl", rb'{"text": "\ud83e\udd99 \\ud83e"}')) == [
        {"text": r"🦙 \ud83e"}
    ]


def test_a_last_line_that_was_cut_is_said_to_be_cut_wherever(tmp_path: Path) -> None:
    whole = r'{"messages": [{"role": "user", "content": "a\n b\u00e9"}, {"n": -12, "x": [null, true]}]}'
    for length in range(1, len(whole)):
        path = written(tmp_path, "a.jsonl", f"{whole}\n{whole[:length]}")
        if whole[length - 1] != "}":
            assert "is cut off" in bad(path).problem.what, whole[:length]
        array = written(tmp_path, "a.json", f"[{whole},\n{whole[:length]}")
        with pytest.raises(UserError, match="is cut off"):
            read(array)


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.json"])
def test_a_byte_that_is_not_utf_8_is_placed_in_a_long_file(name: str, tmp_path: Path) -> None:
    """A text reader decodes 8 KiB at a time and can't say where in them; a BOM moves every place by three."""
    before = b"\xef\xbb\xbf[\n" + b'"word word"\n' * 3000
    path = written(tmp_path, name, before + b'"caf\xe9"\n' + b"word\n" * 5000)
    with pytest.raises(UserError, match="not UTF-8") as raised:
        read(path)
    assert f"{path}:3002, byte {len(before) + 4}" in str(raised.value) and "Windows-1252" in str(raised.value)


def test_a_byte_order_mark_counts_in_the_place_of_a_bad_byte(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"a": "\xe9"}\n')
    assert bad(path).problem.where == f"{path}:1, byte 10"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_utf_16_is_said_once_and_not_for_each_line(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, ('{"text": "a"}\n' * 3).encode("utf-16"))
    with pytest.raises(UserError, match="not UTF-8") as raised:
        read(path)
    assert len(raised.value.problems) == 1 and "UTF-16" in raised.value.problems[0].fix


# ---- shares of the data


def held_out(data: Data, seed: int) -> tuple[list[str], list[str]]:
    """Contents of the rows to train on and of the held-out ones."""
    drawn = source_loading.draw_held_out(data, seed)
    train = [
        row
        for source in source_loading.sources(data)
        for row in source_loading.training(data, source, drawn, seed)
    ]
    both = train, [row for _, rows in source_loading.validation(data, drawn, seed) for row in rows]
    left, right = ([json.dumps(row.value) for row in rows if isinstance(row, Row)] for rows in both)
    return left, right


def test_the_held_out_share_is_exact_and_drawn_by_seed_alone() -> None:
    data = Data(name=str(DATA / "test.jsonl"), validation_fraction=0.1)
    train, out = held_out(data, seed=3)
    assert (len(train), len(out)) == (270, 30) and not set(train) & set(out)
    assert held_out(data, seed=3) == (train, out)
    assert held_out(data, seed=4)[1] != out


def test_equal_rows_stay_on_one_side_whatever_their_order(tmp_path: Path) -> None:
    lines = [json.dumps({"text": str(n % 40), "more": n % 2}) for n in range(120)]
    sides = []
    for name, order in (("a.jsonl", lines), ("b.jsonl", lines[::-1])):
        data = Data(name=str(written(tmp_path, name, "\n".join(order))), validation_fraction=0.25)
        train, out = held_out(data, seed=1)
        assert not set(train) & set(out) and len(train) + len(out) == 120 and len(out) == 30
        sides.append(Counter(out))
    assert sides[0] == sides[1]


def test_a_share_that_leaves_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"text": "a"}\n' * 8)
    with pytest.raises(UserError, match="would take all examples"):
        held_out(Data(name=str(path), validation_fraction=0.1), seed=0)
    rows = "".join(
        f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(8)
    )  # alike, for nothing is read
    path = written(tmp_path, "b.jsonl", rows)
    for format in ("auto", "alpaca"):
        with pytest.raises(UserError, match="match no known format") as raised:
            held_out(Data(name=str(path), validation_fraction=0.25, format=format), seed=0)
        assert "columns: {instruction: question, output: answer}" in raised.value.problems[0].fix


def test_a_share_of_one_text_file_is_told_what_to_do(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "One text.\n\nIn several paragraphs.\n")
    with pytest.raises(UserError, match="would take all examples") as raised:
        held_out(Data(name=str(path), validation_fraction=0.1), seed=0)
    (problem,) = raised.value.problems
    assert problem.found == "1 different example" and "set data.validation to another file" in problem.fix


def test_no_file_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    path, other = (written(tmp_path, name, LINES) for name in ("a.jsonl", "b.jsonl"))
    source_loading.check_disjoint(Data(name=str(path), validation=str(other)))
    (tmp_path / "link.jsonl").symlink_to(path)
    names: list[Any] = [str(tmp_path), [str(other), str(path)], str(tmp_path / "*.jsonl")]
    for name in names:
        with pytest.raises(UserError, match="in the training set and in the validation set"):
            source_loading.check_disjoint(Data(name=name, validation=str(tmp_path / "link.jsonl")))
    with pytest.raises(UserError, match="the validation set must be a local file"):
        source_loading.check_disjoint(Data(name=str(path), validation="org/name"))


def uses(folder: Path, seed: int, *weights: float, rows: int = 40) -> list[Counter[str]]:
    """How often each row of each source is used in an epoch."""
    names: list[str | Source] = []
    for number, weight in enumerate(weights):
        lines = "".join(json.dumps({"text": f"{number} {row}"}) + "\n" for row in range(rows))
        names.append(Source(name=str(written(folder, f"{number}.jsonl", lines)), weight=weight))
    data = Data(name=names, cache_dir=str(folder / "cache"))
    found: Any = prepare(data, load_tokenizer(Model(name=str(MODEL))), seed, None).train
    counts = Counter(row["where"][0] for row in found)
    return [Counter({w: n for w, n in counts.items() if f"{i}.jsonl" in w}) for i in range(len(weights))]


def test_each_row_is_used_exactly_as_often_as_its_source_weighs(tmp_path: Path) -> None:
    one, three, more = uses(tmp_path, 0, 1, 3, 2.5)
    assert set(one.values()) == {1} and set(three.values()) == {3} and set(more.values()) == {2, 3}
    assert len(one) == len(three) == len(more) == 40


def test_a_share_of_a_source_is_drawn_again_alike(tmp_path: Path) -> None:
    (first,) = uses(tmp_path, 0, 0.25, rows=400)
    assert set(first.values()) == {1} and 70 < len(first) < 130
    shutil.rmtree(tmp_path / "cache")
    assert uses(tmp_path, 0, 0.25, rows=400) == [first]


def test_another_seed_draws_another_share(tmp_path: Path) -> None:
    assert uses(tmp_path, 0, 0.25, rows=400) != uses(tmp_path, 1, 0.25, rows=400)


def conversation(first: str, number: int, **more: object) -> dict[str, Any]:
    turns = [{"role": "user", "content": first}, {"role": "assistant", "content": f"answer {number}"}]
    return {"messages": [{"role": "system", "content": "Be brief."}, *turns], **more}


@pytest.mark.parametrize(
    "rows",
    [
        [conversation(f"question {n // 3}", n) for n in range(300)],
        [conversation(f"question {n}", n, id=f"chat-{n // 3}") for n in range(300)],
        [conversation(f"question {n}", n, conversation_id=n // 3) for n in range(300)],
        [{"instruction": "Sort", "input": f"{n // 3}", "output": f"answer {n}"} for n in range(300)],
        [{"prompt": f"question {n // 3}", "completion": f"answer {n}"} for n in range(300)],
        [
            {"instruction": "And?", "output": f"answer {n}", "history": [[f"question {n // 3}", "a"]]}
            for n in range(300)
        ],
    ],
)
def test_a_conversation_is_wholly_on_one_side_of_the_split(rows: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(name=str(file), validation_fraction=0.1)
    for seed in range(3):
        drawn = source_loading.draw_held_out(data, seed)
        assert len(drawn) == 30
        for first in range(0, 300, 3):
            sides = {digest(Row(row, "-"), seed, data) in drawn for row in rows[first : first + 3]}
            assert len(sides) == 1


def test_a_split_without_conversations_is_what_it_always_was(tmp_path: Path) -> None:
    rows = [conversation(f"question {n}", n, id=n) for n in range(100)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(name=str(file), validation_fraction=0.1)
    digests = sorted(digest(Row(row, "-"), 7, data) for row in rows)
    assert source_loading.draw_held_out(data, 7) == set(digests[:10])


def test_one_conversation_for_all_is_split_by_rows_and_counted(tmp_path: Path) -> None:
    rows = [conversation("Hello", n) for n in range(20)]
    file, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other.write_text(json.dumps(conversation("Hello", 99)) + "\n")
    cache = str(tmp_path / "cache")
    for split, shared in (({"validation_fraction": 0.1}, 18), ({"validation": str(other)}, 20)):
        data = Data(name=str(file), cache_dir=cache, **split)
        report = prepare(data, tokenizer_with(), 0, None).report["train"]
        assert report.counts["same_conversation"] == shared
        assert any("share a conversation" in remark for remark in report.remarks())


def test_groups_of_one_large_conversation_take_linear_time() -> None:
    """Each row has two keys of its conversation: the second pass over it must not merge it with itself."""
    rows = 20_000
    owners = array("Q", (row for row in range(rows) for _ in range(2)))
    keys = array("Q", (key for _ in range(rows) for key in (1, 2)))
    started = time.process_time()
    groups = source_loading._groups(owners, keys, rows + 1)
    assert len(groups) == rows and all(group is groups[0] for group in groups.values())
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("sizes", "held_out", "is_noted"),
    [
        ([3] * 100, 30, False),
        ([33] * 9, 33, False),
        ([45] * 6 + [1] * 30, 30, False),
        ([100] * 2 + [90] + [1] * 10, 10, True),
        ([48] * 6 + [4] * 3, 12, True),
    ],
)
def test_a_split_of_large_conversations_comes_close_or_is_reported(
    sizes: list[int], held_out: int, is_noted: bool, tmp_path: Path
) -> None:
    rows = [
        conversation(f"question {number}", 1000 * number + turn)
        for number, size in enumerate(sizes)
        for turn in range(size)
    ]
    file = written(tmp_path, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    data = Data(name=str(file), validation_fraction=0.1, cache_dir=str(tmp_path / "cache"))
    report = prepare(data, tokenizer_with(), 0, None).report
    assert report["validation"].rows == held_out
    assert "same_conversation" not in report["train"].counts
    noted = [remark for remark in report["train"].remarks() if "data.validation_fraction: " in remark]
    assert bool(noted) == is_noted and all(f"has {held_out} examples" in remark for remark in noted)


# ---- limits of many files and columns


def test_sources_with_many_files_together_are_refused(tmp_path: Path) -> None:
    """Each is recorded, and each check looks at all of them."""
    for number in range(3000):
        (tmp_path / f"{number}.jsonl").touch()
    several = [Source(name=f"{tmp_path}{'/.' * count}") for count in range(40)]
    source_loading.check_number_of_files(Data(name=several[:6]))
    began = time.monotonic()
    with pytest.raises(UserError, match="too many files together"):
        source_loading.check_number_of_files(Data(name=several))
    assert time.monotonic() - began < 5


def test_files_with_long_paths_are_refused(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["x" * 240] * 7)
    folder.mkdir(parents=True)
    for number in range(5200):
        (folder / f"{number}.jsonl").touch()
    with pytest.raises(UserError, match="too many files together"):
        source_loading.check_number_of_files(Data(name=str(folder)))


def test_folders_are_searched_once_within_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "a.jsonl", LINES)
    asked, files = list[str](), source_loading.files
    monkeypatch.setattr(source_loading, "files", lambda name, *more: asked.append(name) or files(name, *more))
    source = Source(name=str(tmp_path))
    with source_loading.listed_once(), source_loading.listed_once():
        assert source_loading.files_of(source, "data.name") == source_loading.files_of(source, "data.name")
        assert len(asked) == 1
        written(tmp_path, "b.jsonl", LINES)
    assert len(source_loading.files_of(source, "data.name") or ()) == 2 and len(asked) == 2


def test_many_unused_columns_are_counted_together() -> None:
    rows = [Row({"text": "a", f"{number:03}" + "x" * 1000: 1, "same": 2}, "a:1") for number in range(300)]
    left = dict[str, dict[str, int]]()
    list(source_loading.examples(rows, Data(name="-"), "a", {}, left))
    assert len(left["a"]) == source_loading.MOST_COLUMNS + 1
    assert sum(left["a"].values()) == 600 and left["a"]["same"] == 300
    assert max(map(len, left["a"])) <= source_loading.LONGEST_COLUMN + 3
    assert left["a"][source_loading.OTHER_COLUMNS] == 300 - source_loading.MOST_COLUMNS + 1


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt"])
def test_compressed_file_has_the_rows_of_the_file(packing: str, name: str, tmp_path: Path) -> None:
    rows = [{"text": "é" * 200 + str(number)} for number in range(2000)]
    plain = tmp_path / name
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), plain)
    elif name.endswith(".csv"):
        plain.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    else:
        plain.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[packing]
    packed = tmp_path / f"{name}.{packing}"
    packed.write_bytes(pack(plain.read_bytes()))
    before = set(Path(tempfile.gettempdir()).glob("finetune-*"))
    found = list(source_loading.read(Source(name=str(packed)), "data.name"))
    assert [row.value for row in found] == [
        row.value for row in source_loading.read(Source(name=str(plain)), "data.name")
    ]
    assert found[0].where.startswith(str(packed)) and len(found) == (1 if name == "a.txt" else 2000)
    next(iter(source_loading.read(Source(name=str(packed)), "data.name")))  # not read to its end
    assert set(Path(tempfile.gettempdir()).glob("finetune-*")) == before
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"is damaged|cut off"):
        list(source_loading.read(Source(name=str(packed)), "data.name"))


@pytest.mark.parametrize("packing", ["gz", "bz2", "xz"])
def test_damage_of_a_later_stream_of_a_compressed_file_is_an_error(packing: str, tmp_path: Path) -> None:
    """pbzip2 and `cat` make files of several streams."""
    pack: Any = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[packing]
    streams = [pack(f'{{"text": "{number}"}}\n'.encode() * 20) for number in range(3)]
    path = tmp_path / f"a.jsonl.{packing}"
    path.write_bytes(b"".join(streams))
    assert len(list(source_loading.read(Source(name=str(path)), "data.name"))) == 60
    for place in (len(streams[0]) + 1, len(streams[0]) // 2):
        damaged = bytearray(b"".join(streams))
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="compressed file is damaged"):
            list(source_loading.read(Source(name=str(path)), "data.name"))
