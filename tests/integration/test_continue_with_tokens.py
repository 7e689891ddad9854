"""Continue from an adapter that was trained after tokens were added: `check` names them and a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from support.paths import MODEL, QUICKSTART

TOKENS = ["<call>", "<end_call>"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
GIVEN = ["adapter.r=4", "adapter.lora_alpha=8", "adapter.target_modules=[q_proj]"]
ADDED = f"model.add_tokens={json.dumps(TOKENS)}"


def peft_adapter(base: Path, folder: Path, *, whole: bool, resize: bool = True, **options: Any) -> Path:
    """An adapter as PEFT's guides make it: tokens added, embeddings resized, trained, saved."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(TOKENS)
    if resize:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    adapted = get_peft_model(model, LoraConfig(**LORA, **options))
    adapted.save_pretrained(str(folder), save_embedding_layers=whole)
    tokenizer.save_pretrained(str(folder))
    return folder


def check(*overrides: str) -> int:
    return main.main(["check", str(QUICKSTART), *overrides, "--quiet"])


def test_check_of_embeddings_saved_whole_names_the_tokens_and_a_remedy_that_works(
    two_layers: Path, train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    source = peft_adapter(two_layers, tmp_path / "source", whole=True)
    given = [f"model.name={two_layers}", f"adapter.init_from={source}", *GIVEN]
    capsys.readouterr()
    for added in ([], [ADDED]):
        assert check(*given, *added) == 2
        said = capsys.readouterr().err
        assert "<call>, <end_call>" in said and "4,098 rows" in said and "merge_and_unload" in said
        train(*given, *added, code=2)
        assert capsys.readouterr().err == said
    base = AutoModelForCausalLM.from_pretrained(two_layers)
    base.resize_token_embeddings(4098, mean_resizing=False)
    merged: Any = PeftModel.from_pretrained(base, str(source))
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "merged")
    assert check(f"model.name={tmp_path / 'merged'}", *GIVEN) == 0


def test_check_of_trained_rows_names_the_list_and_training_continues_with_it(
    two_layers: Path, train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[str, Any] = {"trainable_token_indices": [4096, 4097]}
    source = peft_adapter(two_layers, tmp_path / "source", whole=False, **rows)
    given = [f"model.name={two_layers}", f"adapter.init_from={source}", *GIVEN]
    wrong = ([], ['model.add_tokens=["<call>"]'], [f"model.add_tokens={json.dumps([*TOKENS, '<more>'])}"])
    capsys.readouterr()
    for added in wrong:
        assert check(*given, *added) == 2
        said = capsys.readouterr().err
        assert f"model.add_tokens: {json.dumps(TOKENS)}" in said
        train(*given, *added, code=2)
        assert capsys.readouterr().err == said
    assert check(*given, ADDED) == 0
    train(*given, ADDED)
    (source / "tokenizer.json").unlink()
    assert check(*given) == 2 and "save the adapter's tokenizer.json" in capsys.readouterr().err


def test_check_of_an_own_adapter_with_tokens_asks_for_the_same_tokens(
    two_layers: Path, train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(f"model.name={two_layers}", ADDED, "train.max_steps=1", name="first")
    given = [f"model.name={two_layers}", f"adapter.init_from={run.path}"]
    for added in ([], [f"model.add_tokens={json.dumps([*TOKENS, '<more>'])}"]):
        assert check(*given, *added) == 2
        assert f"model.add_tokens: {json.dumps(TOKENS)}" in capsys.readouterr().err
    assert check(*given, ADDED) == 0


def test_check_notes_tokens_in_spare_rows_that_an_adapter_never_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = peft_adapter(MODEL, tmp_path / "source", whole=False, resize=False)
    given = [f"model.name={MODEL}", f"adapter.init_from={source}", *GIVEN]
    assert main.main(["check", str(QUICKSTART), *given]) == 0
    note = "did not train these tokens, and the base model lacks them: <call>, <end_call>"
    assert note in capsys.readouterr().out
