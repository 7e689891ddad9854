"""From rows to labels: which tokens carry loss, and what becomes of each row."""

import pytest
from conftest import DATA, MODEL

from finetune.data import chat, load
from finetune.data.load import Row, Split
from finetune.errors import UserError
from finetune.model import load_tokenizer
from finetune.recipe import Data, Model

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who came?"},
    {"role": "assistant", "content": "Maria did."},
    {"role": "user", "content": "And who left?"},
    {"role": "assistant", "content": "Omar."},
]
ROW = Row({"messages": TURNS}, "rows.jsonl:1")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Model(name=str(MODEL)))


def trained_text(encoder: chat.Encoder, row: Row) -> str:
    ids, labels = encoder(row)
    assert len(ids) == len(labels) and all(label in (i, -100) for i, label in zip(ids, labels, strict=True))
    return encoder.tokenizer.decode([label for label in labels if label != -100])


def test_the_assistant_s_words_and_its_end_of_turn_are_trained(tokenizer) -> None:
    encoder = chat.make_encoder(tokenizer, Data(name="-"), "messages")
    assert trained_text(encoder, ROW) == "Maria did.<|im_end|>Omar.<|im_end|>"


def test_turn_by_turn_finds_the_same_tokens_as_the_template_s_marks(tokenizer) -> None:
    """Two ways to one mask: a template with its marks taken out must give what the marks gave."""
    marked = chat.make_encoder(tokenizer, Data(name="-"), "messages")
    derived = chat.Encoder(tokenizer, "assistant", by_turns=True)
    for row in [ROW, *load.read(Data(name=str(DATA / "test.jsonl")), 0)[0][:50]]:
        ids, labels = marked(row)
        again, derived_labels = derived(row)
        assert again == ids
        # a template may write a line break after the turn's end: without marks it counts as the turn's
        pairs = zip(labels, derived_labels, strict=True)
        newline = tokenizer("\n")["input_ids"]
        assert all(a == b or (a == -100 and [b] == newline) for a, b in pairs)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen2_5", "gemma", "phi3"])
def test_templates_without_marks_that_trl_knows(name: str, tokenizer, tmp_path) -> None:
    from importlib.resources import files

    stock = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    (tmp_path / "t.jinja").write_text(stock)
    loaded = load_tokenizer(Model(name=str(MODEL)), str(tmp_path / "t.jinja"))
    encoder = chat.make_encoder(loaded, Data(name="-"), "messages")
    turns = [turn for turn in TURNS if turn["role"] != "system"]
    text = trained_text(encoder, Row({"messages": turns}, "-"))
    assert "Maria did." in text and "Omar." in text and "Who" not in text
    assert loaded.chat_template == stock, "the tokenizer that is saved keeps its own template"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path) -> None:
    template = "{{ messages | length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    loaded = load_tokenizer(Model(name=str(MODEL)), str(tmp_path / "t.jinja"))
    encoder = chat.make_encoder(loaded, Data(name="-"), "messages")
    with pytest.raises(UserError, match="neither marks"):
        encoder(ROW)


def test_no_template_at_all_is_an_error_for_chats_only(tokenizer) -> None:
    bare = load_tokenizer(Model(name=str(MODEL)))
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        chat.make_encoder(bare, Data(name="-"), "messages")
    encoder = chat.make_encoder(bare, Data(name="-"), "prompt_completion")
    assert trained_text(encoder, Row({"prompt": "a b", "completion": " c"}, "-")).startswith(" c<|")


def test_train_on_all_trains_every_token(tokenizer) -> None:
    encoder = chat.make_encoder(tokenizer, Data(name="-", train_on="all"), "messages")
    ids, labels = encoder(ROW)
    assert ids == labels


def test_a_prompt_is_the_beginning_of_its_conversation(tokenizer) -> None:
    encoder = chat.make_encoder(tokenizer, Data(name="-"), "messages")
    ids, labels = encoder(ROW)
    prompt = encoder.prompt(ROW)
    assert ids[: len(prompt)] == prompt and labels[len(prompt)] != -100


def test_every_row_is_accounted_for(tokenizer) -> None:
    rows = [ROW, Row({"messages": [*TURNS[:1], {"role": "user", "content": "x " * 300}, TURNS[2]]}, "-")]
    rows.append(Row({"messages": [{"role": "assistant", "content": ""}]}, "-"))
    split = Split()
    encoded = chat.encode(rows, Data(name="-", max_length=100), tokenizer, split)
    assert (split.rows, split.kept, split.too_long) == (3, len(encoded), 1)
    assert split.kept + split.too_long + split.nothing_trained == split.rows
    assert split.tokens == sum(len(row["input_ids"]) for row in encoded)
    with pytest.raises(UserError, match="too long"):
        chat.encode(rows, Data(name="-", max_length=100, too_long="error"), tokenizer, Split())


def test_the_held_out_share_is_drawn_once_and_disjoint() -> None:
    data = Data(name=str(DATA / "test.jsonl"), validation_fraction=0.1)
    train, held_out, hashes = load.read(data, seed=3)
    assert (len(train), len(held_out)) == (270, 30)
    assert not {row.where for row in train} & {row.where for row in held_out}
    assert [row.where for row in load.read(data, seed=3)[1]] == [row.where for row in held_out]
    assert [row.where for row in load.read(data, seed=4)[1]] != [row.where for row in held_out]
    assert len(hashes) == 1


def test_files_folders_globs_and_lists(tmp_path) -> None:
    line = '{"prompt": "a", "completion": "b"}\n'
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(line * 2)
    (tmp_path / "c.json").write_text(f"[{line}, {line}, {line}]")
    for name, count in (
        (str(tmp_path), 7),
        (str(tmp_path / "*.jsonl"), 4),
        ([str(tmp_path / "a.jsonl"), str(tmp_path / "c.json")], 5),
    ):
        assert len(load.read(Data(name=name), 0)[0]) == count
    assert load.files("HuggingFaceH4/no_robots", "data.name") is None
