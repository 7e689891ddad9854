"""Which type trains on which base: each cell of the table is true, by gradients and logits, or refused."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapters import attach, trainable_parameters
from finetune.autoconfig import machine_setup
from finetune.cli import main
from finetune.core.errors import Exit, UserError
from finetune.core.run_checks import RunChecks
from finetune.evaluation import reopen
from finetune.export import plain_base
from finetune.models import loading
from finetune.recipe import adapter_rules, adapter_types, loader
from finetune.recipe.schema import Model
from support.soak import soak_except

STORAGES = [name for name in adapter_types.QUANTIZED if name != "fp8"]  # test_fp8_linear.py
# LLM.int8() rounds activations too, in forward only; the others compute with the dequantized weights
TOLERANCE = {"nf4": 1e-5, "fp4": 1e-5, "int8": 0.08, "torchao_int8": 1e-4}
KINDS = {name: kind for name, kind in adapter_types.all_types().items() if kind.peft and not kind.refused}
TYPES = [
    name for name, kind in KINDS.items() if not kind.storage and name not in ("rslora", "trainable_tokens")
]
CELLS = [(storage, kind) for storage in STORAGES for kind in TYPES]
OF_NF4 = [cell for cell in CELLS if cell[0] == "nf4"]
OF_INT8 = [("int8", kind) for kind in ("dora", *TYPES[1::3])]
# Types say what they can't do later: BEFT can't be merged (peft 0.21.2, tuners/beft/layer.py); and
# SHiRA builds sparse tensors (tuners/shira/layer.py)
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore::RuntimeWarning:peft", "ignore:Sparse invariant checks"
)
IDS = torch.arange(8, 40).reshape(2, 16)


def gradients(base, section) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Of every trained tensor, and the loss, with B and its like moved off zero by one small step."""
    torch.manual_seed(0)
    adapted = attach.attach(base, section, 20, RunChecks()).train()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainable_parameters.trainable(adapted).values():
            parameter.add_(1e-2 * torch.randn_like(parameter))
    loss = adapted(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    found = {
        name: p.grad for name, p in trainable_parameters.trainable(adapted).items() if p.grad is not None
    }
    return found, loss.detach()


@pytest.mark.parametrize(("storage", "kind"), soak_except([*OF_NF4, *OF_INT8], CELLS))
def test_a_cell_of_the_table(storage: str, kind: str, two_layers, capsys) -> None:
    options = [f"adapter.type={kind}", f"model.quantization={storage}", f"model.name={two_layers}"]
    reason = adapter_types.unsupported_reason(kind, storage)
    if reason:
        assert main.main(["check", "recipes/quickstart.yaml", *options]) == 2
        assert reason in capsys.readouterr().err
        return
    loaded = loader.load("recipes/quickstart.yaml", options)
    if kind == "dora" and storage == "int8":  # on a GPU: tests/gpu
        with pytest.raises(UserError, match="DoRA does not work with an int8 base") as raised:
            reopen.open_base(loaded)
        assert raised.value.code == Exit.ENVIRONMENT
        return
    setup = machine_setup.choose(attention="auto", base=storage, adapter_type=kind)
    plain = plain_base.plain_base(loaded, setup)
    got, loss = gradients(reopen.open_base(loaded), loaded.adapter)
    wanted, right = gradients(plain, loaded.adapter)
    assert got.keys() == wanted.keys() and got
    error = sum(float((got[name] - wanted[name]).square().sum()) for name in got)
    size = sum(float(wanted[name].square().sum()) for name in got)
    assert size > 0 and (error / size) ** 0.5 < TOLERANCE[storage]
    assert abs(loss - right) < TOLERANCE[storage] * right


@pytest.mark.parametrize("storage", ["fp4", "int8", "torchao_int8"])
def test_a_quantized_base_trains_through_the_command(storage: str, train, two_layers) -> None:
    run = train(f"model.quantization={storage}", f"model.name={two_layers}")
    got = {check["option"]: check for check in run.read("checks.json")}
    assert all(check["passed"] for check in got.values())
    assert got["model.quantization"]["expected"] == storage
    assert got["model.quantization"]["actual"].startswith("14 of 14 linear layers, ")
    assert f'storage: "{storage}"' in run.recipe.read_text()


def test_torchao_s_tensors_keep_their_own_products(train, two_layers, capsys) -> None:
    """Their layer is torch's own, only the weight is not: no other sign that it can't be laid together."""
    train("model.quantization=torchao_int8", f"model.name={two_layers}", "speed.fused=true", code=3)
    assert "14 by PEFT: the base model is stored as Int8Tensor" in capsys.readouterr().err


@pytest.mark.parametrize("storage", adapter_types.QUANTIZED)
def test_what_is_not_known_to_be_codes_is_left_to_the_live_model(storage: str) -> None:
    whole = ["wte", "ln_f", "gate", "router", "conv1d", "embed_tokens", "lm_head", "norm"]
    raw = {"adapter": {"type": "lora", "modules_to_save": whole}, "model": {"quantization": storage}}
    assert not adapter_rules.conflicts(raw)
    for name in ("model.layers.0.self_attn.q_proj", "c_attn", "query_key_value", "fc1"):
        raw["adapter"]["modules_to_save"] = ["norm", name]
        assert adapter_rules.conflicts(raw)


@pytest.mark.parametrize("storage", STORAGES)
def test_layers_that_are_codes_do_not_train_whole(storage: str, tmp_path) -> None:
    """Whatever they are called: the live model is asked. Of torchao's tensors no dtype says it."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", vocab_size=64, **sizes))
    made.save_pretrained(tmp_path)
    setup = machine_setup.choose(attention="sdpa", base=storage, adapter_type="lora")

    def attached(*names: str) -> Any:
        whole = f"adapter.modules_to_save=[{', '.join(names)}]"
        section = loader.load("recipes/quickstart.yaml", ["adapter.target_modules=[dense]", whole]).adapter
        return attach.attach(loading.load(Model(name=str(tmp_path)), setup, "cpu"), section, 4, RunChecks())

    trained = trainable_parameters.trainable(attached("embed_in", "final_layer_norm"))
    assert sum("modules_to_save" in name for name in trained) == 3
    with pytest.raises(UserError, match=f"layers that the {storage} base model quantizes") as raised:
        attached("final_layer_norm", "dense_h_to_4h")
    assert "found:     dense_h_to_4h\n" in str(raised.value)
