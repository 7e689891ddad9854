"""AdaLoRA on a GPU: between two steps nothing is asked of it, and a broken step still ends the run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from finetune.adapters import adalora
from support.adalora_steps import STEPS, adamw, same, tiny
from support.faults import Fault, injected
from support.soak import soak_except

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    # torch says so of its own set_sync_debug_mode (torch/csrc/cuda/Module.cpp)
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


def test_allocating_asks_the_device_nothing_and_is_pefts() -> None:
    given = {"init_r": 24, "target_r": 16, "tinit": 1, "tfinal": 4}
    ours: Any = tiny(**given)[0].cuda()
    theirs: Any = copy.deepcopy(ours)
    named, vectors, masks = adalora.tensors(ours), adalora.singular_vectors(ours), {}
    optimizers = [adamw(model) for model in (ours, theirs)]
    for step in range(1, STEPS - 3):
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step)).cuda()
        loss = ours.base_model.model(input_ids=ids, labels=ids).loss + 0.5 * adalora.orthogonality(vectors)
        loss.backward()
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for mine, its in zip(ours.parameters(), model.parameters(), strict=True):
                its.grad = mine.grad
            optimizer.step()
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error" if step < STEPS - 4 else "default")
            adalora.allocate(ours, step, named, masks)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        theirs.base_model.update_and_allocate(step)
        ours.zero_grad()
        if step == STEPS - 5:  # after the last allocation importances are gone
            assert same(adalora.allocation_state(ours), adalora.allocation_state(theirs))
    assert same(adalora.allocation_state(ours), adalora.allocation_state(theirs))


@pytest.mark.parametrize("step", soak_except([6], [4, 6, 7]))  # of 12: ranks are taken away, last at 7
def test_a_step_that_is_not_finite_ends_the_run(step: int, train, capsys) -> None:
    given = ["adapter.type=adalora", "adapter.tinit=1", "adapter.tfinal=5", "train.max_steps=12"]
    with injected(Fault("nan", step=step)):
        run = train(*given, "train.logging_steps=10", f"train.save_steps={step - 1}", code=5)
    assert f"gradients of step {step} are NaN or Inf" in capsys.readouterr().err
    assert (run.path / f"nonfinite-step-{step}" / "finding.json").exists()
    assert max(int(one.name[5:]) for one in run.checkpoints.glob("step-*")) == step - 1
