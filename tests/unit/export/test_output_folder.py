"""The folder that an export or a merge writes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from finetune.core.errors import Exit, UserError
from finetune.export import merged_files, merging, published_text
from finetune.run_folder.run_folder import RunFolder


def test_two_exports_at_once_end_with_a_message_and_the_first_files(tmp_path: Path) -> None:
    staged, target = tmp_path / ".export.tmp" / "packed", tmp_path / "export"
    for folder, text in ((staged, "second"), (target, "first")):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match="Directory not empty") as raised:
        merging.publish(staged, target, RunFolder(tmp_path), {}, "export.json")
    assert raised.value.code == Exit.INPUT
    assert (target / "config.json").read_text() == "first"


def test_second_of_two_exports_at_once_keeps_the_report_of_the_first(tmp_path: Path) -> None:
    staged, target = tmp_path / ".merged.tmp" / "whole", tmp_path / "merged"
    for folder in (staged, target):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    run = RunFolder(tmp_path)
    run.write("merge.json", {"merged": {"dtype": "float32"}})
    with pytest.raises(UserError, match="Directory not empty"):
        merging.publish(staged, target, run, {"dtype": "bfloat16"})
    assert run.read("merge.json") == {"merged": {"dtype": "float32"}}


def test_an_output_that_is_a_link_to_nothing_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "absent")
    with pytest.raises(UserError, match="leads nowhere"):
        merging.free_target(tmp_path, "merged", str(tmp_path / "out"))
    (tmp_path / "merged").symlink_to("merged")
    with pytest.raises(UserError, match="leads nowhere"):
        merging.free_target(tmp_path, "merged", None)


@pytest.mark.parametrize("name", ["a**b", "**", "[a", "a?"])
def test_name_of_an_output_is_no_pattern(name: str, tmp_path: Path) -> None:
    (tmp_path / ".ab.1.tmp").mkdir()
    assert merged_files.note_interrupted(tmp_path / name, "merge") == []
    (tmp_path / f".{name}.1.tmp").mkdir()
    assert len(merged_files.note_interrupted(tmp_path / name, "merge")) == 1


def test_many_files_of_one_name_are_numbered_in_time() -> None:
    """Hive-partitioned data has thousands of them."""
    began = time.monotonic()
    paths = [f"/data/{number}/part-0.parquet" for number in range(5000)]
    names = published_text.last_names([*paths, "7/part-0.parquet"])
    assert len(set(names.values())) == 5000 and names["7/part-0.parquet"] == "part-0.parquet (8)"
    clean = published_text.without_paths({"sources": dict.fromkeys(paths, "")}, names)
    assert list(clean["sources"]) == [names[path] for path in paths]
    published_text.without_paths({f"/a/{number}/x": 1 for number in range(20_000)}, {})
    assert time.monotonic() - began < 10
