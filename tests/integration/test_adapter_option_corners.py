"""What a fresh reader found: options that looked well and did something else, or nothing."""

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.adapters import continue_from, peft_configs
from finetune.cli import main
from finetune.core.errors import UserError
from finetune.models import tokenizer_setup
from finetune.preflight import checker
from finetune.recipe import loader
from finetune.recipe.schema import Model
from finetune.run_folder import settings_text
from support.paths import MODEL, QUICKSTART
from support.runs import run_checks
from support.soak import soak_except

# PEFT warns of what is looked at here: PiSSA's kin, a bias that can't be merged, LoRA on tied embeddings
# (peft 0.21.2, tuners/lora/), layers of norms (tuners/ln_tuning/layer.py)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
SAVED, TYING = "adapter.modules_to_save", ["adapter.ensure_weight_tying=true"]
TIED, WHOLE = {"ensure_weight_tying": True}, "model.embed_tokens"  # as PEFT saves what is tied
RANKS = "adapter.rank_pattern={q_proj: 4}"


@pytest.mark.parametrize("init", soak_except(["pissa"], ["pissa", "olora"]))
def test_weights_out_of_a_bf16_base_s_verify(init: str, train, two_layers, in_bf16: str) -> None:
    """The rest of the base is rounded to bf16 without them; what was trained is saved bit for bit."""
    given = [f"adapter.init_lora_weights={init}", f"model.name={two_layers}", "data.validation=null"]
    run = train(in_bf16, *given)
    got = run_checks(run)
    assert got["saved tensors"]["actual"] == "all 28" and all(check["passed"] for check in got.values())


def test_rotations_that_peft_projects_in_each_forward_verify(train, two_layers) -> None:
    given = ("adapter.type=oft", "adapter.coft=true", "adapter.eps=0.1", "train.max_steps=4")
    run = train(*given, f"model.name={two_layers}")
    got = run_checks(run)
    assert got["saved weights"]["expected"] == "the live model's logits within 1e-06"
    assert all(check["passed"] for check in got.values())
    assert main.main(["merge", str(run.path), "--quiet"]) == 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["adapter.init_lora_weights=OLoRA"], "olora"),
        (["adapter.init_lora_weights=pisa"], "pissa"),
        (
            ["adapter.init_lora_weights=pissa", "adapter.modules_to_save=[norm]"],
            "pissa excludes modules_to_save",
        ),
        (
            ["adapter.init_lora_weights=olora", "adapter.trainable_token_indices=[5]"],
            "olora excludes trainable_token_indices",
        ),
        (["adapter.init_lora_weights=pissa", "adapter.bias=all"], "pissa excludes bias"),
        (["adapter.init_lora_weights=corda", "model.add_tokens=['<a>']"], "corda excludes model.add_tokens"),
        (
            ["adapter.init_lora_weights=pissa", "adapter.target_modules=[embed_tokens, q_proj]"],
            "pissa excludes an adapter on the",
        ),
        (
            ["adapter.init_lora_weights=olora", "adapter.target_modules=.*(embed_tokens|q_proj)"],
            "olora excludes an adapter on the",
        ),
        (["adapter.init_lora_weights=pissa", "adapter.use_rslora=true", RANKS], "with rank_pattern"),
        (
            ["adapter.init_lora_weights=eva", "adapter.rank_pattern={q_proj: 4}"],
            "EVA excludes `rank_pattern`",
        ),
        (["adapter.eva_config.rho=2.0"], "has no effect without `init_lora_weights: eva`"),
        (["adapter.type=ia3", "model.add_tokens=['<a>']"], "ia3 can't train the embeddings of new tokens"),
        (
            ["adapter.type=prompt_tuning", "adapter.modules_to_save=[embed_tokens, lm_head]"],
            "can't train the embeddings",
        ),
        (["adapter.type=p_tuning", f"{SAVED}=[{WHOLE}]"], "can't train the embeddings"),
        (["adapter.type=prompt_tuning", f"{SAVED}=[gpt_neox.embed_in]"], "can't train the embeddings"),
        (["adapter.type=prompt_tuning", f"{SAVED}=[word_embeddings]"], "can't train the embeddings"),
        (["adapter.type=p_tuning", "model.add_tokens=['<a>']"], "help:      adapter.type: lora"),
        (["adapter.type=adalora", "train.max_steps=6", "adapter.tinit=5"], "no step is left"),
        (["adapter.type=adalora", "adapter.orth_reg_every=9999"], "never compute the orthogonality term"),
        (["adapter.type=prompt_tuning", "adapter.prompt_tuning_init=BANANA"], "RANDOM"),
        (["model.add_tokens=['<a>', '<b>', '<a>']"], "model.add_tokens: the list has a token twice"),
        (["adapter.layer_replication=[[0, 4], [2, 6]]"], "finetune does not support this key of PEFT"),
        (["adapter.kasa_config={beta: 0.1}"], "loss terms of KaSA"),
        (["adapter.type=dora", "adapter.monteclora_config.kl_loss_weight=0.1"], "loss term of MonteCLoRA"),
        (["adapter.velora_config={}"], "the projection that VeLoRA computes"),
        (["adapter.type=pvera", "adapter.generator_seed=0"], "`train.seed` is the seed"),
        (["adapter.type=pvera", "adapter.sample_at_inference=true"], "would give other outputs"),
        (
            ["adapter.type=vblora", "adapter.save_only_topk_weights=true"],
            "the saved adapter would lack weights",
        ),
        (["adapter.type=adamss", "adapter.use_asa=true"], "does not update the masks"),
        (
            ["adapter.type=qlora", "adapter.modules_to_save=[q_proj]"],
            "layers that the nf4 base model quantizes",
        ),
        (
            ["model.quantization=torchao_int8", "adapter.modules_to_save=[norm, q_proj]"],
            "the torchao_int8 base model quantizes",
        ),
    ],
)
def test_check_knows_what_can_t_work(overrides: list[str], says: str, capsys) -> None:
    assert main.main(["check", str(QUICKSTART), *overrides]) == 2
    assert says in capsys.readouterr().err


def test_first_weights_out_of_the_base_s_are_for_all_linear_layers() -> None:
    assert main.main(["check", str(QUICKSTART), "adapter.init_lora_weights=pissa"]) == 0


def test_a_key_of_lora_that_adalora_does_not_read_is_left_out_and_said(capsys) -> None:
    assert main.main(["check", str(QUICKSTART), "adapter.type=adalora", "adapter.use_rslora=true"]) == 0
    assert "adapter.use_rslora: finetune ignores True: adalora has no such key" in capsys.readouterr().out


def test_what_peft_s_config_refuses_is_no_traceback(train, two_layers, capsys) -> None:
    """The quickstart's r and a block size of one's own: PEFT takes one of the two."""
    given = ["adapter.type=oft", "adapter.oft_block_size=4", f"model.name={two_layers}"]
    train(*given, code=2)
    assert "PEFT does not accept it" in capsys.readouterr().err


def test_new_tokens_under_full_fine_tuning_are_evaluated_from_what_was_saved(train, two_layers) -> None:
    run = train("adapter.type=full", "model.add_tokens=['<a>']", f"model.name={two_layers}")
    assert math.isfinite(run.read("eval.json")["tuned"]["loss"])
    assert main.main(["evaluate", str(run.path), "--quiet"]) == 0


def test_rows_asked_for_and_new_ones_train_together(train, two_layers, tmp_path) -> None:
    lines = (MODEL.parent / "data" / "train.jsonl").read_text().splitlines()[:64]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(line.replace("type", "<a><b>") for line in lines) + "\n")
    options = ("model.add_tokens=['<a>', '<b>']", "adapter.trainable_token_indices=[300]")
    run = train(*options, f"model.name={two_layers}", f"data.name={data}", "adapter.modules_to_save=[norm]")
    got = run_checks(run)
    assert got["model.add_tokens"]["actual"] == "2 embedding rows train"
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    (rows,) = (tensor for name, tensor in tensors.items() if "trainable_tokens" in name)
    assert len(rows) == 3


def test_part_of_peft_s_own_config_survives_the_run_folder(tmp_path) -> None:
    given = ["adapter.init_lora_weights=eva", "adapter.eva_config.rho=1.5"]
    loaded = loader.load(QUICKSTART, given)
    path = tmp_path / "again.yaml"
    path.write_text(settings_text.resolved_yaml(loaded, {}))
    assert loader.load(path).adapter.options()["eva_config"] == {"rho": 1.5}


def test_an_adapter_that_changed_its_base_is_not_gone_on_from(two_layers, tmp_path, capsys) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(two_layers, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights="pissa", target_modules=["q_proj"])
    get_peft_model(base, config).save_pretrained(tmp_path / "pissa")
    options = [f"adapter.init_from={tmp_path / 'pissa'}", f"model.name={two_layers}"]
    assert main.main(["check", str(QUICKSTART), *options]) == 2
    assert "needs a modified base model" in capsys.readouterr().err


def test_an_adapter_with_an_option_that_is_refused_is_not_gone_on_from(saved_lora, capsys) -> None:
    config = saved_lora / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "kasa_config": {"beta": 0.1}}))
    assert (
        main.main(["check", str(QUICKSTART), f"adapter.init_from={saved_lora}", f"model.name={MODEL}"]) == 2
    )
    assert "loss terms of KaSA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ({"use_rslora": True}, ["adapter.use_rslora=true"]),
        ({**TIED, "modules_to_save": ["embed_tokens", WHOLE]}, [*TYING, f"{SAVED}=[embed_tokens]"]),
        ({**TIED, "modules_to_save": ["embed_tokens", WHOLE]}, [*TYING, f"{SAVED}=[embed_tokens, lm_head]"]),
        ({**TIED, "modules_to_save": [WHOLE]}, [*TYING, f"{SAVED}=[lm_head]"]),
        (
            {**TIED, "target_modules": ["q_proj", "embed_tokens", WHOLE]},
            [*TYING, "adapter.target_modules=[embed_tokens, q_proj]"],
        ),
    ],
)
def test_the_recipe_that_made_an_adapter_goes_on_from_it(saved, given, saved_lora) -> None:
    """By the options in its config. Its tensors, which PEFT would compare, are those of another config."""
    config = saved_lora / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **saved}))
    options = [
        f"adapter.init_from={saved_lora}",
        f"model.name={MODEL}",
        "adapter.r=2",
        "adapter.lora_alpha=8",
    ]
    recipe = loader.load(QUICKSTART, [*options, *given])
    assert checker._adapter(recipe, checker._config(recipe.model)) == []


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens", WHOLE]}, "target_modules=[q_proj]"),
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens", WHOLE]}, "target_modules=[q_proj, v_proj]"),
        ({"modules_to_save": ["norm", "embed_tokens", WHOLE]}, "modules_to_save=[embed_tokens]"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save=[embed_tokens, lm_head]"),  # as if not tied
        ({"layers_to_transform": [0, 1]}, "layers_to_transform=[0]"),
    ],
)
def test_an_adapter_of_more_than_the_recipe_is_not_gone_on_from(saved, given, saved_lora, capsys) -> None:
    """It is opened by its own config: all that it says would train."""
    config = saved_lora / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **TIED, **saved}))
    options = [
        f"adapter.init_from={saved_lora}",
        f"model.name={MODEL}",
        "adapter.r=2",
        "adapter.lora_alpha=8",
    ]
    assert main.main(["check", str(QUICKSTART), *options, *TYING, f"adapter.{given}"]) == 2
    assert (
        f"adapter.{given.partition('=')[0]}: the saved adapter has another value" in capsys.readouterr().err
    )


def test_vectors_before_the_prompt_are_not_said_to_merge(saved_lora, capsys) -> None:
    given = [f"adapter.init_from={saved_lora}", "adapter.type=prompt_tuning", f"model.name={MODEL}"]
    assert main.main(["check", str(QUICKSTART), *given]) == 2
    said = capsys.readouterr().err
    assert "can't continue to train" in said and "finetune merge" not in said


def test_what_peft_adds_to_its_config_is_not_added_to_the_recipe() -> None:
    """As it does to modules_to_save, of what is tied to them."""
    section = loader.load(QUICKSTART, ["adapter.modules_to_save=[embed_tokens]"]).adapter
    made: Any = peft_configs.peft_config(section, 1, {})
    made.modules_to_save.append("lm_head")
    assert section.options()["modules_to_save"] == ["embed_tokens"]


@pytest.mark.parametrize(
    "rows",
    [
        {"trainable_token_indices": [4096, 4097]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["model.embed_tokens", "lm_head"]},
    ],
)
def test_the_tokens_of_an_adapter_that_is_gone_on_from_are_stated(rows, saved_lora) -> None:
    config = saved_lora / "adapter_config.json"
    made_with = tokenizer_setup.load_tokenizer(Model(name=str(MODEL), add_tokens=["<b>", "<a>"]))
    made_with.save_pretrained(saved_lora)
    config.write_text(json.dumps({**json.loads(config.read_text()), **rows}))
    source = loader.load(QUICKSTART, [f"adapter.init_from={saved_lora}"]).adapter

    def checked(*added: str) -> None:
        tokenizer = tokenizer_setup.load_tokenizer(Model(name=str(MODEL), add_tokens=list(added)))
        continue_from.check_tokens(source, added, tokenizer.get_vocab(), 4096)

    checked("<b>", "<a>")
    for added in ((), ("<a>", "<b>"), ("<b>",), ("<b>", "<a>", "<c>")):
        with pytest.raises(
            UserError, match=r'model.add_tokens(.|\n)*help:.*model.add_tokens: \["<b>", "<a>"\]'
        ):
            checked(*added)
    config.write_text(json.dumps({**json.loads(config.read_text()), **dict.fromkeys(rows)}))
    checked()  # as one made elsewhere, whose tokenizer has a padding token more


def test_training_goes_on_from_an_adapter_with_tokens_of_its_own(train, two_layers) -> None:
    options = ("model.add_tokens=['<a>', '<b>']", f"model.name={two_layers}", "train.max_steps=1")
    options += ("train.warmup_steps=0", "data.validation=null")
    first = train(*options, name="first")
    second = train(f"adapter.init_from={first.path}", *options, "adapter.r=16", name="second")
    got = run_checks(second)
    assert got["model.add_tokens"]["actual"] == "2 embedding rows train" and all(
        one["passed"] for one in got.values()
    )


@pytest.mark.parametrize("broken", ["config", "weights", "width"])
def test_a_broken_adapter_to_go_on_from_is_named(broken: str, train, two_layers, tmp_path, capsys) -> None:
    run = train(f"model.name={two_layers}")
    (run.path / "weights.json").unlink()  # it would show each change
    config = run.adapter / "adapter_config.json"
    says = {"config": "not JSON", "weights": "no adapter_model.safetensors", "width": "size mismatch"}[broken]
    if broken == "config":
        config.write_text("{")
    elif broken == "weights":
        (run.adapter / "adapter_model.safetensors").unlink()
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": 4}))
    capsys.readouterr()
    rank = "adapter.r=4" if broken == "width" else "adapter.r=16"
    train(f"adapter.init_from={run.path}", f"model.name={two_layers}", rank, code=2, name="second")
    said = capsys.readouterr().err
    assert says in said and "adapter" in said


def test_loraplus_leaves_no_weight_behind(train, two_layers) -> None:
    options = ("adapter.loraplus_lr_ratio=16", "adapter.target_modules=[embed_tokens, q_proj]")
    run = train(*options, f"model.name={two_layers}", "train.max_steps=4")
    assert run_checks(run)["adapter.loraplus_lr_ratio"]["actual"] == "A 0.004, B 0.064"


@pytest.mark.parametrize("options", [("adapter.modules_to_save=[norm]",), ("adapter.type=ln_tuning",)])
def test_whole_modules_move_under_bf16_too(options, train, two_layers, in_bf16: str) -> None:
    """A step of 2e-4 on a weight of 1 is nothing in bf16; they train in fp32 and are saved as they load."""
    given = [f"model.name={two_layers}", "train.learning_rate=2e-4", "data.validation=null"]
    run = train(in_bf16, *options, *given)
    got = run_checks(run)
    assert "5 of 5" in got["trained weights changed"]["actual"]
    assert all(check["passed"] for check in got.values())


def test_a_merge_that_peft_can_t_do_is_no_traceback(train, two_layers, capsys) -> None:
    run = train("adapter.lora_bias=true", f"model.name={two_layers}", "train.max_steps=4")
    capsys.readouterr()
    assert main.main(["merge", str(run.path)]) == 2
    assert "PEFT can't merge" in capsys.readouterr().err
