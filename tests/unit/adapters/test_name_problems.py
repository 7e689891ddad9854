"""Names of an adapter's options against a model's: what is refused, and what the message offers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapters import name_problems, target_modules
from finetune.models import module_lists
from finetune.models.module_names import Names
from support.architectures import CONFIGS


def names_of(family: str) -> Names:
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **CONFIGS[family])
        return module_lists.of_meta_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def problem(family: str, options: dict[str, Any], peft: str = "lora") -> Any:
    (found,) = name_problems.check_options(options, names_of(family), peft)
    return found


@pytest.mark.parametrize(("target", "pair"), [("gate_proj", "up_proj"), ("w1", "w3"), ("w3", "w1")])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_one_of_two_layers_in_a_parameter_of_experts_is_refused_with_the_other(
    family: str, target: str, pair: str
) -> None:
    found = problem(family, {"target_modules": ["q_proj", target]})
    assert found.what.endswith("of a mixture of experts only together")
    assert found.fix == f"target_modules: [q_proj, {target}, {pair}]"
    again = {"target_modules": ["q_proj", target, pair]}
    assert name_problems.check_options(again, names_of(family), "lora") == []


@pytest.mark.parametrize(
    ("family", "peft", "options", "what", "fix"),
    [
        ("gpt2", "oft", {"target_modules": "all-linear"}, "oft can't adapt these", "adapter.type: lora"),
        ("gpt2", "lora", {"target_modules": "c_attn,c_proj"}, "matches no module", "[c_attn, c_proj]"),
        ("gpt2", "lora", {"target_modules": ["attn"]}, "lora can't adapt", "[c_attn, c_proj, c_fc]"),
        ("gpt2", "lora", {"target_modules": r".*\.h\.0.*"}, "can't adapt", "[c_attn, c_proj, c_fc]"),
        ("opt", "lora", {"target_modules": ["embed_positions"]}, "lora can't adapt", "q_proj"),
        ("biogpt", "lora", {"target_modules": ["output_projection"]}, "on the output head", "output_proj"),
        ("rwkv", "lora", {"target_modules": ["head"]}, "on the output head", "modules_to_save: [head]"),
        ("mamba", "trainable_tokens", {"token_indices": [3]}, "output head", "trainable_token_indices"),
        ("phimoe", "ia3", {"target_modules": ["q_proj", "router"]}, "ia3 can't adapt", "k_proj"),
        ("stablelm", "ia3", {}, "PEFT has no default modules of ia3", "[k_proj, v_proj, down_proj]"),
        ("olmo2", "ln_tuning", {}, "PEFT has no default modules", "post_attention_layernorm"),
        ("mamba", "lora", {"target_modules": ["in_proj", "out_proj"]}, "PEFT does not adapt out_proj",
         "[in_proj, x_proj]"),
        ("jamba", "lora", {"target_modules": ["dt_proj"]}, "dt_proj would get no gradient",
         "remove dt_proj from"),
        ("jamba", "vera", {"target_modules": r".*(dt|q)_proj"}, "dt_proj would get no gradient",
         "target_modules: [q_proj"),  # VeRA has no exclude_modules
        ("jamba", "lora", {"target_modules": r".*(dt|q)_proj"}, "dt_proj would get no gradient",
         "exclude_modules: [dt_proj]"),
        ("jamba", "lora", {"target_modules": r".*(dt|q|k)_proj", "exclude_modules": ["q_proj"]},
         "dt_proj would get no gradient", "exclude_modules: [q_proj, dt_proj]"),
        ("bamba", "ln_tuning", {"target_modules": ["input_layernorm", "norm"]}, "norm would get no gradient",
         "remove norm from"),
        ("mamba2", "ln_tuning", {"target_modules": ["norm"]}, "mixer.norm would get no gradient",
         "exclude_modules: [mixer.norm]"),
        ("mamba", "ln_tuning", {"target_modules": ["norm", "conv1d"]}, "conv1d would get no gradient",
         "remove conv1d from"),
        ("ctrl", "ia3", {}, "PEFT has no default modules of ia3", "[Wq, Wk, Wv, dense]"),
        ("llama", "lora", {"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]},
         "no module is left", "remove exclude_modules"),
        ("llama", "lora", {"target_modules": ["q_proj"], "target_parameters": ["norm.weight"]},
         "matches a parameter with 1 dimension", ""),
        ("llama", "lora", {"target_modules": ["q_proj"], "target_parameters": ["q_proj.weight"]},
         "`target_modules` adapts the module of", "remove q_proj.weight"),
        ("llama", "lora", {"trainable_token_indices": {"wte": [3]}}, '"wte" matches no module', ""),
        ("deepseek_v3", "lora", {"target_modules": ["gate_proj"]}, "only together",
         "[gate_proj, up_proj]"),
        ("mixtral", "lora", {"target_modules": "all-linear-and-experts", "lora_dropout": 0.1},
         "no lora_dropout", "remove lora_dropout, or target_modules: all-linear"),
        ("mixtral", "lora", {"target_modules": ["w1", "w2", "w3"], "use_dora": True}, "no use_dora",
         "adapter.type: lora, or target_modules: [q_proj"),
        ("dbrx", "lora", {"target_modules": "all-linear-and-experts"}, "can't adapt the experts of dbrx",
         "all-linear"),
    ],
)  # fmt: skip
def test_name_that_does_not_train_is_refused_with_a_remedy(
    family: str, peft: str, options: dict[str, Any], what: str, fix: str
) -> None:
    found = problem(family, options, peft)
    assert what in found.what and fix in found.fix


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "gpt2", "qwen3_moe", "opt", "rwkv"])
def test_suggested_targets_are_accepted(family: str) -> None:
    """Each list of targets that a message offers trains."""
    names = names_of(family)
    for options in (
        {"target_modules": "all-linear"},
        {"target_modules": ["no_such"]},
        {"target_modules": ".*"},
    ):
        for found in name_problems.check_options(options, names, "lora"):
            key, _, listed = found.fix.partition(": [")
            if key in ("target_modules", "exclude_modules"):
                offered = {**options, key: listed.rstrip("]").split(", ")}
                assert name_problems.check_options(offered, names, "lora") == [], found.fix


def test_targets_of_layers_follow_pefts_rule() -> None:
    names = names_of("gpt2")
    options = {"target_modules": ["c_attn"], "layers_to_transform": [1], "layers_pattern": "h"}
    assert target_modules.targeted(options, names) == ["transformer.h.1.attn.c_attn"]
    options = {"target_modules": r".*c_attn", "exclude_modules": r".*h\.0\..*"}
    assert target_modules.targeted(options, names) == ["transformer.h.1.attn.c_attn"]
    options = {"target_modules": ["c_proj"], "modules_to_save": ["mlp"]}
    assert {name.split(".")[3] for name in target_modules.targeted(options, names)} == {"attn"}
