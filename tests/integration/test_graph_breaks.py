"""Which forwards of PEFT's torch.compile takes whole: `auto` leaves the others as they are, and says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune.adapters import attach
from finetune.autoconfig import compilation, machine_setup
from finetune.core.run_checks import Choice, RunChecks
from finetune.hardware.detection import Hardware
from finetune.models import loading
from finetune.recipe import adapter_types, loader
from finetune.speed import live_model_spec
from support.paths import QUICKSTART
from support.soak import soak_except

H100 = Hardware("cuda", "NVIDIA H100", 1, (9, 0), 80.0, 8)


ONE = "adapter.target_modules=[q_proj]"


def adapted(*overrides: str) -> Any:
    loaded = loader.load(QUICKSTART, ["train.learning_rate=1e-3", *overrides])
    setup = machine_setup.choose(attention="sdpa", base="auto", adapter_type=loaded.adapter.type)
    return attach.attach(loading.load(loaded.model, setup, "cpu"), loaded.adapter, 100, RunChecks()).train()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *soak_except(
            [(("adapter.type=frod", ONE), "frod")],
            (((f"adapter.type={kind}", ONE), kind) for kind in sorted(adapter_types.BREAKING)),
        ),
        (("adapter.type=dora", ONE), "DoRA"),
        (("adapter.type=lora", "adapter.lora_dropout=0.1"), ""),
        (("adapter.type=adalora",), ""),
        (("adapter.type=ia3",), ""),
        (("adapter.type=vera",), ""),
    ],
)
def test_auto_knows_what_breaks_the_graph(given: tuple[str, ...], said: str) -> None:
    made = adapted(*given)
    breaks = compiled_in_parts(made)
    reason = live_model_spec.breaking(made)
    assert breaks == bool(reason) and reason == ({said} if said else set())
    work = compilation.Work(4096, 1e20, eager=said)
    auto = compilation.choose_compile("auto", work, H100)
    assert (auto.value, said in auto.reason) == ("off" if said else "on", True)


def compiled_in_parts(made: Any) -> bool:
    """Whether Dynamo does not take a decoder layer as one graph.

    It may also end in an error of its own: torch 2.11 does so on WaveFT, and torch 2.13 breaks the graph.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    live_model_spec.decoder_layers(made)[0].compile(backend="eager")
    try:
        made(input_ids=torch.arange(24)[None]).logits.sum().backward()
        return bool(torch._dynamo.utils.counters["graph_break"])
    except torch._dynamo.exc.InternalTorchDynamoError:
        return True
    finally:
        torch._dynamo.reset()


def test_what_decides_on_compiling_is_not_called_the_time_of_training() -> None:
    """A plan has that in the same answer, and it is longer."""
    peak = H100.peak_flops
    assert peak
    for seconds, value in ((77, "off"), (500, "on")):
        chosen = compilation.choose_compile("auto", compilation.Work(4096, seconds * 0.4 * peak), H100)
        assert chosen.value == value and "training" not in chosen.reason
        assert f"about {seconds} s of matrix multiplications at 40% of the peak" in chosen.reason


def test_dora_breaks_nothing_where_it_is_fused() -> None:
    from finetune.speed.fused_layers import Fused

    made = adapted("adapter.type=dora")
    assert "DoRA" in live_model_spec.breaking(made)
    Fused(made, live_model_spec.decoder_layers(made))
    assert not live_model_spec.breaking(made)


@pytest.mark.soak
@pytest.mark.parametrize("reason", ["asked for", "auto: the run has about 900 s"])
def test_breaks_end_a_run_that_was_to_be_compiled(reason: str, train, monkeypatch) -> None:
    """Under `auto`, a graph break that was not known before is recorded in a run check."""
    monkeypatch.setattr(compilation, "choose_compile", lambda *given: Choice("on", reason))
    monkeypatch.setattr(torch.nn.Module, "compile", _in_eager)
    given = ("adapter.type=loha", ONE, "train.learning_rate=1e-2")
    if reason == "asked for":
        train(*given, code=5)
        return
    run = train(*given)
    rows = {row["option"]: row for row in run.read("checks.json")}
    assert rows["speed.compile"]["passed"] and not rows["speed.compile"]["actual"].startswith(
        "0 graph breaks"
    )
    assert int(rows["graphs compiled after the first step"]["actual"]) >= 0


def test_nothing_is_compiled_again_after_the_first_step(train, monkeypatch) -> None:
    """Neither sizes tried before nor what looks on at the first forward leave a trace in what is compiled."""
    monkeypatch.setattr(torch.nn.Module, "compile", _in_eager)
    flat = ("data.packing=true", "data.max_length=256", "model.attention=eager", "data.train_on=all")
    flat += ("train.effective_batch_size=4", "train.per_device_train_batch_size=auto")
    run = train("adapter.type=lora", ONE, "speed.compile=true", "train.max_steps=3", *flat)
    found = {row["option"]: row for row in run.read("checks.json")}
    assert found["speed.compile"]["actual"] == "0 graph breaks, 2 graphs", "of a layer, and of the loss"
    assert found["graphs compiled after the first step"]["actual"] == "0"


def _in_eager(self: torch.nn.Module, **given: Any) -> None:
    self._compiled_call_impl = torch.compile(self._call_impl, backend="eager")
