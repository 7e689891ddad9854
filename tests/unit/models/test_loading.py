"""Fingerprints see every change; failed run checks stop a run; hardware choices have reasons."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig

from finetune.autoconfig import base_quantization, launch_settings, machine_setup
from finetune.core.errors import Exit, UserError
from finetune.core.run_checks import RunChecks
from finetune.distributed import deepspeed_zero
from finetune.hardware.detection import Hardware
from finetune.models import corrections, generation_config, loading, tokenizer_setup
from finetune.models.fingerprint import fingerprint
from finetune.preflight import checker, choice_checks
from finetune.recipe import loader
from finetune.recipe.schema import Model
from support.architectures import CONFIGS
from support.paths import MODEL, QUICKSTART

CPU = Hardware("cpu", "CPU", 1, (0, 0), 24, 2)
H100 = Hardware("cuda", "NVIDIA H100 80GB HBM3", 8, (9, 0), 80, 64)
LLAMA_8B = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_key_value_heads=8)
T4 = Hardware("cuda", "Tesla T4", 1, (7, 5), 15, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_one_changed_byte_changes_the_fingerprint(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 100, (37, 11)).to(dtype)
    seen = {fingerprint({"a": tensor})}
    for index in range(0, tensor.numel(), 7):
        changed = tensor.clone().view(-1)
        changed[index] += 1
        seen.add(fingerprint({"a": changed.view(37, 11)}))
    assert len(seen) == 1 + len(range(0, tensor.numel(), 7))


def test_two_exchanged_values_or_names_change_it_too() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert (
        len({fingerprint({"x": a, "y": b}), fingerprint({"x": b, "y": a}), fingerprint({"x": a, "z": b})})
        == 3
    )


def test_a_new_token_is_seen_wherever_it_stands(tmp_path) -> None:
    """Llama 2's normalizer writes ▁ before every text, and would before the new token too."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = {token: index for index, token in enumerate(["<unk>", "</s>", *"▁0<tol>use"])}
    backend = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = tokenizer_setup.load_tokenizer(Model(name=str(tmp_path), add_tokens=["<tool>", "<tool>e"]))
    assert [tokenizer.tokenize(f"use{token}us")[4] for token in ("<tool>", "<tool>e")] == [
        "<tool>",
        "<tool>e",
    ]
    with pytest.raises(ValidationError, match="at least 1 character"):
        Model(name=str(tmp_path), add_tokens=[""])


def test_a_tokenizer_cuts_and_pads_nothing_by_itself(weightless: Path) -> None:
    """Whether rows were encoded or found in the cache, or a resumed run had another than its checkpoint."""
    path = weightless / "tokenizer.json"
    cuts = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    pads = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    pads |= {"pad_type_id": 0, "pad_token": "<pad>"}
    content = json.loads(path.read_text()) | {"truncation": cuts, "padding": pads}
    path.write_text(json.dumps(content))
    tokenizer: Any = tokenizer_setup.load_tokenizer(Model(name=str(weightless)))
    backend = tokenizer.backend_tokenizer
    assert (backend.truncation, backend.padding) == (None, None)


def test_a_run_check_that_does_not_match_stops_with_its_code() -> None:
    checks = RunChecks()
    checks.add("a", 1, 1, "counted")
    checks.check()
    checks.add("saved", "this", "that", "read back", code=Exit.ARTIFACT)
    checks.add("b", "> 0", 3, "counted", ok=True)
    with pytest.raises(UserError, match="that") as raised:
        checks.check()
    assert raised.value.code == 4
    assert [check["passed"] for check in checks.as_json()] == [True, False, True]


@pytest.mark.parametrize(("machine", "precision"), [(CPU, "no"), (H100, "bf16"), (T4, "fp16")])
def test_precision_without_a_launcher(machine: Hardware, precision: str, monkeypatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    launch = launch_settings.read(machine)
    assert (launch.precision, launch.precision_by) == (precision, "hardware")


def test_the_launch_owns_precision(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert launch_settings.read(H100).precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(UserError, match="does not support bf16") as raised:
        launch_settings.read(T4)
    assert raised.value.code == 3
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UserError, match="needs a GPU with fp8 GEMMs") as raised:
        launch_settings.read(T4)
    assert raised.value.code == 3


@pytest.mark.parametrize(
    ("asked", "kind", "precision", "stored"),
    [
        ("auto", "lora", "no", "fp32"),
        ("auto", "lora", "bf16", "bf16"),
        ("auto", "full", "bf16", "fp32"),
        ("auto", "qdora", "bf16", "nf4"),
        ("nf4", "ia3", "no", "nf4"),
        ("none", "lora", "bf16", "bf16"),
        ("none", "lora", "no", "fp32"),
        ("none", "full", "bf16", "fp32"),
    ],
)
def test_storage_of_the_base(asked: str, kind: str, precision: str, stored: str) -> None:
    choice = base_quantization.choose_base(asked, kind, precision, H100)
    assert choice.value == stored and choice.reason


def test_recompute_is_planned_from_memory() -> None:
    from finetune.autoconfig.activation_checkpointing import choose_activation_checkpointing
    from finetune.autoconfig.memory_estimate import (
        Keeps,
        Memory,
        kept_gib,
        peak_activations_gib,
        recomputed_layers,
    )

    assert kept_gib(LLAMA_8B, 16384, Keeps(fused=False)) == pytest.approx(60, rel=0.1)  # measured
    assert kept_gib(LLAMA_8B, 16384, Keeps(fused=True)) == pytest.approx(54, rel=0.1)  # measured
    plan = Memory(layers=32, kept=54.0, norms=8.0, entry=0.125, room=60.0)
    assert choose_activation_checkpointing("auto", plan, H100).value == "none"
    assert choose_activation_checkpointing("auto", plan._replace(room=46.0), H100).value == "norms"
    assert (
        choose_activation_checkpointing("auto", plan._replace(room=38.0), H100).value == "full:8"
    )  # 8 / 1.31, and one
    assert choose_activation_checkpointing("auto", plan._replace(room=1.0), H100).value == "full"
    assert choose_activation_checkpointing("auto", plan._replace(room=1.0), CPU).value == "none"
    assert choose_activation_checkpointing("full", plan, CPU).value == "full"
    assert choose_activation_checkpointing("norms", plan, CPU).value == "norms"
    assert choose_activation_checkpointing("full:4", plan, H100).value == "full:4"
    assert choose_activation_checkpointing("full:64", plan, H100).value == "full"
    fused = plan._replace(mlps=28.0)
    assert choose_activation_checkpointing("auto", fused._replace(room=46.0), H100).value == "norms"
    assert (
        choose_activation_checkpointing("auto", fused._replace(room=32.0), H100).value == "mlp:17"
    )  # 46 - 17 x 28 / 32
    assert max(peak_activations_gib(fused, "mlp:16")) == 32 + 8 / 32 and recomputed_layers("mlp:16", 32) == (
        0,
        16,
    )
    assert choose_activation_checkpointing("auto", fused._replace(room=19.2), H100).value == "mlp:31"
    assert choose_activation_checkpointing("auto", fused._replace(room=10.0), H100).value == "full:21"
    in_fp8 = fused._replace(rounding=0.25)  # an MLP in int8 costs a quarter of one made again
    assert choose_activation_checkpointing("auto", in_fp8._replace(room=46.0), H100).value == "norms"
    assert (
        choose_activation_checkpointing("auto", in_fp8._replace(room=45.0), H100).value == "mlp:2"
    )  # in int8: 8
    assert (
        choose_activation_checkpointing("auto", in_fp8._replace(room=33.0), H100).value == "mlp_int8"
    )  # 46 - 28 x 0.484
    assert choose_activation_checkpointing("auto", in_fp8._replace(room=30.0), H100).value == "mlp_int8:6"
    assert (
        max(peak_activations_gib(fused, "mlp_int8:6")) <= 30.25
        and recomputed_layers("mlp_int8:6", 32) == (0, 6)
        and recomputed_layers("mlp_int8", 32)[1] == 0
    )
    assert choose_activation_checkpointing("auto", in_fp8._replace(room=10.0), H100).value == "full:21"
    assert choose_activation_checkpointing("mlp_int8", fused, CPU).value == "mlp_int8"
    assert choose_activation_checkpointing("mlp_int8:40", fused, CPU).value == "mlp"
    assert (
        choose_activation_checkpointing("mlp", fused, CPU).value
        == choose_activation_checkpointing("mlp:32", fused, CPU).value
        == "mlp"
    )
    assert choose_activation_checkpointing("mlp:5", fused, CPU).value == "mlp:5"
    assert (
        recomputed_layers("full:8", 32) == (8, 24)
        and recomputed_layers("mlp", 32) == (0, 32)
        and recomputed_layers("norms", 32) == (0, 0)
    )
    leaving = fused._replace(
        entry=0.0, offloaded=1.0
    )  # 18 GiB: of three of 32 layers at a time, and one's gate and up
    assert choose_activation_checkpointing("auto", leaving._replace(room=3.0), H100).value == "mlp"
    for short in ({"room": 2.5}, {"room": 3.0, "host": 17.0}, {"room": 3.0, "mlps": 0.0}):
        assert choose_activation_checkpointing("auto", leaving._replace(**short), H100).value == "full"
    assert (
        max(peak_activations_gib(leaving._replace(offloaded=0.5), "mlp")) == 9 + 3 * 18 / 32 + 36 / 32
    )  # half of them leaves
    with pytest.raises(UserError, match="the MLPs of this model are not fused"):
        choose_activation_checkpointing("mlp", plan, H100)


def test_auto_keeps_on_the_cpu_what_would_else_be_made_again() -> None:
    """Only where int8 is not enough, where the CPU has room, and as far as copies are hidden."""
    from finetune.autoconfig import activation_checkpointing
    from finetune.autoconfig.memory_estimate import (
        Keeps,
        Memory,
        activations,
        offloaded_share,
        peak_activations_gib,
    )

    plan = Memory(layers=32, kept=54.0, norms=8.0, entry=0.125, room=60.0, mlps=28.0)
    plan = plan._replace(rounding=0.25, offloadable=0.5)  # what else a layer keeps: 18 / 32 GiB

    def chosen(recompute: str = "auto", offload: str = "auto", at: Hardware = H100, **other: float) -> Any:
        again, leaves, made = activation_checkpointing.choose(recompute, offload, plan._replace(**other), at)
        assert made.offloaded == offloaded_share(leaves.value, 32) * (offload == "auto")
        return again.value, leaves.value, leaves.reason

    only = "auto: only with compiled layers and fused MLPs on fp8"
    assert chosen(room=45.0) == ("mlp:2", "none", "auto: recomputing these MLPs is cheaper than int8")
    for room, again in ((60.0, "none"), (46.0, "norms"), (33.0, "mlp_int8")):
        assert chosen(room=room) == (again, "none", "auto: not needed")
    count = math.ceil((18 + 28 * 33 / 64 + 2 * 0.25 - 30) / (18 / 32)) + 3  # each tensor of 1 / 8 GiB
    again, leaves, reason = chosen(room=30.0)
    assert (again, leaves) == ("mlp_int8", f"activations:{count}")
    assert reason == f"auto: {count * 18 / 32:.0f} GiB in CPU memory, so that no MLP is recomputed"
    assert max(peak_activations_gib(plan._replace(offloaded=count / 32), "mlp_int8")) <= 29.75
    assert max(peak_activations_gib(plan._replace(offloaded=(count - 1) / 32), "mlp_int8")) > 29.75
    assert chosen(room=30.0, host=2.0) == ("mlp_int8:6", "none", "auto: 5 GiB do not fit in CPU memory")
    assert chosen(room=25.0) == ("mlp:25", "none", "auto: copies would be slower than the layers")
    assert chosen(room=30.0, rounding=math.inf, offloadable=0.0) == ("mlp:19", "none", only)
    assert chosen(room=30.0, at=CPU) == ("none", "none", "auto: no GPU")
    given = {"usable": 27.6, "offload": "auto"}
    for fused, share in ((True, 4096 / 7700), (False, 0.0)):  # FSDP2 splits what would be fused
        made = activations(LLAMA_8B, 16384, Keeps(fused, fp8=True), **given)
        assert made.offloadable == share and (made.rounding == math.inf) == (not fused)
        assert (
            activation_checkpointing.choose("auto", "auto", made, H100)[0].value.startswith("mlp_int8")
            == fused
        )
    assert chosen("mlp_int8:6", room=30.0) == (
        "mlp_int8:6",
        "none",
        "auto: speed.activation_checkpointing is asked for",
    )
    assert chosen(room=15.0) == ("full:10", "none", "auto: offloading all layers would not be enough")
    assert chosen(room=30.0, host=5.1) == ("mlp_int8", "activations:9", reason)
    assert chosen(room=30.0, host=5.1, pinned=1.6)[2] == "auto: 8 GiB do not fit in CPU memory"
    assert chosen(offload="none", room=30.0) == ("mlp_int8:6", "none", "not asked for")


def test_a_process_without_weights_has_all_but_these(two_layers, untied) -> None:
    for folder in (two_layers, untied):
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        empty = loading.without_weights(AutoConfig.from_pretrained(folder), torch.bfloat16)
        made, wanted = dict(empty.named_parameters()), dict(whole.named_parameters())
        assert made.keys() == wanted.keys() and not empty.training
        assert all((p.shape, p.dtype) == (made[n].shape, made[n].dtype) for n, p in wanted.items())
        buffers = dict(empty.named_buffers())
        assert all(torch.equal(b, buffers[n]) for n, b in whole.named_buffers()) and buffers


def test_a_model_over_all_devices_is_the_model(two_layers) -> None:
    """As a base is opened that no GPU holds alone; transformers takes `auto` for no device of a map."""
    setup = machine_setup.choose(attention="auto", base="auto", adapter_type="lora")
    ids = torch.arange(12)[None]
    one, spread = (loading.load(Model(name=str(two_layers)), setup, device) for device in ("cpu", "auto"))
    assert torch.equal(one(ids).logits, spread(ids).logits)


@pytest.mark.parametrize(
    ("base", "saved", "said"),
    [
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}, []),
        ({"top_k": 50}, {"do_sample": None, "top_k": 50}, []),
        (
            {"temperature": 0.9, "top_p": 0.6, "top_k": 50},
            {"do_sample": True, "temperature": 0.9, "top_p": 0.6, "top_k": 50},
            ["do_sample: true, which temperature 0.9, top_p 0.6 of the base needs"],
        ),
        (
            {"length_penalty": 2.0, "repetition_penalty": 1.1},
            {"do_sample": None, "length_penalty": None, "repetition_penalty": 1.1},
            ["without the base's length_penalty 2.0"],
        ),
        (
            {"do_sample": False, "min_p": 0.1, "pad_token_id": -1},
            {"do_sample": True, "min_p": 0.1, "pad_token_id": None},
            ["which min_p 0.1 of the base needs", "without the base's pad_token_id -1"],
        ),
    ],
)
def test_a_generation_config_that_opens_is_saved_as_far_as_it_is_valid(base, saved, said, tmp_path) -> None:
    """transformers does not save all that it opens: with it, trained weights were lost."""
    (tmp_path / "generation_config.json").write_text(json.dumps(base))
    generation = GenerationConfig.from_pretrained(tmp_path)
    notes = generation_config.settle_generation(generation, [])
    assert len(notes) == len(said) and all(text in note for text, note in zip(said, notes, strict=True))
    generation.save_pretrained(tmp_path)
    again = GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(again, name) for name in saved} == saved


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_what_a_model_computes_of_itself_is_as_it_makes_it(family: str) -> None:
    """DeepSpeed's zero.Init rounds it to the weights' 16 bits: positions other than of what is saved."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 99}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.bfloat16)
    whole = {name: buffer.clone() for name, buffer in made.named_buffers()}
    assert any(buffer.dtype == torch.float32 for buffer in whole.values())
    for module in made.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.bfloat16())
    deepspeed_zero.own_buffers(made)
    for name, buffer in made.named_buffers():
        assert buffer.dtype == whole[name].dtype and torch.equal(buffer, whole[name]), name


def test_load_of_weights_that_nothing_here_dequantizes_names_the_method(two_layers, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(two_layers, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "quant_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    setup = machine_setup.choose(attention="sdpa", base="auto", adapter_type="lora")
    with pytest.raises(UserError, match="weights that hqq quantized") as raised:
        loading.load(Model(name=str(folder)), setup, "cpu")
    assert raised.value.code == Exit.INPUT


@pytest.mark.parametrize(("width", "chosen"), [(7, "eager"), (32, "grouped_mm")])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_of_sizes_that_grouped_gemms_cannot_take_run_one_by_one(
    family: str, width: int, chosen: str
) -> None:
    config = AutoConfig.for_model(family, **{**CONFIGS[family], "hidden_size": width, "head_dim": 8})
    model, checks = AutoModelForCausalLM.from_config(config), RunChecks()
    corrections.choose_experts(model, checks)
    assert model.get_experts_implementation() == {"": chosen} and len(checks.notes) == (chosen == "eager")
    ids = torch.arange(3, 15)[None]
    model(input_ids=ids, labels=ids).loss.backward()


def test_tensor_in_two_weight_files_is_refused_by_check_and_train(weightless: Path) -> None:
    """transformers would load the tensor of the last file, whatever the index says."""
    tensors = load_file(MODEL / "model.safetensors")
    name = "model.norm.weight"
    save_file(tensors, weightless / "a.safetensors", {"format": "pt"})
    save_file({name: torch.zeros_like(tensors[name])}, weightless / "b.safetensors", {"format": "pt"})
    index = {**dict.fromkeys(tensors, "a.safetensors"), "other": "b.safetensors"}
    (weightless / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    recipe = loader.load(QUICKSTART, [f"model.name={weightless}"])
    with pytest.raises(UserError, match="two weight files hold the same tensor"):
        checker.check(recipe)
    with pytest.raises(UserError, match="two weight files hold the same tensor"):
        loading.load(recipe.model, choice_checks.setup_of(recipe), "cpu")
