"""Damaged prepared data: finetune prepares it again with a note, and trains on the same bytes as before."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from transformers import AutoConfig

from finetune.autoconfig.memory_estimate import Widths
from finetune.core import verified_files
from finetune.core.errors import UserError
from finetune.data import preparation, prepared_cache
from finetune.models import architecture, model_files, module_lists
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.planning import dataset_estimate, measured_rates
from finetune.recipe.loader import load
from finetune.recipe.schema import Data, Model
from finetune.training import load_data
from support.paths import DATA, MODEL, QUICKSTART

OPTIONS = {"plain": {}, "packed": {"packing": True}, "with a validation set": {"validation_fraction": 0.2}}
NOBODY = 65534


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Model(name=str(MODEL)))


@pytest.fixture
def data(tmp_path) -> Data:
    lines = (DATA / "train.jsonl").read_text().splitlines()[:24]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    return Data.model_validate({"name": str(tmp_path / "a.jsonl"), "cache_dir": str(tmp_path / "cache")})


def entry(cache: Path | str | None) -> Path:
    """The folder of the prepared data in a cache."""
    (folder,) = (path for path in Path(cache or "").iterdir() if len(path.name) == 24)
    return folder


def content(prepared) -> tuple[list, dict]:
    """All that a run takes from prepared data."""
    reports = {
        name: {**report.as_json(), "notes": [], "seconds": 0} for name, report in prepared.report.items()
    }
    return prepared.train.to_list(), reports


def flip(path: Path, offset: int, mask: int = 1) -> None:
    held = bytearray(path.read_bytes())
    held[min(offset, len(held) - 1)] ^= mask  # the time of preparation has more or fewer digits
    path.write_bytes(held)


def offsets(size: int, count: int) -> list[int]:
    return sorted({0, size // 2, size - 1, *random.Random(size).sample(range(size), min(count, size))})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("count", [1, pytest.param(60, marks=pytest.mark.soak)])
def test_flipped_byte_in_prepared_data_is_prepared_again(data, tokenizer, count, options) -> None:
    data = data.model_copy(update=options)
    whole, folder = content(preparation.prepare(data, tokenizer, 0, None)), entry(data.cache_dir)
    names = {path.name for path in folder.iterdir()}
    assert names == {"rows.arrow", "report.json"}
    for name in sorted(names):
        for offset in offsets((folder / name).stat().st_size, count):
            flip(folder / name, offset, random.Random(offset).choice([1, 32, 128]))
            again = preparation.prepare(data, tokenizer, 0, None)
            said = again.report["train"].notes
            assert not again.cached and content(again) == whole, (name, offset)
            assert "was damaged" in said[-1] and name in said[-1] and "prepared it again" in said[-1]
    last = preparation.prepare(data, tokenizer, 0, None)
    assert last.cached and not last.report["train"].notes
    assert {path.name[:8] for path in Path(data.cache_dir or "").iterdir()} == {folder.name[:8]}, (
        "nothing is left over"
    )


def test_other_token_ids_of_the_vocabulary_are_not_trained_on(data, tokenizer) -> None:
    whole, folder = content(preparation.prepare(data, tokenizer, 0, None)), entry(data.cache_dir)
    table = pyarrow.ipc.open_stream((folder / "rows.arrow").read_bytes()).read_all()
    columns = {name: table.column(name) for name in table.column_names}
    for name in ("input_ids", "labels"):
        rows = [[i if i < 0 else (i + 7) % 90 for i in row] for row in table.column(name).to_pylist()]
        columns[name] = pyarrow.array(rows, table.schema.field(name).type)
    with pyarrow.ipc.new_stream(str(folder / "rows.arrow"), table.schema) as stream:
        stream.write_table(pyarrow.table(columns, table.schema))
    again = preparation.prepare(data, tokenizer, 0, None)
    assert content(again) == whole and "rows.arrow" in again.report["train"].notes[-1]


def cut(folder: Path, other: Path) -> None:
    rows = folder / "rows.arrow"
    rows.write_bytes(rows.read_bytes()[:-9])


def empty(folder: Path, other: Path) -> None:
    (folder / "rows.arrow").write_bytes(b"")


def swap_rows(folder: Path, other: Path) -> None:
    shutil.copyfile(other / "rows.arrow", folder / "rows.arrow")


def swap_report(folder: Path, other: Path) -> None:
    shutil.copyfile(other / "report.json", folder / "report.json")


def swap_all(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def link_to_other(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(other)


def delete_rows(folder: Path, other: Path) -> None:
    (folder / "rows.arrow").unlink()


def delete_report(folder: Path, other: Path) -> None:
    (folder / "report.json").unlink()


def replace_by_file(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def replace_by_fifo(folder: Path, other: Path) -> None:
    (folder / "rows.arrow").unlink()
    os.mkfifo(folder / "rows.arrow")


DAMAGES = (
    cut, empty, swap_rows, swap_report, swap_all, link_to_other, delete_rows, delete_report,
    replace_by_file, replace_by_fifo,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_cut_or_swapped_prepared_data_is_prepared_again(data, tokenizer, tmp_path, damage) -> None:
    whole, folder = content(preparation.prepare(data, tokenizer, 0, None)), entry(data.cache_dir)
    elsewhere = data.model_copy(update={"train_on": "all", "cache_dir": str(tmp_path / "other")})
    preparation.prepare(elsewhere, tokenizer, 0, None)
    damage(folder, entry(tmp_path / "other"))
    again = preparation.prepare(data, tokenizer, 0, None)
    assert content(again) == whole and again.report["train"].notes
    assert preparation.prepare(data, tokenizer, 0, None).cached
    assert len(preparation.prepare(elsewhere, tokenizer, 0, None).train), "the other data is as it was"


def test_processes_that_find_damage_together_end_with_the_same_content(data, tokenizer) -> None:
    whole, folder = content(preparation.prepare(data, tokenizer, 0, None)), entry(data.cache_dir)
    flip(folder / "rows.arrow", 100)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: preparation.prepare(data, tokenizer, 0, None), range(4)))
    assert all(content(one) == whole for one in found)
    assert [path.name for path in Path(data.cache_dir or "").iterdir()] == [folder.name]


def test_whole_data_of_another_process_is_not_replaced(data, tokenizer, tmp_path) -> None:
    """Two processes prepare: the second one to be done takes what the first one wrote."""
    preparation.prepare(data, tokenizer, 0, None)
    folder = entry(data.cache_dir)
    building = prepared_cache.start(folder.parent)
    shutil.copytree(folder, building, dirs_exist_ok=True)
    first = folder.stat().st_ino
    prepared_cache.publish(building, folder)
    assert folder.stat().st_ino == first


def test_plan_does_not_use_prepared_data_of_another_key(data, tokenizer) -> None:
    """A pointer that verifies leads to no other folder."""
    prepared, model = preparation.prepare(data, tokenizer, 0, None), Model(name=str(MODEL))
    files = dataset_estimate.tokenizer_files(model)
    assert prepared.path
    prepared_cache.remember(data, 0, model, files, prepared.path)
    (pointer,) = (Path(data.cache_dir or "") / "recipes").iterdir()
    pointer.write_text(verified_files.signed({"recipe": pointer.name, "key": "../../elsewhere"}))
    rows = dataset_estimate.rows_of(data, model, 1, 0)
    assert rows and "the plan ignores the prepared data, because" in rows.how


def test_plan_does_not_use_prepared_data_of_another_template_for_tools(data, tokenizer, tmp_path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    template = folder / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ messages }}")
    prepared, model = preparation.prepare(data, tokenizer, 0, None), Model(name=str(folder))
    assert prepared.path
    prepared_cache.remember(data, 0, model, model_files.tokenizer_files(model), prepared.path)
    assert prepared_cache.recall(data, 0, model, model_files.tokenizer_files(model)) == prepared.path
    template.write_text("{{ messages }}{{ tools }}")
    assert prepared_cache.recall(data, 0, model, model_files.tokenizer_files(model)) is None


def fill_cache(cache: Path, data: Path) -> dict[str, Callable[[], tuple[Any, str]]]:
    """Fill a cache folder with each kind of file; returns a reader of each: its result, and its note."""
    recipe = load(str(QUICKSTART), [f"data.name={data}", f"model.name={MODEL}", "data.validation=null"])
    config = AutoConfig.for_model("stablelm", hidden_size=32, num_hidden_layers=1, intermediate_size=64)
    config.save_pretrained(cache.parent / "model")
    path, widths = cache.parent / "model" / "config.json", Widths(64, 128, 64, 96, 1, 100)
    rates = {"product": 1e12, "forward": 1e12, "backward": 1e12, "bandwidth": 1e11, "layer": 1e12}
    held = {"device": "CPU", "torch": "2", "date": "2026-01-01", "shapes": "hidden 64, intermediate 128"}
    file = measured_rates.file_of("CPU", widths)

    def write_rates() -> None:
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(verified_files.signed({"of": file.name, **held, **rates}))

    def rows() -> tuple[Any, str]:
        prepared = load_data.prepare_data(recipe)[1]
        return content(prepared), "; ".join(prepared.report["train"].notes)

    def plan() -> tuple[Any, str]:
        dataset_estimate._prepared_rows.cache_clear()
        prepared_cache.reports.cache_clear()
        found = dataset_estimate.rows_of(recipe.data, recipe.model, 1, recipe.train.seed)
        load_data.prepare_data(recipe)  # which writes it anew
        return None, found.how if found and found.how != "prepared data" else ""

    def names() -> tuple[Any, str]:
        found = module_lists.read(path, architecture.config_in(path))
        return found.names, found.note

    def measured() -> tuple[Any, str]:
        found, said = measured_rates.read_for("CPU", widths)
        if said:  # `doctor --measure` writes it anew
            write_rates()
        return (None if said else found), said

    write_rates()
    readers = {"rows": rows, "recipes": plan, "modules": names, "ceilings": measured}
    for read in readers.values():
        read()
    return readers


@pytest.mark.parametrize("count", [1, pytest.param(40, marks=pytest.mark.soak)])
def test_flipped_byte_in_each_file_of_a_cache_is_found(tmp_path, monkeypatch, count: int) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    lines = (DATA / "train.jsonl").read_text().splitlines()[:12]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    readers = fill_cache(tmp_path / "cache", tmp_path / "a.jsonl")
    whole = {kind: read() for kind, read in readers.items()}
    assert not any(said for _, said in whole.values())
    files = [path for path in sorted((tmp_path / "cache").rglob("*")) if path.is_file()]
    kinds = [path.parent.name if path.parent.name in readers else "rows" for path in files]
    assert set(kinds) == readers.keys() and len(files) == 5, "every file of the cache is tried"
    for path, kind in zip(files, kinds, strict=True):
        for offset in offsets(path.stat().st_size, count):
            flip(path, offset, random.Random(offset).choice([1, 32, 128]))
            found, said = readers[kind]()
            assert said, (path, offset)
            assert found in (whole[kind][0], None), (path, offset)
            assert readers[kind]() == whole[kind], f"{path} is as it was, and nothing is said again"


def test_run_on_a_damaged_cache_has_the_losses_of_the_first_one(train, tmp_path, capsys) -> None:
    cache = tmp_path / "cache"
    first = train(f"data.cache_dir={cache}", name="first")
    rows = entry(cache) / "rows.arrow"
    flip(rows, rows.stat().st_size // 2)
    second = train(f"data.cache_dir={cache}", name="second")
    losses = [[step["loss"] for step in run.steps()] for run in (first, second)]
    assert losses[0] == losses[1]
    assert "was damaged" in json.dumps(second.read("data_report.json"))


def test_run_resumed_on_a_damaged_cache_is_the_run_that_was_not_stopped(train, tmp_path) -> None:
    given = ["train.max_steps=4", "train.logging_steps=1", "adapter.lora_dropout=0.1", "eval.generate=false"]
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    whole = train(*given, cache, name="whole")
    train(*given, cache, "--until=2", name="stopped", code=75)
    rows = entry(tmp_path / "cache") / "rows.arrow"
    flip(rows, rows.stat().st_size // 2)
    resumed = train(*given, cache, "--resume", name="stopped")
    assert [step["loss"] for step in resumed.steps()] == [step["loss"] for step in whole.steps()]
    weights = [(run.adapter / "adapter_model.safetensors").read_bytes() for run in (whole, resumed)]
    assert weights[0] == weights[1]
    assert "was damaged" in (resumed.path / "log.txt").read_text()


@pytest.mark.alone
def test_verification_reads_a_gigabyte_per_second(tmp_path) -> None:
    path = tmp_path / "rows.arrow"
    path.write_bytes(os.urandom(2**20) * 128)
    stated, started = verified_files.describe(path), time.perf_counter()
    verified_files.verify(path, stated)
    assert path.stat().st_size / (time.perf_counter() - started) > 1e9


@pytest.fixture
def unprivileged(tmp_path) -> Iterator[None]:
    """Root may write everywhere; this test is another user than the one who owns `tmp_path`."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    closed = [place for place in (tmp_path, *tmp_path.parents) if not place.stat().st_mode & 0o001]
    modes = {place: place.stat().st_mode for place in closed}
    for place in closed:
        place.chmod(modes[place] | 0o011)
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)
    for place, mode in modes.items():
        place.chmod(mode)


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_prepared_data_has_the_permissions_of_the_umask(data, tokenizer, umask: int) -> None:
    before = os.umask(umask)
    try:
        preparation.prepare(data, tokenizer, 0, None)
    finally:
        os.umask(before)
    folder = entry(data.cache_dir)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask}


def prepared_by_nobody(data: Data, tokenizer, mode: int) -> Path:
    """Prepared data that another user owns, in a folder with these permissions."""
    preparation.prepare(data, tokenizer, 0, None)
    folder = entry(data.cache_dir)
    for path in (folder, *folder.iterdir()):
        os.chown(path, NOBODY - 1, NOBODY - 1)
    folder.parent.chmod(mode)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_data_of_another_user_is_used_with_a_note(data, tokenizer) -> None:
    prepared_by_nobody(data, tokenizer, 0o2775)
    found = preparation.prepare(data, tokenizer, 0, None)
    assert found.cached and f"user {NOBODY - 1} prepared the data" in found.report["train"].notes[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_data_of_another_user_is_not_used_where_everybody_may_write(data, tokenizer) -> None:
    prepared_by_nobody(data, tokenizer, 0o1777)
    with pytest.raises(UserError, match="everybody can write") as raised:
        preparation.prepare(data, tokenizer, 0, None)
    assert raised.value.code == 2 and "data.cache_dir" in str(raised.value)


@pytest.mark.parametrize("hidden", ["folder", "report.json", "rows.arrow"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_data_that_another_user_does_not_share_is_not_damaged(hidden: str, data, tokenizer, request) -> None:
    """As with umask 077, which is usual on clusters. It may be replaced by nobody."""
    folder = prepared_by_nobody(data, tokenizer, 0o2777)
    path = folder if hidden == "folder" else folder / hidden
    path.chmod(0o700)
    request.getfixturevalue("unprivileged")
    with pytest.raises(UserError, match="may not read the prepared data of another user") as raised:
        preparation.prepare(data, tokenizer, 0, None)
    assert raised.value.code == 2 and "data.cache_dir" in str(raised.value)
    assert [one.name for one in folder.parent.iterdir() if "damaged" in one.name] == []


def test_whole_data_in_a_folder_that_cannot_be_written_is_used(data, tokenizer, tmp_path, request) -> None:
    whole = content(preparation.prepare(data, tokenizer, 0, None))
    request.getfixturevalue("unprivileged")
    found = preparation.prepare(data, tokenizer, 0, None)
    assert found.cached and content(found) == whole
    prepared_cache.remember(data, 0, Model(name=str(MODEL)), [], entry(data.cache_dir))
    assert not (Path(data.cache_dir or "") / "recipes").exists()


def test_damaged_data_that_cannot_be_replaced_is_an_error(data, tokenizer, tmp_path, request) -> None:
    preparation.prepare(data, tokenizer, 0, None)
    flip(entry(data.cache_dir) / "rows.arrow", 100)
    request.getfixturevalue("unprivileged")
    with pytest.raises(UserError, match="can't write to the cache") as raised:
        preparation.prepare(data, tokenizer, 0, None)
    assert raised.value.code == 2 and "data.cache_dir" in str(raised.value)


@pytest.mark.parametrize("name", ("link to nothing", "loop", "bytes\udcff", "existing\udcff"))
def test_cache_that_no_data_can_be_in_is_refused_by_check_and_train(
    name: str, data, tokenizer, tmp_path
) -> None:
    folder = tmp_path / name
    if name == "link to nothing":
        folder.symlink_to(tmp_path / "nothing")
    elif name == "loop":
        folder.symlink_to(folder)
    elif name.startswith("existing"):
        folder.mkdir()
    elsewhere = data.model_copy(update={"cache_dir": str(folder)})
    for use in (prepared_cache.check_makeable, lambda data: preparation.prepare(data, tokenizer, 0, None)):
        with pytest.raises(UserError, match="can't write to the cache"):
            use(elsewhere)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_damaged_data_of_another_user_in_a_sticky_folder_is_an_error(data, tokenizer, request) -> None:
    folder = prepared_by_nobody(data, tokenizer, 0o1775)
    os.chown(folder.parent, 0, NOBODY)
    folder.parent.chmod(0o1775)
    flip(folder / "rows.arrow", 100)
    groups = os.getgroups()
    request.getfixturevalue("unprivileged")
    os.seteuid(0)
    os.setgroups([NOBODY])
    os.seteuid(NOBODY)
    try:
        with pytest.raises(UserError, match="can't replace damaged data") as raised:
            preparation.prepare(data, tokenizer, 0, None)
        assert raised.value.code == 2 and f"rm -r {folder}" in str(raised.value)
    finally:
        os.seteuid(0)
        os.setgroups(groups)
        os.seteuid(NOBODY)
