"""The serving check catches each fault that is planted in an export.

A fault is planted in the model before finetune writes it, or in the keys and tensors of the GGUF file. The
check expects the model without the fault.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.core.errors import Exit, UserError
from support import exports
from support.soak import soak_except

gguf: Any = pytest.importorskip("gguf", reason="needs the package gguf (the extra `export`)")

from finetune.export import gguf_export, gguf_families, gguf_file  # noqa: E402 (after importorskip)

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune.export.export_job import ExportJob


needs_quantizer = pytest.mark.skipif(
    shutil.which(gguf_export.QUANTIZER) is None, reason="needs llama.cpp's program llama-quantize"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ExportJob]:
    """`job(family)`: an export of a tiny model and what transformers answers, which is made once."""
    made: dict[str, ExportJob] = {}

    def found(family: str) -> ExportJob:
        if family not in made:
            folder = exports.model_of(family, tmp_path_factory.mktemp(family) / "model")
            made[family] = exports.job_of(folder, "f16")
        return made[family]

    return found


def written(job: ExportJob, folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """Write a GGUF file, with changed keys."""
    config: Any = job.config.get_text_config()
    family = gguf_families.family_of(config)
    folder.mkdir(exist_ok=True)
    with gguf_file.opened(job.source) as source:
        tensors = gguf_export.plan_tensors(list(source.files), config, family)
        entries = gguf_export.entries_of(job, family, gguf_export.rows_of(tensors, source))
        if change:
            change(entries)
        gguf_file.write(folder / "tiny.gguf", entries, tensors, source, job.quantize)
    return folder / "tiny.gguf"


def check(path: Path, job: ExportJob) -> None:
    """Run the whole check of a GGUF file: read it back, then the serving check."""
    config: Any = job.config.get_text_config()
    family = gguf_families.family_of(config)
    with gguf_file.opened(job.source) as source:
        tensors = gguf_export.plan_tensors(list(source.files), config, family)
        entries = gguf_export.entries_of(job, family, gguf_export.rows_of(tensors, source))
        entries["general.file_type"] = gguf_export.file_type(job.quantize)
        gguf_export.check_file(path, entries, tensors, source, job.quantize)
    gguf_export.check_serving(path, job)


def caught(path: Path, job: ExportJob) -> str:
    with pytest.raises(UserError) as raised:
        check(path, job)
    assert raised.value.code == Exit.ARTIFACT
    return str(raised.value)


def set_key(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda entries: entries.update({key: value})


def drop(*parts: str) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        for key in [key for key in entries if any(part in key for part in parts)]:
            del entries[key]

    return change


def swap_merges(entries: dict[str, Any]) -> None:
    merges = entries["tokenizer.ggml.merges"]
    entries["tokenizer.ggml.merges"] = merges[::-1]


TEMPLATE = "tokenizer.chat_template"
NO_SYSTEM = exports.CHATML.replace("{{", "{% if message['role'] != 'system' %}{{", 1).replace(
    "{% endfor %}", "{% endif %}{% endfor %}"
)
KEYS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    # fault -> family, change of the keys
    "another chat template": ("qwen2", set_key(TEMPLATE, exports.LLAMA3.replace("eot_id", "im_end"))),
    "system turn lost": ("qwen2", set_key(TEMPLATE, NO_SYSTEM)),
    "BOS twice": ("llama", set_key(TEMPLATE, "{{ bos_token }}" + exports.LLAMA3)),
    "BOS missing": (
        "llama",
        lambda e: e.update({TEMPLATE: exports.LLAMA3[15:], "tokenizer.ggml.add_bos_token": False}),
    ),
    "EOS missing": ("qwen2", drop("eos_token_id")),
    "wrong stop token": ("qwen2", set_key("tokenizer.ggml.eos_token_id", 0)),
    "wrong rope base": ("qwen2", set_key("qwen2.rope.freq_base", 10000.0)),
    "rope scaling lost": ("llama_linear", drop("rope.scaling")),
    "wrong norm epsilon": ("qwen2", set_key("qwen2.attention.layer_norm_rms_epsilon", 1e-2)),
    "another tokenizer merge order": ("qwen2", swap_merges),
}


@pytest.mark.parametrize("fault", KEYS)
def test_check_catches_a_fault_in_the_keys(fault: str, job: Any, tmp_path: Path) -> None:
    family, change = KEYS[fault]
    assert caught(written(job(family), tmp_path / "out", change), job(family))


def in_weights(change: Callable[[dict[str, torch.Tensor]], None], job: ExportJob, folder: Path) -> ExportJob:
    """The job with a copy of the model whose weights have a fault."""
    shutil.copytree(job.source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return replace(job, source=folder)


Q = "model.layers.0.self_attn.q_proj.weight"


def another_layer(weights: dict[str, torch.Tensor]) -> None:
    weights[Q] = weights[Q.replace("layers.0", "layers.1")].clone()


def adapter_of(times: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """Add an update of rank 1 `times` too often: -1 is an adapter that was not applied."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(3)
        rows, columns = weights[Q].shape
        weights[Q] = weights[Q] + times * 0.2 * torch.outer(torch.randn(rows), torch.randn(columns))

    return change


def untied(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(1, 0)


def one_token_less(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:-5].clone()


WEIGHTS: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "one tensor of another layer": another_layer,
    "adapter not applied": adapter_of(-1),
    "adapter applied twice": adapter_of(1),
    "adapter scaled wrongly": adapter_of(0.5),
    "tied head untied wrongly": untied,
}


ELSEWHERE = {  # fault -> the test that plants it
    "tokens added but embeddings not": "test_check_catches_missing_embeddings_of_added_tokens",
    "tied head written twice": "test_check_catches_a_tied_head_that_is_written_twice",
    "q/k permutation missing": "test_check_catches_queries_and_keys_that_are_not_in_pairs",
    "wrong quantization block": "test_check_catches_a_wrong_quantization_block",
    "truncated file": "test_check_catches_a_truncated_file",
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_check_catches_a_fault_in_the_weights(fault: str, job: Any, tmp_path: Path) -> None:
    right = job("llama_tied")
    wrong = in_weights(WEIGHTS[fault], right, tmp_path / "wrong")
    path = written(wrong, tmp_path / "out")
    assert caught(path, right)
    with pytest.raises(UserError, match="answers differently"):
        gguf_export.check_serving(path, right)  # also without a look at the tensors


def test_check_catches_missing_embeddings_of_added_tokens(job: Any, tmp_path: Path) -> None:
    right = job("llama_tied")
    wrong = in_weights(one_token_less, right, tmp_path / "wrong")
    config: Any = right.config.get_text_config()
    family = gguf_families.family_of(config)
    folder = tmp_path / "out"
    folder.mkdir()
    with gguf_file.opened(wrong.source) as source:
        tensors = gguf_export.plan_tensors(list(source.files), config, family)
        entries = gguf_export.entries_of(right, family, config.vocab_size)
        gguf_file.write(folder / "tiny.gguf", entries, tensors, source, "f16")
    assert "token_embd" in caught(folder / "tiny.gguf", right)


def test_check_catches_queries_and_keys_that_are_not_in_pairs(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(gguf_export, "in_pairs", lambda weight, heads: weight)
        path = written(job("llama_tied"), tmp_path / "out")
    assert "attn_q" in caught(path, job("llama_tied"))
    with pytest.raises(UserError, match="answers differently"):
        gguf_export.check_serving(path, job("llama_tied"))


def test_check_catches_a_tied_head_that_is_written_twice(job: Any, tmp_path: Path) -> None:
    right = job("llama_tied")
    config: Any = right.config.get_text_config()
    family = gguf_families.family_of(config)
    folder = tmp_path / "out"
    folder.mkdir()
    with gguf_file.opened(right.source) as source:
        tensors = gguf_export.plan_tensors(list(source.files), config, family)
        (head,) = (tensor for tensor in tensors if tensor.name == "token_embd.weight")
        entries = gguf_export.entries_of(right, family, config.vocab_size)
        both = [*tensors, head._replace(name="output.weight")]
        gguf_file.write(folder / "tiny.gguf", entries, both, source, "f16")
    assert "output.weight is too much" in caught(folder / "tiny.gguf", right)


def test_check_catches_a_wrong_quantization_block(job: Any, tmp_path: Path) -> None:
    right = replace(job("llama_tied"), quantize="q8_0")
    path = written(right, tmp_path / "out")
    reader = gguf.GGUFReader(path, "r+")
    (tensor,) = (one for one in reader.tensors if one.name == "blk.1.ffn_up.weight")
    tensor.data[3, :34] = tensor.data[3, 34:68]
    reader.data.flush()
    assert "blk.1.ffn_up" in caught(path, right)


@needs_quantizer
@pytest.mark.parametrize("kind", ["q6_k", "q4_k_m", "q2_k"])
def test_check_catches_a_wrong_block_of_k_quants(kind: str, tmp_path: Path) -> None:
    right = exports.job_of(exports.model_of("llama_wide", tmp_path / "model"), kind)
    (tmp_path / "out").mkdir()
    gguf_export.write(right, tmp_path / "out")
    path = tmp_path / "out" / f"tiny-{kind}.gguf"
    check(path, right)
    reader = gguf.GGUFReader(path, "r+")
    (tensor,) = (one for one in reader.tensors if one.name == "blk.1.ffn_up.weight")
    _, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    tensor.data[3, :size] = tensor.data[4, :size]
    reader.data.flush()
    assert "blk.1.ffn_up" in caught(path, right)


@pytest.mark.parametrize("share", [0.999, 0.5, 0.01])
def test_check_catches_a_truncated_file(share: float, job: Any, tmp_path: Path) -> None:
    path = written(job("llama_tied"), tmp_path / "out")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert caught(path, job("llama_tied"))


CLEAN = [(family, kind) for family in exports.FAMILIES for kind in ("f16", "bf16", "q8_0")]
IN_CI = [("llama", "f16"), ("llama_linear", "f16"), ("qwen2", "bf16"), ("qwen3_moe", "q8_0")]


@pytest.mark.parametrize(("family", "kind"), soak_except(IN_CI, CLEAN))
def test_check_raises_no_false_alarm(family: str, kind: str, job: Any, tmp_path: Path) -> None:
    right = replace(job(family), quantize=kind)
    check(written(right, tmp_path / "out"), right)


def test_every_fault_of_the_list_is_planted() -> None:
    faults = {*KEYS, *WEIGHTS, *ELSEWHERE}
    assert len(faults) == 20
    for text in ELSEWHERE.values():
        assert text in globals()


@pytest.mark.parametrize("part", [b"general.architecture", b"llama", b"token_embd.weight"])
def test_text_with_a_flipped_bit_is_a_difference(part: bytes, job: Any, tmp_path: Path) -> None:
    right = job("llama")
    path = written(right, tmp_path / "flipped")
    content = bytearray(path.read_bytes())
    content[content.index(part)] ^= 1 << 7  # no UTF-8
    path.write_bytes(content)
    assert "the exported file differs from the model" in caught(path, right)
