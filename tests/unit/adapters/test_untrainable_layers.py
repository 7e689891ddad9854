"""Layers on which an adapter would not train are known before it exists, also those that a kernel reads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune.adapters import expert_targets, name_problems, untrainable_layers
from finetune.models import direct_reads, module_lists
from finetune.models.module_names import Names, short
from support.architectures import config_of
from support.paths import ROOT


def names_of(family: str) -> Names:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
        return module_lists.of_meta_model(model)


def skipped(names: Names, peft: str = "lora") -> set[str]:
    resolved = expert_targets.resolve({"target_modules": "all-linear"}, names, peft)
    return {short(name) for name in resolved.untrained}


@pytest.mark.parametrize(
    ("family", "without", "with_kernels"),
    [
        ("bamba", set(), {"out_proj"}),
        ("falcon_mamba", {"dt_proj"}, {"dt_proj", "x_proj", "out_proj"}),
        ("jamba", {"dt_proj"}, {"dt_proj"}),
        ("lfm2", set(), set()),
    ],
)
def test_layers_that_an_installed_kernel_reads_are_skipped(
    family: str, without: set[str], with_kernels: set[str], monkeypatch
) -> None:
    names = names_of(family)
    assert skipped(names, "ia3") == without
    monkeypatch.setattr(direct_reads.packages, "installed", lambda name: True)
    assert skipped(names, "ia3") == with_kernels
    assert {short(name) for name in direct_reads.linear_layers(names)} == with_kernels


def test_layer_that_an_installed_kernel_reads_is_refused_by_name(monkeypatch) -> None:
    names, options = names_of("bamba"), {"target_modules": ["in_proj", "out_proj"]}
    assert name_problems.check_options(options, names, "lora") == []
    monkeypatch.setattr(direct_reads.packages, "installed", lambda name: True)
    (problem,) = name_problems.check_options(options, names, "lora")
    assert problem.what == "an adapter on out_proj would get no gradient"
    assert "a kernel of mamba_ssm reads their weights" in problem.why
    assert problem.fix == "remove out_proj from target_modules"


def test_note_counts_and_names_the_skipped_layers_with_reasons() -> None:
    names = names_of("mamba")
    lost = untrainable_layers.reasons(names, "lora")
    note = untrainable_layers.note([one for one in names.linear if one in lost], names, "lora", "all-linear")
    assert "all-linear skips 4 linear layers on which an adapter would not train" in note
    assert "2 dt_proj: the model reads" in note and "2 out_proj: PEFT does not adapt them in mamba" in note
    assert untrainable_layers.note([], names, "lora", "all-linear") == ""


def test_own_exclusions_and_layers_stay_beside_the_skipped_layers() -> None:
    options = {"target_modules": "all-linear", "exclude_modules": ["q_proj"], "layers_to_transform": [0]}
    resolved = expert_targets.resolve(options, names_of("jamba"), "lora")
    assert {short(name) for name in resolved.untrained} == {"dt_proj"}
    assert resolved.modules and all(".0." in name and "q_proj" not in name for name in resolved.modules)
    assert resolved.options["exclude_modules"] == ["q_proj"]


PROGRAM = """
import torch
from transformers import AutoModelForCausalLM
from finetune.models import module_lists
from support.architectures import config_of
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config_of("lfm2"), dtype=torch.bfloat16)
    print(module_lists.of_meta_model(model).uncalled)
"""


def test_model_with_an_installed_kernel_runs_on_the_meta_device(tmp_path, monkeypatch) -> None:
    """The kernels of causal-conv1d take tensors of a GPU alone."""
    package = tmp_path / "causal_conv1d"
    package.mkdir()
    kernel = "def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):\n"
    (package / "__init__.py").write_text(f"{kernel}    raise RuntimeError('x must be a CUDA tensor')\n")
    paths = [tmp_path, ROOT, ROOT / "tests"]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, paths)))
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "conv.conv" in done.stdout
