"""The embedded model, its corpus and its task are what their README says."""

import json

from finetune.models import checkpoint_headers
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.schema import Model
from support.paths import DATA, MODEL


def test_pre_training_never_shows_the_task() -> None:
    """No sentence beside a record: the corpus's own check, and that this check can fail."""
    from examples.tiny_llama import corpus

    corpus.check(2000)
    row = json.loads((DATA / "train.jsonl").read_text().splitlines()[0])
    asked, record = (turn["content"] for turn in row["messages"])
    assert corpus.violation(f"{asked}\n{record}")


def test_the_task_is_made_again_to_the_byte(tmp_path, monkeypatch) -> None:
    from examples.tiny_llama import task

    before = {name: (DATA / name).read_bytes() for name in ("train.jsonl", "test.jsonl")}
    monkeypatch.setattr(task, "DATA", tmp_path, raising=True)
    task.main()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_prompt_is_a_prefix_of_its_conversation() -> None:
    tokenizer = load_tokenizer(Model(name=str(MODEL)))
    for line in (DATA / "test.jsonl").read_text().splitlines()[:100]:
        turns = json.loads(line)["messages"]
        whole = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
        prompt = tokenizer.apply_chat_template(turns[:-1], **options)["input_ids"]
        assert whole[: len(prompt)] == prompt


def test_the_model_is_small_and_in_bf16() -> None:
    from safetensors import safe_open

    assert (MODEL / "model.safetensors").stat().st_size <= 16e6
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 (not a dict)
    count = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    assert checkpoint_headers.tensors(MODEL) == shapes
    assert 3e6 <= count <= 8e6
