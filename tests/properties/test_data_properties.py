"""What holds for any chats and any lengths: masks are exact, packing neither loses nor invents a token."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from accelerate import PartialState
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader, skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from finetune.checkpointing import checkpoints
from finetune.data import chat_templates, encoding, source_loading
from finetune.data.arrow_store import Documents
from finetune.data.encoding import Encoded
from finetune.data.examples import BadRow, Example, Row
from finetune.data.formats import convert, detect
from finetune.data.packing import best_fit
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe import loader
from finetune.recipe.schema import Data, Model, Source
from finetune.run_folder import settings_text
from finetune.training import launch_checks
from support.paths import MODEL

END = "<|im_end|>"
AWKWARD = [
    END,
    "<|im_start|>assistant\n",
    "<|endoftext|>",
    "🦙",
    "👩‍👩‍👧",
    "e\u0301",
    "\u200d",
    "\r\n",
    "  ",
    "\t",
    "{%",
]
texts = st.lists(st.one_of(st.text(max_size=12), st.sampled_from(AWKWARD)), min_size=1, max_size=5).map(
    "".join
)
said = texts.filter(str.strip)
turns = st.lists(st.tuples(said, said), min_size=1, max_size=4)
chats = st.tuples(st.one_of(st.none(), said), turns)
few = settings(deadline=None, max_examples=60)

documents = st.lists(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12).flatmap(
        lambda ids: st.tuples(st.just(ids), st.integers(0, len(ids)), st.integers(0, len(ids)))
    ),
    min_size=1,
    max_size=30,
)


@cache
def encoder() -> encoding.Encoder:
    tokenizer: Any = load_tokenizer(Model(name=str(MODEL)), chat_templates.read_template("chatml"))
    return encoding.make_encoder(tokenizer, Data(name="-"), chats=True)


def value(system: str | None, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """A row."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    for asked, answered in pairs:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {"messages": messages}


def example(row: Row) -> Example:
    data = Data(name="-")
    return convert(row, data, detect(row, data))


def encoded(examples: list[Example]) -> list[Encoded]:
    found = encoder()(examples)
    return [row for row in found if not isinstance(row, BadRow)]


@few
@given(chats)
def test_what_is_trained_on_is_each_answer_with_its_end_and_nothing_else(parts: Any) -> None:
    system, pairs = parts
    (row,) = encoded([example(Row(value(system, pairs), "a:1"))])
    labels, tokenizer = row.labels(), encoder().tokenizer
    assert len(labels) == len(row.ids)
    assert all(label in (own, -100) for label, own in zip(labels, row.ids, strict=True))
    assert [tokenizer.decode(row.ids[start:end]) for start, end in row.trained] == [a + END for _, a in pairs]
    assert sum(label != -100 for label in labels) == sum(end - start for start, end in row.trained)
    begins = f"<|im_start|>system\n{system}{END}\n" if system is not None else ""
    whole = [f"<|im_start|>user\n{a}{END}\n<|im_start|>assistant\n{b}{END}\n" for a, b in pairs]
    assert tokenizer.decode(row.ids) == begins + "".join(whole) and not row.merged


@few
@given(st.lists(chats, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_order_of_rows_gives_the_same_rows(rows: list[Any], shuffler: random.Random) -> None:
    """What the rows of one batch begin with is tokenized once for all: that must change none of them."""
    examples = [example(Row(value(*row), "a:1")) for row in rows]
    shuffled = shuffler.sample(examples, len(examples))
    one_by_one = [encoded([row])[0] for row in examples]
    counts = [
        Counter((tuple(row.ids), tuple(row.trained)) for row in found)
        for found in (encoded(examples), encoded(shuffled), one_by_one)
    ]
    assert counts[0] == counts[1] == counts[2] and counts[0].total() == len(rows)


@few
@given(st.lists(chats, min_size=1, max_size=5), st.booleans(), st.sampled_from([".jsonl", ".json"]))
def test_rows_that_are_written_and_read_again_are_the_same_examples(
    rows: list[Any], ascii_only: bool, suffix: str
) -> None:
    direct = [example(Row(value(*row), f"{n}")) for n, row in enumerate(rows)]
    dumped = [json.dumps(value(*row), ensure_ascii=ascii_only) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows{suffix}"
        content = "\n".join(dumped) if suffix == ".jsonl" else f"[{', '.join(dumped)}]"
        path.write_text(content + "\n", encoding="utf-8", newline="")
        found = list(source_loading.training(Data(name="-"), Source(name=str(path)), set(), 0))
    again = [example(row) for row in found if isinstance(row, Row)]
    assert [(e.messages, e.trained, e.digest()) for e in again] == [
        (e.messages, e.trained, e.digest()) for e in direct
    ]


@few
@given(chats, st.integers(8, 80))
def test_a_row_that_is_shortened_fits_and_keeps_its_answers_and_system_message(
    parts: Any, limit: int
) -> None:
    whole = example(Row(value(*parts), "a:1"))
    before = encoded([whole])[0]
    shorter = encoder().shortened(whole, before, limit)
    if shorter is None:
        assert len(before.ids) > limit
        return
    decode = encoder().tokenizer.decode
    assert len(shorter.ids) <= limit and shorter.cut == len(before.ids) - len(shorter.ids)
    assert [decode(shorter.ids[a:b]) for a, b in shorter.trained] == [answer + END for _, answer in parts[1]]
    if parts[0] is not None:
        assert decode(shorter.ids).startswith(f"<|im_start|>system\n{parts[0]}{END}\n")
    if len(before.ids) <= limit:
        assert shorter == before


def shortened(row: Example, limit: int) -> Encoded | None:
    return encoder().shortened(row, encoded([row])[0], limit)


def test_long_prompts_are_cut_to_fit_and_too_long_answers_are_not() -> None:
    row = example(Row(value(None, [("word " * 50 + "who?", "Maria."), ("When?", "Now.")]), "a:1"))
    for limit in (40, 60, 90):
        found = shortened(row, limit)
        assert found and len(found.ids) <= limit and "who?" in encoder().tokenizer.decode(found.ids)
    assert shortened(example(Row(value(None, [("a", "word " * 50)]), "a:1")), 40) is None
    asked = Example("a:1", prompt="word " * 19 + "word", completion=" Maria did.")
    found = shortened(asked, 20)
    assert found and len(found.ids) == 20 and found.cut == len(encoded([asked])[0].ids) - 20
    assert encoder().tokenizer.decode([i for i in found.labels() if i != -100]) == f" Maria did.{END}"
    rest = len(encoded([Example("a:1", prompt="", completion=" Maria did.")])[0].ids)
    assert shortened(asked, rest) is None and shortened(asked, rest + 1)


def first_fit(lengths: list[int], budget: int) -> int:
    """Rows that the simplest way to pack needs."""
    rooms: list[int] = []
    for length in lengths:
        index = next((i for i, room in enumerate(rooms) if room >= length), None)
        if index is None:
            rooms.append(budget - length)
        else:
            rooms[index] -= length
    return len(rooms)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 60).flatmap(lambda b: st.tuples(st.just(b), st.lists(st.integers(1, b), max_size=60))))
def test_packing_uses_every_document_once_within_the_budget(case: tuple[int, list[int]]) -> None:
    budget, lengths = case
    rows = best_fit(lengths, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < total <= budget for total in filled)
    assert sum(sorted(filled)[:2]) > budget or len(rows) < 2, "no two rows would go into one"
    assert len(rows) <= 11 / 9 * first_fit(lengths, budget) + 1, "the bound that is proved"


def test_packing_fills_rows_better_than_first_fit() -> None:
    """Of lengths as instructions have them; there are contrived ones where a lucky order wins."""
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [min(512, max(1, round(draw.lognormvariate(4.3, 0.8)))) for _ in range(400)]
        rows = best_fit(lengths, 512)
        assert len(rows) <= first_fit(lengths, 512)
        assert sum(lengths) / (len(rows) * 512) > 0.97


@few
@given(documents, st.integers(12, 40), st.booleans())
def test_documents_come_out_of_their_files_as_they_went_in(
    parts: list[tuple[list[int], int, int]], budget: int, packed: bool
) -> None:
    given_in = [Encoded(ids, [(min(a, b), max(a, b))], cut=a) for ids, a, b in parts]
    lengths = [len(document.ids) for document in given_in]
    groups = best_fit(lengths, budget) if packed else [[index] for index in range(len(given_in))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Documents(folder)
        for number, document in enumerate(given_in):
            store.add(document, f"a:{number}")
        store.close()
        assert [store.place(n) for n in range(len(given_in))] == [f"a:{n}" for n in range(len(given_in))]
        order, counts = np.concatenate([np.array(group) for group in groups]), np.array([*map(len, groups)])
        store.write_rows(folder / "rows.arrow", order, counts, packed)
        store.remove()
        assert [path.name for path in folder.iterdir()] == ["rows.arrow"]
        rows = pyarrow.ipc.open_stream((folder / "rows.arrow").read_bytes()).read_all().to_pylist()
    assert len(rows) == len(groups)
    for row, group in zip(rows, groups, strict=True):
        assert row["input_ids"] == [token for index in group for token in given_in[index].ids]
        labels = [[-100, *given_in[index].labels()[1:]] for index in group]
        assert row["labels"] == [label for document in labels for label in document]
        assert row["where"] == [f"a:{index}" for index in group]
        assert row["cut"] == [given_in[index].cut for index in group]
        assert row.get("seq_lengths", []) == ([lengths[index] for index in group] if packed else [])


@given(rows=st.integers(1, 80), batch=st.integers(1, 5), shards=st.integers(1, 4))
def test_rows_that_an_epoch_repeats_are_counted(rows: int, batch: int, shards: int) -> None:
    """Processes get equally many full batches, every row at least once; the run check counts the repeats."""
    sampler = BatchSampler(range(rows), batch, drop_last=False)
    parts = [list(BatchSamplerShard(sampler, shards, index)) for index in range(shards)]
    given_out = [row for part in parts for one in part for row in one]
    assert set(given_out) == set(range(rows)) and len({len(part) for part in parts}) == 1
    if shards > 1:
        assert len(given_out) - rows == launch_checks.count_repeated(rows, batch, shards)


@few
@given(
    rows=st.integers(1, 60), batch=st.integers(1, 4), shards=st.integers(1, 4), epoch=st.integers(0, 3),
    stop=st.integers(0, 60),
)  # fmt: skip
def test_wherever_an_epoch_is_resumed_each_row_is_had_once(
    rows: int, batch: int, shards: int, epoch: int, stop: int
) -> None:
    """By any number of processes, but for the rows that fill up its end."""
    PartialState(cpu=True)

    def loader(index: int) -> Any:
        data: Any = list(range(rows))
        plain = DataLoader(data, batch, sampler=RandomSampler(data, generator=torch.Generator()))
        given = {"num_processes": shards, "process_index": index, "put_on_device": False}
        made = prepare_data_loader(plain, use_seedable_sampler=True, data_seed=7, **given)
        made.set_epoch(epoch)
        return made

    whole = [[part.tolist() for part in loader(index)] for index in range(shards)]
    stop = min(stop, len(whole[0]))
    after = [[part.tolist() for part in skip_first_batches(loader(index), stop)] for index in range(shards)]
    assert [one[stop:] for one in whole] == after
    given_out = Counter(row for one in whole for part in one for row in part)
    assert set(given_out) == set(range(rows))
    twice = launch_checks.count_repeated(rows, batch, shards) if shards > 1 else 0
    assert given_out.total() - rows == twice


TEXT = st.text(st.characters(codec="utf-8", max_codepoint=0xFFFF), max_size=12)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "adapter.r": st.integers(1, 512),
    "adapter.lora_alpha": st.integers(1, 10**6),
    "adapter.lora_dropout": st.floats(0, 1, exclude_max=True),
    "adapter.target_modules": st.lists(st.sampled_from(["q_proj", "v_proj", "down_proj"]), min_size=1),
    "adapter.rank_pattern": st.dictionaries(
        st.text("abz_.0:#- '\"", min_size=1, max_size=12), st.integers(1, 64), max_size=3
    ),
    "data.name": TEXT.map(lambda text: f"a{text}.jsonl".replace("\0", "")),
    "data.train_on": st.sampled_from(["assistant", "all"]),
    "train.learning_rate": st.floats(1e-30, 10),
    "train.run_name": TEXT,
    "train.seed": st.integers(0, 2**32 - 1),
    "train.max_steps": st.none() | st.integers(1, 10**9),
    "train.lr_scheduler_kwargs": st.just({}),  # what else stands there is held against the schedule
}


@few
@given(st.fixed_dictionaries({}, optional=VALUES), st.sampled_from(["lora", "dora"]))
def test_a_recipe_that_is_written_and_read_again_is_the_same(values: dict[str, Any], kind: str) -> None:
    content: dict[str, Any] = {"model": {"name": "a"}, "data": {"name": "b.jsonl"}, "adapter": {"type": kind}}
    for dotted, given_value in values.items():
        section, _, key = dotted.partition(".")
        content.setdefault(section, {})[key] = given_value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(json.dumps(content))
        loaded = loader.load(path)
        for dotted, given_value in values.items():
            section, _, key = dotted.partition(".")
            assert getattr(getattr(loaded, section), key) == given_value
        path.write_text(settings_text.resolved_yaml(loaded, {}), encoding="utf-8")
        again = loader.load(path)
        assert again.model_dump() == loaded.model_dump()
        second = settings_text.resolved_yaml(again, {}).splitlines()
        first = path.read_text(encoding="utf-8").splitlines()
    assert [line.partition("  # ")[0] for line in second] == [line.partition("  # ")[0] for line in first]


@settings(deadline=None, max_examples=25)
@given(st.none() | st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_whatever_is_rotated_away_the_newest_checkpoints_stay_and_verify(
    limit: int | None, gaps: list[int]
) -> None:
    steps = list(accumulate(gaps))
    with tempfile.TemporaryDirectory() as folder:
        writer = checkpoints.Writer(Path(folder), limit)
        for count, step in enumerate(steps, start=1):
            writer.start(
                step, {"weights.safetensors": {"a": torch.ones(4)}, checkpoints.CONTRACT: {"recipe": {}}}
            )
            writer.wait()
            kept = checkpoints.published(Path(folder))
            wanted = steps[:count][::-1][:limit]
            assert [path.name for path in kept] == [f"step-{number}" for number in wanted]
            for path in kept:
                checkpoints.verify(path)
        writer.close()
