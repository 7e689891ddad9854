"""Which attention is chosen and why; attention without a mask computes what attention with one does."""

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM

from finetune.autoconfig import attention_choice, machine_setup
from finetune.autoconfig.attention_choice import FAMILIES, Attends, RowLayout, choose, read
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.evaluation import reopen, scoring
from finetune.hardware.detection import Hardware
from finetune.kernels.attention_functions import register, without_mask
from finetune.kernels.kernel_limits import IMPLEMENTATIONS
from finetune.models import architecture
from finetune.models.loading import load
from finetune.recipe import loader
from finetune.recipe.schema import Model
from finetune.speed.packing_isolation import leaks, masked, prove_apart, prove_same
from finetune.training.first_step_checks import attention_that_ran
from support.paths import MODEL
from support.plain_attention import SMALL, batch, by_document, loss_and_gradients, tiny
from support.runs import run_checks

CPU = Hardware("cpu", "CPU", 1, (0, 0), 24, 2)
T4 = Hardware("cuda", "Tesla T4", 1, (7, 5), 15, 4)
A100 = Hardware("cuda", "NVIDIA A100", 1, (8, 0), 80, 16)
L40S = Hardware("cuda", "NVIDIA L40S", 1, (8, 9), 48, 16)
H200 = Hardware("cuda", "NVIDIA H200", 1, (9, 0), 141, 16)
B200 = Hardware("cuda", "NVIDIA B200", 1, (10, 0), 180, 16)
RTX5090 = Hardware("cuda", "NVIDIA GeForce RTX 5090", 1, (12, 0), 32, 16)
DENSE, PACKED = RowLayout(False, 4096), RowLayout(True, 4096)
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


@pytest.fixture
def packages(monkeypatch):
    """`packages("flash_attention_4", ...)`: these FlashAttention packages are installed, no others."""

    def have(*names: str) -> None:
        monkeypatch.setattr(attention_choice, "_has_flash", lambda name: name in names)
        monkeypatch.setattr(attention_choice, "broken", lambda name: "")

    have()
    return have


@pytest.mark.parametrize(
    ("machine", "have", "dense", "packed"),
    [
        (CPU, FLASH, "sdpa", "sdpa"),
        (T4, FLASH, "sdpa", "flex_attention"),
        (A100, (), "varlen", "varlen"),
        (L40S, FLASH, "varlen", "varlen"),
        (H200, (), "cudnn", "varlen"),
        (H200, FLASH, "flash_attention_3", "flash_attention_4"),
        (H200, FLASH[:2], "flash_attention_3", "flash_attention_3"),
        (H200, FLASH[:1], "cudnn", "varlen"),
        (B200, (), "cudnn", "varlen"),
        (B200, FLASH[:2], "cudnn", "varlen"),
        (B200, FLASH, "flash_attention_4", "flash_attention_4"),
        (RTX5090, FLASH, "flash_attention_4", "flash_attention_4"),
    ],
)
def test_the_fastest_that_is_here(machine, have, dense, packed, packages) -> None:
    packages(*have)
    dtype = "float32" if machine is CPU else "bfloat16" if machine.capability >= (8, 0) else "float16"
    for rows, name in ((DENSE, dense), (PACKED, packed)):
        chosen, reason = choose("auto", machine, dtype, Attends(), rows)
        assert chosen == name and reason.startswith("auto: "), reason


@pytest.mark.parametrize(
    ("attends", "rows", "have", "name", "reason"),
    [
        (Attends("mistral", window=4095), DENSE, (), "varlen", "sliding window"),
        (Attends("mistral", window=4096), DENSE, (), "cudnn", ""),
        (
            Attends("mistral", window=4095),
            RowLayout(packed=False, longest=4040),
            (),
            "varlen",
            "sliding window",
        ),
        (Attends("mistral", window=4095), RowLayout(packed=False, longest=4032), (), "cudnn", "is 64"),
        (Attends("gemma3_text", 256, window=512), DENSE, FLASH, "flash_attention_3", ""),
        (Attends("gemma3_text", 256, window=512), DENSE, (), "varlen", "sliding window"),
        (Attends("gemma", 256), DENSE, (), "varlen", "does not support heads of size 256"),
        (Attends("gemma2", 256, softcap=True), DENSE, (), "flex_attention", "no softcap"),
        (Attends("gemma2", 256, softcap=True), PACKED, FLASH[:1], "flash_attention_2", "no softcap"),
        (Attends("gpt_oss", 64, window=128, sinks=True), PACKED, FLASH, "flex_attention", "attention sinks"),
        (Attends("llama", 80), DENSE, (), "cudnn", ""),
        (Attends("llama", 100), DENSE, (), "sdpa", "does not support heads of size 100"),
        (Attends(dropout=0.1), DENSE, FLASH, "sdpa", "attention_dropout is 0.1"),
        (Attends(dropout=0.1), PACKED, FLASH, "sdpa", "with a full attention mask"),
        (
            Attends("llama4_text", special="has chunked attention"),
            DENSE,
            FLASH,
            "sdpa",
            "has chunked attention",
        ),
        (Attends("nemotron"), DENSE, FLASH, "sdpa", "not tested with nemotron"),
        (Attends(), RowLayout(False, 4096, prompts=True), FLASH, "sdpa", "virtual tokens"),
    ],
)
def test_it_moves_on_where_a_kernel_is_not_the_model_s(attends, rows, have, name, reason, packages) -> None:
    packages(*have)
    chosen, why = choose("auto", H200, "bfloat16", attends, rows)
    assert chosen == name and reason in why, why


@pytest.mark.parametrize(
    ("asked", "machine", "dtype", "attends", "rows", "found"),
    [
        ("flash_attention_4", CPU, "float32", Attends(), DENSE, "needs an NVIDIA GPU"),
        ("flex_attention", CPU, "float32", Attends(), DENSE, "needs an NVIDIA GPU"),
        ("flash_attention_4", A100, "bfloat16", Attends(), DENSE, "needs compute capability 9.0"),
        ("flash_attention_3", B200, "bfloat16", Attends(), DENSE, "is newer"),
        ("flash_attention_2", T4, "float16", Attends(), DENSE, "needs compute capability 8.0"),
        ("cudnn", H200, "float32", Attends(), DENSE, "does not support float32"),
        ("cudnn", H200, "bfloat16", Attends(), PACKED, "does not separate packed examples"),
        ("cudnn", H200, "bfloat16", Attends(head_size=256), DENSE, "does not support heads of size 256"),
        (
            "flash_attention_4",
            B200,
            "bfloat16",
            Attends(head_size=192),
            DENSE,
            "does not support heads of size 192",
        ),
        (
            "flash_attention_4",
            RTX5090,
            "bfloat16",
            Attends(head_size=256),
            DENSE,
            "does not support heads of size 256",
        ),
        ("varlen", H200, "bfloat16", Attends("gemma2", softcap=True), DENSE, "no softcap"),
        ("sdpa", H200, "bfloat16", Attends("gemma2", softcap=True), DENSE, "no softcap"),
        ("flash_attention_2", H200, "bfloat16", Attends(dropout=0.1), DENSE, "no dropout"),
    ],
)
def test_what_was_asked_for_and_can_t_be_is_an_error(asked, machine, dtype, attends, rows, found, packages):
    packages(*FLASH)
    with pytest.raises(UserError) as raised:
        choose(asked, machine, dtype, attends, rows)
    (problem,) = raised.value.problems
    assert raised.value.code == 3 and found in problem.why and problem.fix


def test_a_package_that_is_not_here_says_how_to_get_it(packages) -> None:
    for name in FLASH:
        with pytest.raises(UserError, match=r"not installed \((.*pip install|build)"):
            choose(name, H200, "bfloat16", Attends(), PACKED)


def test_a_plan_for_another_gpu_takes_it_that_what_was_asked_for_is_there(packages) -> None:
    """Not what that GPU has not; and `auto` goes by what is here."""
    packages()
    other = replace(H200, here=False)
    assert choose("flash_attention_3", other, "bfloat16", Attends(), PACKED)[0] == "flash_attention_3"
    assert choose("auto", other, "bfloat16", Attends(), PACKED)[0] == "varlen"
    with pytest.raises(UserError, match="is older"):
        choose("flash_attention_3", replace(A100, here=False), "bfloat16", Attends(), PACKED)


@pytest.mark.parametrize(
    ("flag", "attends", "rows", "dtype", "left"),
    [
        ("HDIM256", Attends("gemma", 256), DENSE, "bfloat16", "heads of size 256"),
        ("SOFTCAP", Attends("gemma2", 192, softcap=True), PACKED, "bfloat16", "a softcap"),
        ("LOCAL", Attends("mistral", window=64), PACKED, "bfloat16", "a sliding window"),
        ("FP16", Attends(), PACKED, "float16", "float16"),
        ("VARLEN", Attends(), PACKED, "bfloat16", "packed sequences"),
        ("HDIM256", Attends(), DENSE, "bfloat16", ""),
    ],
)
def test_a_build_of_flash_attention_3_may_lack_what_a_model_needs(
    flag, attends, rows, dtype, left, packages, monkeypatch
) -> None:
    packages(*FLASH[:2])
    config = SimpleNamespace(CONFIG={"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": True}})
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    chosen, why = choose("auto", H200, dtype, attends, rows)
    assert (chosen != "flash_attention_3") == bool(left) and (not left or f"does not support {left}" in why)


def test_evaluation_takes_masks_and_a_cache() -> None:
    for asked in ("auto", "sdpa", *IMPLEMENTATIONS, "flex_attention"):
        assert choose(asked, H200, "bfloat16")[0] == "sdpa"
        assert choose(asked, CPU, "float32", Attends("gemma2", softcap=True))[0] == "eager"
    assert choose("eager", H200, "bfloat16")[0] == "eager"


def test_configs_are_read_as_transformers_reads_them() -> None:
    def of(family: str, **fields):
        return read(AutoConfig.for_model(family, **fields))

    assert of("llama", hidden_size=4096, num_attention_heads=32) == Attends("llama", 128)
    assert of("mistral", sliding_window=4096).window == 4096
    assert of("qwen3", sliding_window=4096, use_sliding_window=False).window is None
    assert of("qwen3", sliding_window=64, use_sliding_window=True, max_window_layers=1).window == 64
    gemma = of("gemma3")
    assert (gemma.family, gemma.head_size, gemma.window, gemma.softcap) == ("gemma3_text", 256, 4096, False)
    assert of("gemma2").softcap and of("gpt_oss").sinks and of("gpt_oss").window == 128
    assert of("llama4_text").special and of("qwen3_next").special and of("deepseek_v3").special
    assert of("llama", attention_dropout=0.1).dropout == 0.1


def test_what_transformers_class_refuses_is_not_chosen() -> None:
    """The model loads with what is chosen instead."""
    for family, lacks, packed in (
        ("granite_swa", ("sdpa",), "flex_attention"),
        ("bloom", ("sdpa", "flex_attention"), "eager"),
        ("llama", (), "varlen"),
    ):
        attends = read(AutoConfig.for_model(family))
        assert attends.lacks == lacks
        assert choose("auto", H200, "bfloat16", attends, PACKED)[0] == packed
        for rows in (DENSE, PACKED, None):
            name, why = choose("auto", CPU, "float32", attends, rows)
            assert name == ("eager" if lacks else "sdpa")
            assert (f"transformers has no sdpa for {family}" in why) == bool(lacks)
            model = tiny(family)
            model.set_attn_implementation(name)
            assert model.config._attn_implementation == name
        if lacks:
            with pytest.raises(UserError, match="attention: eager"):
                choose("sdpa", CPU, "float32", attends, DENSE)


def test_what_a_class_refuses_is_read_without_importing_it() -> None:
    """A plan has a config.json's values alone, and must choose as the run will."""
    families = (*FAMILIES, "gemma3", "aria_text", "gpt_oss", "mimo_v2_flash", "gptj", "bloom", "granite_swa")
    for family in families:
        made = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(family))]
        flags = {"sdpa": made._supports_sdpa, "flex_attention": made._supports_flex_attn}
        config = architecture.as_config({"model_type": family, "hidden_size": 64, "num_attention_heads": 2})
        assert read(config).lacks == tuple(name for name, works in flags.items() if not works), family


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_without_a_mask_trains_as_eager_does(family: str, packed: bool) -> None:
    """Loss and every gradient, of rows with padding (no mask at all) and of documents end to end."""
    windows = {"sliding_window": 8} if family in ("mistral", "mixtral", "qwen2", "qwen3", "phi3") else {}
    if family.startswith("gemma"):
        windows = {"sliding_window": 8, "query_pre_attn_scalar": 16}
    model = tiny(family, **windows).train()
    inputs = batch(packed)
    wanted = loss_and_gradients(model, inputs)
    model.set_attn_implementation("by_document")
    got = loss_and_gradients(model, inputs)
    assert torch.allclose(wanted[0], got[0], rtol=1e-5)
    for a, b in zip(wanted[1], got[1], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
def test_cudnn_s_function_is_sdpa_on_padded_rows(family: str) -> None:
    """What stands around the kernel: heads, groups, scale; padding on the right needs no mask."""
    register("cudnn")
    model = tiny(family).train()
    inputs = batch(packed=False)
    model.set_attn_implementation("sdpa")
    wanted = loss_and_gradients(model, inputs)
    model.set_attn_implementation("finetune_cudnn")
    got = loss_and_gradients(model, inputs)
    assert torch.allclose(wanted[0], got[0], rtol=1e-6)
    for a, b in zip(wanted[1], got[1], strict=True):
        assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-7)


def test_what_would_need_a_mask_is_refused() -> None:
    model = tiny("llama").eval()
    model.set_attn_implementation("by_document")
    ids = torch.randint(3, 128, (2, 6))
    with pytest.raises(ValueError, match="for training"):
        model.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="for training"):
        model(input_ids=ids, attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool))
    dropping = tiny("llama", attention_dropout=0.5).train()
    dropping.set_attn_implementation("by_document")
    with pytest.raises(ValueError, match="dropout"):
        dropping(input_ids=ids)


def test_documents_stay_apart_and_both_proofs_can_fail() -> None:
    model = tiny("mistral", sliding_window=8)
    model.set_attn_implementation("by_document")
    checks = RunChecks()
    prove_apart(model, 64, "by_document", checks)
    same, moved = leaks(model.eval(), 64)
    assert max(*same, *moved) == 0

    def blind(query, key, value, **_):
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    def shifted(query, key, value, **options):
        return by_document(query, key, value, **{**options, "window": 1})

    for packed, wrong in ((True, blind), (False, shifted)):
        AttentionInterface.register("finetune_varlen", without_mask(wrong))
        model.set_attn_implementation("finetune_varlen")
        with pytest.raises(UserError, match="computes another result than sdpa") as raised:
            prove_same(model, 64, "varlen", packed, RunChecks())
        assert raised.value.code == 3 and model.config._attn_implementation == "finetune_varlen"
        AttentionInterface.register("finetune_varlen", without_mask(by_document))
        prove_same(model, 64, "varlen", packed, checks)
    assert all(check["passed"] for check in checks.as_json())
    assert float(checks.as_json()[-1]["actual"]) < 1e-5


def test_a_model_in_training_is_evaluated_with_masks() -> None:
    """Its answers, from prompts padded on the left, are those of the model with sdpa; then it trains on."""
    model = AutoModelForCausalLM.from_pretrained(str(MODEL), attn_implementation="sdpa", dtype=torch.float32)
    ids = torch.randint(5, 4000, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    asked = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(**asked)
    AttentionInterface.register("finetune_varlen", without_mask(by_document))
    model.set_attn_implementation("finetune_varlen")
    with scoring.inference(model):
        assert torch.equal(model.generate(**asked), wanted)
    assert model.config._attn_implementation == "finetune_varlen"
    with masked(model) as name:
        assert name == model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_named_in_config_json_is_not_fetched(key: str, tmp_path) -> None:
    """A kernel's repository is refused; a name of transformers' own is not followed."""
    setup = machine_setup.choose(attention="auto", base="auto", adapter_type="lora")
    for named in ("somebody/kernel", "eager"):
        folder = shutil.copytree(MODEL, tmp_path / f"{named.replace('/', '-')}")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, key: named}))
        if named != "eager":
            with pytest.raises(UserError, match="the config names a kernel to download"):
                load(Model(name=str(folder)), setup, "cpu")
            continue
        loaded = load(Model(name=str(folder)), setup, "cpu")
        assert loaded.config._attn_implementation == "sdpa"
        assert {m.config._attn_implementation for m in loaded.modules() if hasattr(m, "config")} == {"sdpa"}


def test_nor_one_named_for_a_part_of_the_model(tmp_path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SMALL, "query_pre_attn_scalar": 16}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    setup = machine_setup.choose(attention="auto", base="auto", adapter_type="lora")
    parts = (saved, saved["text_config"], saved["vision_config"])
    for name in ("somebody/kernel", "eager"):
        for part in parts:
            part["_attn_implementation"] = name
        (tmp_path / "config.json").write_text(json.dumps(saved))
        if name != "eager":
            with pytest.raises(UserError, match="the config names a kernel to download"):
                load(Model(name=str(tmp_path)), setup, "cpu")
    loaded = load(Model(name=str(tmp_path)), setup, "cpu")
    assert {m.config._attn_implementation for m in loaded.modules() if hasattr(m, "config")} == {"sdpa"}


def test_the_run_says_which_attention_ran_and_its_folder_reopens(train, capsys) -> None:
    run = train("data.packing=true", "data.max_length=256", "train.effective_batch_size=4")
    got = run_checks(run)["model.attention"]
    assert got["expected"] == "sdpa" and got["actual"].startswith("sdpa (flash")
    assert "attention without a mask" not in run_checks(run)
    reopened = reopen.reopen(run, loader.load(str(run.recipe)))
    ids = torch.tensor([[0, 0, 7, 8], [5, 6, 7, 8]])
    answer = reopened.generate(input_ids=ids, attention_mask=(ids > 0).long(), max_new_tokens=3)
    assert answer.shape == (2, 7)


@pytest.mark.parametrize(
    ("operation", "name", "mask"),
    [
        ("aten::_scaled_dot_product_cudnn_attention", "cudnn", ""),
        ("aten::_scaled_dot_product_efficient_attention", "sdpa", "1 x 1 x 9 x 9"),
        ("torch_attn::_varlen_attn", "varlen", ""),
        ("finetune::flash_attention_4", "flash_attention_4", ""),
        ("flash_attn_3::_flash_attn_forward", "flash_attention_3", ""),
        ("flash_attn::_flash_attn_varlen_forward", "flash_attention_2", ""),
        ("triton_tem_fused_flex_attention_0", "flex_attention", ""),
        ("aten::_softmax", "eager", ""),
        ("aten::mm", "none seen", ""),
    ],
)
def test_the_kernel_is_told_from_the_operations(operation: str, name: str, mask: str) -> None:
    shapes = [[1, 4, 9, 8]] * 3 + ([[1, 1, 9, 9]] if mask else [[]])
    ran = attention_that_ran(
        {"aten::_softmax": [], operation: shapes} if name != "none seen" else {operation: []}
    )
    assert name in ran.names and ran.mask == mask


def test_a_kernel_that_was_built_for_another_torch_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: x')")
    monkeypatch.syspath_prepend(tmp_path)
    attention_choice.broken.cache_clear()
    said = attention_choice.missing("flash_attention_3", H200)
    attention_choice.broken.cache_clear()
    assert said == "flash_attention_3 is installed but can't be imported (undefined symbol: x)"
