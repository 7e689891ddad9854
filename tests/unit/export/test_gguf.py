"""Models as GGUF files: each family is written, read back, and read by a program that is not finetune."""

from __future__ import annotations

import copy
import json
import math
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from finetune.core import packages
from finetune.core.errors import UserError
from finetune.data.encoding import Encoded
from finetune.export import gguf_families, gguf_tokenizer, serving_check
from finetune.export.export_job import ExportJob
from finetune.export.serving_check import AnswerToken, Expected, Reader
from finetune.models import token_limits
from support import exports
from support.soak import soak_except

NEEDS_GGUF = pytest.importorskip("gguf", reason="needs the package gguf (the extra `export`)")

from finetune.export import gguf_export, gguf_readers  # noqa: E402 (after importorskip)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`saved(family)`: the folder of a tiny model, which is made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = exports.model_of(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


def exported(folder: Path, out: Path, quantize: str = "f16") -> dict[str, Any]:
    out.mkdir()
    return gguf_export.write(exports.job_of(folder, quantize), out)


@pytest.mark.parametrize("family", soak_except(("llama", "mistral", "qwen3", "gemma2"), exports.FAMILIES))
def test_export_of_a_family_reads_and_answers_prompts_as_transformers_does(
    family: str, saved: Any, tmp_path: Path
) -> None:
    report = exported(saved(family), tmp_path / "out")
    check = report["serving_check"]
    assert check["reader"] and check["token_ids"].get("different", 0) == 0
    assert check["answers"].get("agree", True) is True and check["loss"].get("agree", True) is True
    assert check["stop_tokens"]["missing"] == []


@pytest.mark.parametrize("unknown", ["<unk>", "<none>", None])
def test_vocabulary_has_the_type_of_the_unknown_token_only_if_it_is_in_it(unknown: str | None) -> None:
    content = json.loads(exports.tokenizer_of("spm").backend_tokenizer.to_str())
    content["model"]["unk_token"] = unknown
    tokens, types = gguf_tokenizer.vocabulary(content, 700)
    named = {tokens[place] for place, kind in enumerate(types) if kind == gguf_tokenizer.UNKNOWN}
    assert named == ({"<unk>"} if unknown == "<unk>" else set())


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
def test_export_in_a_type_stays_within_its_tolerance(kind: str, saved: Any, tmp_path: Path) -> None:
    report = exported(saved("llama_tied"), tmp_path / "out", kind)
    said = report["serving_check"]["answers"]
    assert said["agree"] and said["largest_difference"] <= said["tolerance"]
    sizes = {"f32": 4, "bf16": 2, "q8_0": 34 / 32}
    (size,) = report["files"].values()
    weights = sum(value.numel() for value in _weights(saved("llama_tied")).values())
    assert weights * sizes[kind] < size < weights * sizes[kind] + 60_000


@pytest.mark.skipif(shutil.which(gguf_export.QUANTIZER) is None, reason="needs llama.cpp's llama-quantize")
@pytest.mark.parametrize("family", ["llama_wide", "llama_tied", "qwen2_moe"])
@pytest.mark.parametrize("kind", gguf_export.K_QUANTS)
def test_export_in_k_quants_stays_within_its_tolerance(
    kind: str, family: str, saved: Any, tmp_path: Path
) -> None:
    report = exported(saved(family), tmp_path / "out", kind)
    check = report["serving_check"]
    assert check["token_ids"].get("different", 0) == 0 and check["stop_tokens"]["missing"] == []
    assert check["answers"]["agree"] and check["loss"]["agree"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"tiny-{kind}.gguf"]
    gguf = gguf_families.load_gguf()
    reader = gguf.GGUFReader(tmp_path / "out" / f"tiny-{kind}.gguf")
    stored = {tensor.tensor_type.name for tensor in reader.tensors}
    assert family != "llama_wide" or f"Q{kind[1]}_K" in stored  # rows of others are no multiple of 256


@pytest.mark.skipif(shutil.which("llama-server") is None, reason="needs llama.cpp's program llama-server")
def test_the_program_llama_server_is_a_reader_too(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: name != "xllamacpp")
    check = exported(saved("llama_tied"), tmp_path / "out")["serving_check"]
    assert check["reader"] == "llama.cpp (llama-server)" and check["token_ids"]["different"] == 0
    assert check["answers"]["agree"] and check["loss"]["agree"]


def test_losses_of_llama_cpp_have_the_weights_of_the_loss(saved: Any, tmp_path: Path) -> None:
    job = exports.job_of(saved("llama_tied"))
    weighted = [
        document._replace(weights=((size - 8, size - 6, 0.0), (size - 6, size - 2, 0.25)))
        for document in job.expected.documents[:3]
        for size in (len(document.ids),)
    ]
    model: Any = AutoModelForCausalLM.from_pretrained(saved("llama_tied"), dtype=torch.float32).eval()
    wanted = serving_check.losses_of(model, weighted)
    gguf_export.write(job, tmp_path)
    with gguf_readers.reader_of(tmp_path / "tiny-f16.gguf", job) as reader:
        assert reader and reader.losses
        found = reader.losses(weighted)
    for (loss, count), (own, number) in zip(found, wanted, strict=True):
        assert count == number == 4 * 0.25 + 2 and loss == pytest.approx(own, rel=1e-3)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_steps_of_the_server_belong_to_one_token_each() -> None:
    """llama.cpp's server leaves out tokens that end within a character: here one 7 of two, and both 8."""

    def steps(*ids: int) -> list[dict[str, Any]]:
        return [{"id": one, "top_logprobs": [place]} for place, one in enumerate(ids)]

    assert gguf_readers.steps_of([5, 7, 6, 7, 9], steps(5, 6, 7, 9)) == {0: [0], 2: [1], 3: [2], 4: [3]}
    assert gguf_readers.steps_of([5, 7, 8, 8, 7, 9], steps(5, 7, 9)) == {0: [0], 5: [2]}
    assert gguf_readers.steps_of([5, 7, 7], steps(5, 7, 7)) == {0: [0], 1: [1], 2: [2]}
    assert gguf_readers.steps_of([8, 8], []) == {}


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
GLOBAL = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scale",
    [
        {},
        {"attention_factor": 0.1 * math.log(4) + 1},
        {"mscale": 1.0},
        {"mscale": None, "mscale_all_dim": 0.0},
    ],
)
def test_family_of_accepts_the_usual_attention_factor_of_yarn(scale: dict[str, Any]) -> None:
    config = AutoConfig.for_model(**exports.SIZES, model_type="llama", rope_parameters={**YARN, **scale})
    assert gguf_families.family_of(config).architecture == "llama"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"model_type": "gpt2"}, "model family"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "sliding window"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "type dynamic"),
        ({"model_type": "qwen2", "rope_parameters": exports.LLAMA3_ROPE}, "type llama3"),
        ({"model_type": "llama", "rope_parameters": {**YARN, "truncate": False}}, "truncate: false"),
        *(
            ({"model_type": "llama", "rope_parameters": {**YARN, **scale}}, "factor of the attention")
            for scale in ({"attention_factor": 0.5}, {"mscale": 0.5, "mscale_all_dim": 1.0}, {"factor": 0.5})
        ),
        ({"model_type": "llama", "hidden_act": "gelu"}, "activation gelu"),
        *(({"model_type": kind, "attention_bias": True}, "_bias") for kind in ("qwen3", "olmo2", "smollm3")),
        ({"model_type": "smollm3", "mlp_bias": True}, "mlp_bias: true"),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, "softcapping"),
        ({"model_type": "gemma3_text", "rope_parameters": {**GLOBAL, "sliding_attention": LINEAR}}, "window"),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, "its own weights"),
        ({"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 32}, "query_pre_attn_scalar"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "norm_topk_prob"),
        ({"model_type": "olmoe", "num_key_value_heads": 2}, "fewer key heads"),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1]}, "rotary"),
    ],
)
def test_family_of_names_each_feature_that_llama_cpp_lacks(given: dict[str, Any], what: str) -> None:
    config = AutoConfig.for_model(**{**({} if given["model_type"] == "gpt2" else exports.SIZES), **given})
    with pytest.raises(UserError) as raised:
        gguf_families.family_of(config)
    assert any(what in problem.what for problem in raised.value.problems), raised.value


def test_pre_of_refuses_a_way_to_split_that_llama_cpp_lacks() -> None:
    content = json.loads(exports.tokenizer_of("chatml").backend_tokenizer.to_str())
    assert gguf_tokenizer.pre_of(content) == "qwen2"
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\w+|\W+"}
    with pytest.raises(UserError, match="how this tokenizer splits a text"):
        gguf_tokenizer.pre_of(content)
    assert gguf_tokenizer.pre_of(json.loads((exports.QUICKSTART_TOKENIZER).read_text())) == "superbpe"


SPLIT = {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        *(
            ("chatml", {"normalizer": {"type": name}})
            for name in ("Lowercase", "NFKC", "NFD", "StripAccents")
        ),
        ("chatml", {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}}),
        ("chatml", {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}),
        ("chatml", {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}),
        ("spm", {"normalizer": {"type": "Lowercase"}}),
        ("spm", {"normalizer": None}),
        ("spm", {"pre_tokenizer": SPLIT}),
        ("spm", {"normalizer": None, "pre_tokenizer": METASPACE}),
    ],
)
def test_tokenizer_that_changes_texts_in_a_way_that_llama_cpp_lacks_is_refused(
    kind: str, changed: dict[str, Any]
) -> None:
    content = json.loads(exports.tokenizer_of(kind).backend_tokenizer.to_str())
    with pytest.raises(UserError, match="does not support how this tokenizer changes a text"):
        gguf_tokenizer.check_normalizer({**content, **changed})


@pytest.mark.parametrize("kind", ["chatml", "gpt2", "spm", "gemma"])
def test_tokenizer_that_changes_texts_as_llama_cpp_does_is_accepted(kind: str) -> None:
    content = json.loads(exports.tokenizer_of(kind).backend_tokenizer.to_str())
    gguf_tokenizer.check_normalizer(content)
    normal = {"type": "Sequence", "normalizers": [{"type": "NFC"}, *gguf_tokenizer.SPACES]}
    if kind in ("spm", "gemma"):
        gguf_tokenizer.check_normalizer({**content, "normalizer": normal})
        metaspace = {**METASPACE, "replacement": "▁"}
        gguf_tokenizer.check_normalizer({**content, "normalizer": None, "pre_tokenizer": metaspace})
        cut = gguf_tokenizer.CUT_AT_SPACES
        gguf_tokenizer.check_normalizer({**content, "pre_tokenizer": cut})
    else:
        gguf_tokenizer.check_normalizer({**content, "normalizer": {"type": "NFC"}})


def test_nfc_is_a_note() -> None:
    tokenizer = exports.tokenizer_of("chatml")
    assert gguf_tokenizer.notes(tokenizer) == []
    changed = copy.deepcopy(tokenizer)
    changed.backend_tokenizer.normalizer = normalizers.NFC()
    assert "does not apply the tokenizer's NFC" in gguf_tokenizer.notes(changed)[0]


@pytest.mark.parametrize("kind", ["chatml", "llama3", "spm", "gemma"])
@pytest.mark.parametrize("chats", [True, False])
def test_opens_without_a_validation_set_is_what_it_is_with_one(kind: str, chats: bool) -> None:
    tokenizer = copy.deepcopy(exports.tokenizer_of(kind))
    if not chats:
        tokenizer.chat_template = None
    if tokenizer.bos_token:
        start = (tokenizer.bos_token, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start[0]} $A", special_tokens=[start]
        )
    expected = Expected([], [], [], torch.zeros(0), [], [], None, None)
    job = ExportJob("a", Path(), None, tokenizer, expected, "f16", "base")
    assert gguf_export.opens(job) == (tokenizer.bos_token is not None)
    if chats:  # a run on plain texts does not use the template
        tokenizer.chat_template = "{{ raise_exception('no') }}"
        assert gguf_export.opens(replace(job, chats=False)) == (tokenizer.bos_token is not None)
        with pytest.raises(UserError, match="can't find how prompts start"):
            gguf_export.opens(job)
    with_prompt = replace(job, expected=expected._replace(prompts=[[5]]))
    assert gguf_export.opens(with_prompt) is False


@pytest.mark.parametrize("kind", ["spm", "gemma"])
def test_tokenizer_that_lacks_merges_of_its_tokens_is_refused(kind: str) -> None:
    """llama.cpp would join their characters."""
    tokenizer = exports.tokenizer_of(kind)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    gguf_tokenizer.check_joins(content, gguf_tokenizer.scores(content, len(tokenizer)))
    content["model"]["merges"] = content["model"]["merges"][:-40]
    with pytest.raises(UserError, match="how this tokenizer joins the characters"):
        gguf_tokenizer.check_joins(content, gguf_tokenizer.scores(content, len(tokenizer)))


def with_byte_fallback(tokens: list[str], merges: list[list[str]], **model: Any) -> Any:
    vocab = {f"<0x{number:02X}>": number for number in range(256)}
    for token in tokens:
        vocab.setdefault(token, len(vocab))
    rest = {"unk_token": None, "dropout": None, "fuse_unk": True, "ignore_merges": False}
    rest |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    content = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True, **rest, **model}
    text = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    text |= {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, "model": content}
    parts = dict.fromkeys(("pre_tokenizer", "post_processor", "decoder"))
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps({**text, **parts})))


def test_long_tokens_of_a_tokenizer_are_compared_in_time() -> None:
    tokenizer = with_byte_fallback(["a", "aa", *("a" * (3000 + n) for n in range(200))], [["a", "a"]])
    started = time.monotonic()
    gguf_tokenizer.entries(tokenizer, 2000, [], opens=False, chats=False)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("tokens", "model", "said"),
    [
        (["a", "b", "ab"], {}, "more tokens than the model has embeddings"),
        (["a", "##b", "ab"], {"continuing_subword_prefix": "##"}, "continuing_subword_prefix"),
        (["a", "b</w>", "ab</w>"], {"end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
    ],
)
def test_odd_tokenizers_with_byte_fallback_are_refused(tokens: list[str], model: Any, said: str) -> None:
    tokenizer = with_byte_fallback(tokens, [tokens[:2]], **model)
    with pytest.raises(UserError, match=said):
        gguf_tokenizer.entries(tokenizer, 258 if "more" in said else 300, [], opens=False, chats=False)


def test_tokenizer_of_bytes_alone_is_accepted() -> None:
    found = gguf_tokenizer.entries(with_byte_fallback([], []), 256, [], opens=False, chats=False)
    assert found["tokenizer.ggml.model"] == "llama"


@pytest.mark.parametrize(("scheme", "chats", "space"), [
    ("always", True, True), ("always", False, True), ("first", True, False), ("first", False, True),
    ("never", False, False),
])  # fmt: skip
def test_space_before_a_text_follows_the_scheme(scheme: str, chats: bool, space: bool) -> None:
    metaspace = {**METASPACE, "replacement": "▁", "prepend_scheme": scheme}
    content = {"normalizer": None, "pre_tokenizer": metaspace}
    assert gguf_tokenizer.starts_with_space(content, chats=chats) is space


def test_several_tokens_before_a_text_are_refused() -> None:
    tokenizer = copy.deepcopy(exports.tokenizer_of("llama3"))
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    eos = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos[0], eos[0], "$A"], special_tokens=[bos, eos]
    )
    gguf_tokenizer.check_start(tokenizer, chats=True)
    with pytest.raises(UserError, match="the tokens that the tokenizer adds before a text"):
        gguf_tokenizer.check_start(tokenizer, chats=False)


def test_flags_of_added_tokens_are_a_note() -> None:
    tokenizer = copy.deepcopy(exports.tokenizer_of("chatml"))
    tokenizer.add_tokens(
        [AddedToken("<a>", rstrip=True), AddedToken("<b>"), AddedToken("<c>", single_word=True)]
    )
    (note,) = gguf_tokenizer.notes(tokenizer)
    assert note.endswith("added tokens: <a>, <c>")


def test_longrope_is_served_in_the_context_of_its_short_factors() -> None:
    """llama.cpp chooses the factors by the size of the context, transformers by the length of the text."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    }  # fmt: skip
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 2048}
    sizes |= {"original_max_position_embeddings": 512}
    config: Any = AutoConfig.for_model("phi3", **sizes, pad_token_id=0, rope_parameters=rope)
    assert token_limits.batch_limit(config) == 512
    assert "a context of 512 tokens" in gguf_families.notes(config)[0]
    assert gguf_export.serving_options(config, "-m a.gguf") == "-m a.gguf --jinja --ctx-size 512"
    plain: Any = AutoConfig.for_model("phi3", **sizes, pad_token_id=0)
    assert token_limits.batch_limit(plain) is None and gguf_families.notes(plain) == []
    assert gguf_export.serving_options(plain, "-m a.gguf") == "-m a.gguf --jinja"


def test_k_quants_without_llama_cpp_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    config = AutoConfig.for_model(**exports.SIZES, model_type="llama")
    with pytest.raises(UserError) as raised:
        gguf_export.check(config, "q4_k_m")
    assert raised.value.code == 3 and "install llama.cpp" in raised.value.problems[0].fix


def expected(logits: list[list[float]], answer: list[int], stops: list[int]) -> Expected:
    return Expected(exports.chats()[:1], [[5, 6]], [answer], [torch.tensor(logits)], stops)


def test_compare_answers_accepts_another_token_only_where_two_logits_are_close() -> None:
    close, clear = [2.0, 2.001, -1.0], [2.0, -2.0, -1.0]
    for logits, agree in ((close, True), (clear, False)):
        wanted = expected([logits], [int(torch.tensor(logits).argmax())], [])
        other = 1 - wanted.answers[0][0]
        got = [[AnswerToken(other, {})]]
        found = serving_check.compare_answers(wanted, got, "f16")
        assert found["agree"] is agree, found


def test_check_fails_if_a_reader_goes_on_after_the_end_of_a_turn() -> None:
    wanted = expected([[9.0, 0.0, 0.0]], [0], [0])
    reader = Reader(
        "a reader", lambda _: [[5, 6]], lambda *_: [AnswerToken(0, {}), AnswerToken(1, {})], lambda: {0}
    )
    found = serving_check.run(reader, wanted, "f16")
    assert found["answers"]["first_difference"]["expected"] is None
    with pytest.raises(UserError, match="answers differently"):
        serving_check.refuse_different(found, Path("x"))


def test_check_compares_the_loss_of_a_reader_with_its_tolerance() -> None:
    document = Encoded([1, 2, 0], [(1, 3)])
    wanted = expected([[9.0, 0.0, 0.0]], [0], [])._replace(documents=[document], loss=1.5)
    for loss, agrees in ((3.005, True), (4.0, False)):
        reader = Reader(
            "a reader", None, lambda *_: [AnswerToken(0, {})], losses=lambda _, loss=loss: [(loss, 2)]
        )
        found = serving_check.run(reader, wanted, "f16")
        assert found["loss"]["runtime"] == loss / 2 and found["loss"]["tokens"] == 2
        assert found["loss"]["agree"] is agrees
    with pytest.raises(UserError, match="has another loss"):
        serving_check.refuse_different(found, Path("x"))
    without = serving_check.run(reader, wanted._replace(documents=[], loss=None), "f16")
    assert without["loss"] == {"not_run": "there are no texts to compare the loss on"}


def test_check_shows_the_first_token_that_differs() -> None:
    found = serving_check.compare_ids([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 9, 3]])
    assert found == {
        "prompts": 2,
        "different": 1,
        "first": {"prompt": 1, "position": 1, "expected": [2, 3], "found": [9, 3]},
    }
    assert serving_check.compare_ids([[1]], [[1, 2]])["first"]["position"] == 1


def test_check_without_a_reader_says_not_run() -> None:
    found = serving_check.run(None, expected([[1.0, 0.0]], [0], []), "f16", "nothing is installed")
    assert found == {"reader": None, "not_run": "nothing is installed"}
    serving_check.refuse_different(found, Path("x"))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"model_type": "llama", "rope_parameters": {**YARN, "beta_fast": 16.0}}, "another beta_fast"),
        ({"model_type": "llama", "rope_parameters": {**YARN, "beta_slow": 2.0}}, "another beta_fast"),
        ({"model_type": "olmo2", "tie_word_embeddings": True}, "tied embeddings"),
    ],
)
def test_family_of_refuses_what_llama_cpp_reads_in_another_way(given: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        gguf_families.family_of(AutoConfig.for_model(**{**exports.SIZES, **given}))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"HTT", b"\r\n"])
def test_server_that_ends_within_an_answer_is_an_error_of_the_export(answer: bytes) -> None:
    """The kernel may end llama.cpp because the memory is full."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def half() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        threading.Thread(target=half, daemon=True).start()
        with pytest.raises(UserError, match="can't open or run it"), serving_check.readable(Path("a.gguf")):
            gguf_readers._ask(f"http://127.0.0.1:{server.getsockname()[1]}/completion")
