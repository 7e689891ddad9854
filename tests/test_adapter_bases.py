"""Which type trains on which base: each cell of the table is true, by gradients and logits, or refused."""

import pytest
import torch

from finetune import adapter_types, adapters, cli, evaluate, hardware, merge, recipe
from finetune.errors import Exit, UserError
from finetune.receipts import Ledger

STORAGES = [name for name in adapter_types.QUANTISED if name != "fp8"]  # test_fp8.py
# LLM.int8() rounds activations too, in forward only; the others compute with the dequantised weights
TOLERANCE = {"nf4": 1e-5, "fp4": 1e-5, "int8": 0.08, "torchao_int8": 1e-4}
KINDS = {name: kind for name, kind in adapter_types.all_types().items() if kind.peft and not kind.refused}
TYPES = [
    name for name, kind in KINDS.items() if not kind.storage and name not in ("rslora", "trainable_tokens")
]
# Types say what they can't do later: BEFT can't be merged (peft 0.21.2, tuners/beft/layer.py); and
# SHiRA builds sparse tensors (tuners/shira/layer.py)
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore::RuntimeWarning:peft", "ignore:Sparse invariant checks"
)
IDS = torch.arange(8, 40).reshape(2, 16)


def gradients(base, section) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Of every trained tensor, and the loss, with B and its like moved off zero by one small step."""
    torch.manual_seed(0)
    adapted = adapters.attach(base, section, 20, Ledger()).train()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.trainable(adapted).values():
            parameter.add_(1e-2 * torch.randn_like(parameter))
    loss = adapted(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    found = {name: p.grad for name, p in adapters.trainable(adapted).items() if p.grad is not None}
    return found, loss.detach()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", TYPES)
def test_a_cell_of_the_table(kind: str, storage: str, two_layers, capsys) -> None:
    options = [f"adapter.type={kind}", f"speed.base={storage}", f"model.name={two_layers}"]
    reason = adapter_types.obstacle(kind, storage)
    if reason:
        assert cli.main(["check", "recipes/quickstart.yaml", *options]) == 2
        assert reason in capsys.readouterr().err
        return
    loaded = recipe.load("recipes/quickstart.yaml", options)
    if kind == "dora" and storage == "int8":  # on a GPU: tests/gpu
        with pytest.raises(UserError, match="can't be unpacked on the CPU") as raised:
            evaluate.open_base(loaded)
        assert raised.value.code == Exit.ENVIRONMENT
        return
    setup = hardware.choose(attention="auto", base=storage, adapter_type=kind)
    plain = merge.plain_base(loaded, setup)
    got, loss = gradients(evaluate.open_base(loaded), loaded.adapter)
    wanted, right = gradients(plain, loaded.adapter)
    assert got.keys() == wanted.keys() and got
    error = sum(float((got[name] - wanted[name]).square().sum()) for name in got)
    size = sum(float(wanted[name].square().sum()) for name in got)
    assert size > 0 and (error / size) ** 0.5 < TOLERANCE[storage]
    assert abs(loss - right) < TOLERANCE[storage] * right


@pytest.mark.parametrize("storage", ["fp4", "int8", "torchao_int8"])
def test_a_quantised_base_trains_through_the_command(storage: str, train, two_layers) -> None:
    run = train(f"speed.base={storage}", f"model.name={two_layers}")
    got = {receipt["option"]: receipt for receipt in run.read("receipts.json")}
    assert all(receipt["ok"] for receipt in got.values())
    assert got["speed.base"]["asked"] == storage
    assert got["speed.base"]["got"].startswith("14 of 14 linear layers, ")
    assert f'storage: "{storage}"' in run.recipe.read_text()


def test_torchao_s_tensors_keep_their_own_products(train, two_layers, capsys) -> None:
    """Their layer is torch's own, only the weight is not: no other sign that it can't be laid together."""
    train("speed.base=torchao_int8", f"model.name={two_layers}", "speed.fused=true", code=3)
    assert "14 by PEFT: the base is stored as Int8Tensor" in capsys.readouterr().err
