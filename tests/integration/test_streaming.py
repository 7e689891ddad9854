"""Streaming: every row once over ranks and workers, in an order that the seed alone decides, resumable."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from finetune.cli import main
from finetune.core.errors import Problem, UserError
from finetune.data import example_errors, streaming
from finetune.data.examples import Row
from finetune.data.read_limits import DEFAULT
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.schema import Data, Expect, Model
from finetune.run_folder.run_folder import RunFolder
from support import two_ranks
from support.paths import DATA, MODEL, QUICKSTART
from support.runs import metrics, run_checks
from support.soak import soak_except

LINES = (DATA / "test.jsonl").read_text().splitlines()[:70]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Model(name=str(MODEL)))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two JSONL files and a JSON one, 70 rows in all."""
    (tmp_path / "a.jsonl").write_text("\n".join(LINES[:40]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(LINES[40:60]))
    (tmp_path / "c.json").write_text(json.dumps([json.loads(line) for line in LINES[60:]]))
    return [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.json")]


def opened(files: list[str], tokenizer, seed: int = 0, **more):
    return streaming.stream(Data(name=files, streaming=True, **more), tokenizer, seed, None, passes=1).train


def seen(rows) -> Counter:
    """How often each document was seen, by its tokens."""
    found: Counter = Counter()
    for row in rows:
        start = 0
        for length in row.get("seq_lengths", [len(row["input_ids"])]):
            found[tuple(row["input_ids"][start : start + length])] += 1
            start += length
    return found


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("ranks", soak_except([2, 8], [1, 2, 3, 8]))
def test_every_row_exactly_once_over_ranks(packing: bool, ranks: int, files, tokenizer) -> None:
    data = opened(files, tokenizer, packing=packing, max_length=512, shuffle_buffer=7)
    everything = seen(data)
    assert sum(everything.values()) == 70
    shares = [seen(data.shard(num_shards=ranks, index=rank)) for rank in range(ranks)]
    assert sum(shares, Counter()) == everything


@pytest.mark.parametrize("workers", soak_except([2], [1, 2]))
def test_every_row_exactly_once_over_workers_of_two_ranks(workers: int, files, tokenizer) -> None:
    data = opened(files, tokenizer, shuffle_buffer=16)
    shares = []
    for rank in range(2):
        mine = data.shard(num_shards=2, index=rank)
        shares.append(seen(DataLoader(mine, batch_size=None, num_workers=workers)))
    assert sum(shares, Counter()) == seen(data)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=30), max_size=30
    ),
    ranges=st.integers(1, 40),
    end=st.sampled_from(["", "\n", "\n\n"]),
)
def test_ranges_of_bytes_share_the_lines(lines, ranges, end, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("ranges") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines) + end)
    size = path.stat().st_size
    cuts = [size * i // ranges for i in range(ranges + 1)]
    found = [row for a, b in pairwise(cuts) for row in streaming._lines(path, a, b, DEFAULT)]
    assert [row.value["text"] for row in found if isinstance(row, Row)] == lines


def test_the_seed_alone_decides_on_the_order(files, tokenizer) -> None:
    first, again, other = (
        [row["input_ids"] for row in opened(files, tokenizer, seed, shuffle_buffer=20)] for seed in (1, 1, 2)
    )
    assert first == again and first != other and sorted(first) == sorted(other)


@pytest.mark.parametrize("packing", soak_except([True], [False, True]))
def test_it_resumes_where_it_stopped(packing: bool, files, tokenizer) -> None:
    options = {"packing": packing, "max_length": 512, "shuffle_buffer": 9}
    whole = list(opened(files, tokenizer, **options))
    for stop in range(0, len(whole), 5):
        data = opened(files, tokenizer, **options)
        rows = iter(data)
        before = [next(rows) for _ in range(stop)]
        state = json.loads(json.dumps(data.state_dict()))
        resumed = opened(files, tokenizer, **options)
        resumed.load_state_dict(state)
        assert [*before, *resumed] == whole


def test_weights_repeat_a_source(files, tokenizer) -> None:
    names = [{"name": files[0], "weight": 2.0}, files[1]]
    data = Data.model_validate({"name": names, "streaming": True})
    found = seen(streaming.stream(data, tokenizer, 0, None, passes=1).train)
    assert Counter(found.values()) == {2: 40, 1: 20}


def test_what_is_streamed_is_known_by_name_size_and_both_ends(files, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK", 64)
    path = Path(files[0])
    whole, ends = path.read_bytes(), streaming._ends(path)
    content = streaming.stream(Data(name=files, streaming=True), tokenizer, 0, None, passes=1).content
    assert ends in json.dumps(content)
    for at, same in ((0, False), (63, False), (len(whole) // 2, True), (len(whole) - 1, False)):
        path.write_bytes(whole[:at] + b"-" + whole[at + 1 :])
        assert (streaming._ends(path) == ends) == same


def test_a_bad_row_beyond_the_audit_stops_the_run(files, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "AUDITED", 5)
    with Path(files[0]).open("a") as file:
        file.write('{"messages": 1}\n')
    data = opened(files, tokenizer, shuffle_buffer=10)
    with pytest.raises(UserError, match="`messages` must be a list"):
        list(data)


def test_a_line_that_can_t_be_read_beyond_the_audit_is_said_as_anywhere(
    files, tokenizer, monkeypatch
) -> None:
    monkeypatch.setattr(streaming, "AUDITED", 5)
    with Path(files[0]).open("a") as file:
        file.write("{'messages': 1}\n")
    with pytest.raises(UserError) as raised:
        list(opened(files, tokenizer, shuffle_buffer=10))
    (problem,) = raised.value.problems
    assert str(problem).count("error:") == 1 and problem.found == "{'messages': 1}"
    assert f"{files[0]}, byte " in problem.where and "json.dumps" in problem.fix
    assert (
        example_errors.shown(["a, byte 1", "a, byte 2", "b, byte 3"], 4) == "a, byte 1, byte 2, b, byte 3 ..."
    )


def test_a_row_whose_one_column_has_no_name_is_a_row(files, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "AUDITED", 5)
    with Path(files[0]).open("a") as file:
        file.write('{"": 5}\n')
    with pytest.raises(UserError, match="`messages` must be a list"):
        list(opened(files, tokenizer, shuffle_buffer=10))


@pytest.mark.parametrize(
    ("more", "phrase"),
    [
        ({"validation_fraction": 0.1}, "the number of examples is not known"),
        ({"name": [{"name": str(DATA / "test.jsonl"), "weight": 0.5}]}, "weights that are integers"),
        ({"name": "HuggingFaceH4/no_robots"}, "can't stream datasets of the Hub"),
    ],
)
def test_what_streaming_can_t_do(more: dict, phrase: str, tokenizer) -> None:
    data = Data.model_validate({"name": str(DATA / "test.jsonl"), "streaming": True, **more})
    with pytest.raises(UserError, match=phrase):
        streaming.stream(data, tokenizer, 0, None)


def test_a_run_on_streamed_rows(train, capsys) -> None:
    run = train(
        "data.streaming=true", "data.packing=true", "data.max_length=512", "train.effective_batch_size=2"
    )
    assert all(check["passed"] for check in run.read("checks.json"))
    assert len(metrics(run)) == 2 and run.read("eval.json")["tuned"]
    got = {check["option"]: check["actual"] for check in run.read("checks.json")}
    assert re.fullmatch(r"0 of [1-9]\d*", got["skipped examples of the stream"])
    assert "streamed" in json.dumps(run.read("data_report.json")["train"]["sources"])


def test_streaming_needs_a_number_of_steps(train, capsys) -> None:
    asked = ["data.streaming=true", "train.max_steps=null", "train.num_train_epochs=1"]
    train("data.streaming=true", "train.save_strategy=epoch", code=2)
    assert "train.save_strategy: the end of an epoch of streamed data is not known" in capsys.readouterr().err
    train(*asked, code=2)
    said = capsys.readouterr().err
    assert "train.max_steps: a run on streamed data needs a number of steps" in said
    assert main.main(["check", str(QUICKSTART), *asked, "--quiet"]) == 2
    assert capsys.readouterr().err == said


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_two_ranks_go_on_past_the_end_of_a_pass(tmp_path, two_layers) -> None:
    """Ranks have different numbers of rows: one that came to an end would keep the other waiting for ever."""
    lines = (DATA / "train.jsonl").read_text().splitlines()[:43]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    overrides = [f"data.name={tmp_path / 'rows.jsonl'}", "data.validation=null", "data.streaming=true"]
    overrides += ["data.packing=true", "data.max_length=256", "train.effective_batch_size=12"]
    overrides += ["train.per_device_train_batch_size=2", "train.max_steps=6", "train.warmup_steps=0"]
    overrides += ["eval.forgetting=false", f"model.name={two_layers}"]
    overrides += [f"train.output_dir={tmp_path / 'run'}", "--quiet"]
    two_ranks.run(one_rank, "train", "recipes/quickstart.yaml", *overrides)
    run = RunFolder(tmp_path / "run")
    assert len(metrics(run)) == 6 and run_checks(run)["processes"]["actual"] == "2"


@pytest.mark.parametrize(
    ("streaming", "says"),
    soak_except(
        ["true"],
        [
            ("true", "process 0 of 2 gets no example to train on"),
            ("false", "one step needs 2 sequences"),
        ],
    ),
)
def test_a_rank_without_a_row_is_an_error_of_all(streaming: str, says: str, tmp_path, two_layers) -> None:
    """It would end at its first step, and the other wait for it."""
    (tmp_path / "rows.jsonl").write_text((DATA / "train.jsonl").read_text().splitlines()[0] + "\n")
    overrides = [
        f"data.name={tmp_path / 'rows.jsonl'}",
        "data.validation=null",
        f"data.streaming={streaming}",
    ]
    overrides += ["train.effective_batch_size=2", "train.max_steps=2", "train.warmup_steps=0"]
    overrides += [f"model.name={two_layers}", f"train.output_dir={tmp_path / 'run'}", "--quiet"]
    said = two_ranks.run(refused, "train", "recipes/quickstart.yaml", *overrides)
    assert f"error: data.name: {says}" in said or f"error: train.effective_batch_size: {says}" in said
    assert said.count(says) == 2, "both ranks end with 2, and say why"
    assert not (tmp_path / "run").exists()


def test_a_row_for_each_rank_is_enough(files, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(list(opened(files, tokenizer)))
    (tmp_path / "one.jsonl").write_text(LINES[0] + "\n")
    with pytest.raises(UserError, match="of 2 gets no example") as raised:
        opened([str(tmp_path / "one.jsonl")], tokenizer)
    assert raised.value.code == 2


def test_an_error_in_a_loader_s_worker_is_still_a_message() -> None:
    """torch raises it again as text with the worker's traceback."""
    raised = UserError(Problem("content is empty", where="a.jsonl:3"))
    trace = f"Traceback:\nfinetune.core.errors.UserError: {raised}\n"
    text = f"Caught UserError in DataLoader worker process 0.\n{trace}"
    again = UserError(text)
    assert again.code == raised.code and "Caught" not in str(again) and "content is empty" in str(again)


def test_too_long_is_an_error_past_the_audit_too(files, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "AUDITED", 5)
    with Path(files[0]).open("a") as file:
        asked = '"user", "content": "'
        file.write(LINES[0].replace(asked, asked + "word " * 999))
    data = opened(files, tokenizer, too_long="error")
    with pytest.raises(UserError, match="too long"):
        list(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_left_out_past_the_audit_are_counted(workers: int, files, tokenizer, monkeypatch) -> None:
    """Of 70 rows, by each worker of a loader; what the audit reads does not count."""
    monkeypatch.setattr(streaming, "AUDITED", 5)
    data = Data(name=files, streaming=True, max_length=128, expect=Expect(dropped=1.0))
    made = streaming.stream(data, tokenizer, 0, None, passes=1)
    assert made.read.sum() == 0
    kept = sum(1 for _ in DataLoader(made.train, batch_size=None, num_workers=workers))
    read, left_out = made.read.sum(0).tolist()
    assert (read, read - left_out) == (70, kept) and 0 < left_out < 70


def test_sources_of_two_formats(files, tokenizer, tmp_path) -> None:
    alpaca = tmp_path / "alpaca.jsonl"
    alpaca.write_text(
        "".join(json.dumps({"instruction": f"{n}?", "output": f"{n}!"}) + "\n" for n in range(20))
    )
    found = streaming.stream(Data(name=[*files, str(alpaca)], streaming=True), tokenizer, 0, None, passes=1)
    assert set(found.report["train"].formats.values()) == {"messages", "alpaca"}
    assert sum(seen(found.train).values()) == 90


def one_rank(*command: str) -> None:
    assert main.main(list(command)) == 0


def refused(*command: str) -> None:
    assert main.main(list(command)) == 2
