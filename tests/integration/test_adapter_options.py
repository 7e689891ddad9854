"""Keys of an adapter's section: first weights, ranks, LoRA+, trained rows, names, going on."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file

from finetune.cli import main
from finetune.export import merging
from finetune.preflight import checker
from finetune.run_folder.run_folder import RunFolder
from support.paths import DATA, MODEL, QUICKSTART
from support.runs import run_checks
from support.soak import soak_except

# Said by peft 0.21.2: PiSSA and its kin change the base, and are converted here (tuners/lora/model.py); the
# hooks of LoRA-GA sit on a model whose inputs need no gradient (tuners/lora/loraga.py); a converted CorDA has
# its config still (tuners/lora/config.py); EVA would save memory with weights on the meta device
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*changes the base weights of the model",
    "ignore:Full backward hook is firing",
    "ignore:`corda_config` specified",
    "ignore:lora with eva initialization",
)

PLAIN: list[RunFolder] = []  # a run on the base as it was published, trained once


@pytest.mark.parametrize(
    "init", soak_except(["pissa", "lora_ga"], ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga"])
)
def test_first_weights_out_of_the_base_s_are_saved_as_plain_lora(init: str, train, two_layers) -> None:
    """The base moved into the adapter; what is saved loads on the base as it was published."""
    options = (f"adapter.init_lora_weights={init}", "adapter.r=8", f"model.name={two_layers}")
    run = train(*options, "train.max_steps=2", "train.learning_rate=1e-3")
    got = run_checks(run)
    assert all(check["passed"] for check in got.values())
    assert got["adapter.init_lora_weights"]["actual"].startswith(f"{init}: logits of one batch differ by")
    assert float(got["saved weights"]["actual"]) < 1e-5
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    assert config["init_lora_weights"] is True and config["r"] == 16, "twice the rank, and nothing to redo"
    before, after = run.read("eval.json")["base"]["loss"], run.read("eval.json")["tuned"]["loss"]
    assert after < before
    if not PLAIN:
        PLAIN.append(train(f"model.name={two_layers}", name="plain"))
    assert before == PLAIN[0].read("eval.json")["base"]["loss"], "the base is the published one"
    assert merging.run(run.path, dtype="float32")["against_tuned"]["relative"] < 1e-3


def test_eva_puts_ranks_where_the_inputs_vary(train, two_layers) -> None:
    options = ("adapter.init_lora_weights=eva", "adapter.r=4", "adapter.target_modules=[q_proj, down_proj]")
    run = train(*options, f"model.name={two_layers}", "train.max_steps=2", "train.learning_rate=1e-2")
    assert all(check["passed"] for check in run_checks(run).values())
    ranks = {
        len(tensor)
        for name, tensor in load_file(run.adapter / "adapter_model.safetensors").items()
        if "lora_A" in name
    }
    assert len(ranks) > 1, "every layer has the same rank: nothing was looked at"


def test_loftq_needs_a_gpu_and_says_so(train, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it runs: tests/gpu")
    train("adapter.type=qlora", "adapter.init_lora_weights=loftq", code=3)
    assert "CUDA" in capsys.readouterr().err


def test_an_initialization_that_did_nothing_stops_the_run() -> None:
    """The run check tells prepared weights from LoRA's random initialization."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from finetune.adapters import initialization

    for init, prepared in ((True, False), ("gaussian", False), ("olora", True), ("orthogonal", True)):
        base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=init, target_modules=["q_proj"])
        assert initialization._prepared(get_peft_model(base, config)) is prepared, init


def test_loraplus_teaches_b_faster(train, two_layers) -> None:
    slow = train(f"model.name={two_layers}", "train.max_steps=2", name="slow")
    fast = train("adapter.loraplus_lr_ratio=16", f"model.name={two_layers}", "train.max_steps=2", name="fast")
    assert run_checks(fast)["adapter.loraplus_lr_ratio"]["actual"] == "A 0.004, B 0.064"

    def size(run: RunFolder, part: str) -> float:
        tensors = load_file(run.adapter / "adapter_model.safetensors")
        return sum(float(tensor.abs().sum()) for name, tensor in tensors.items() if part in name)

    assert size(fast, "lora_B") > 4 * size(slow, "lora_B")


def test_rslora_scales_by_the_root_of_r(train, two_layers) -> None:
    run = train("adapter.type=rslora", f"model.name={two_layers}")
    assert run_checks(run)["adapter.type"]["actual"] == "LORA with use_rslora"
    assert json.loads((run.adapter / "adapter_config.json").read_text())["use_rslora"] is True


def test_ranks_layers_and_parameters_as_peft_has_them(train, two_layers) -> None:
    run = train(
        "adapter.rank_pattern={q_proj: 4}",
        "adapter.alpha_pattern={q_proj: 8}",
        "adapter.target_modules=[q_proj, v_proj]",
        "adapter.layers_to_transform=[1]",
        "adapter.exclude_modules=[v_proj]",
        "adapter.target_parameters=[down_proj.weight]",
        f"model.name={two_layers}",
        "train.max_steps=2",
    )
    got = run_checks(run)
    assert got["adapter.target_modules"]["actual"] == "q_proj 1"
    assert got["adapter.rank_pattern, alpha_pattern"]["actual"] == "r=4 x2 1"
    assert got["adapter.target_parameters"]["actual"] == "2 parameters"
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(run.adapter / "adapter_model.safetensors").items()
    }
    assert shapes["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"] == (4, 256)
    assert not any("layers.0.self_attn" in name for name in shapes)


@pytest.mark.parametrize("head", ["two_layers", "untied"])
def test_new_tokens_train_their_own_rows(head: str, train, request, tmp_path) -> None:
    folder = request.getfixturevalue(head)
    data = tmp_path / "rows.jsonl"
    lines = (DATA / "train.jsonl").read_text().splitlines()[:96]
    data.write_text("\n".join(line.replace("type", "<kind>") for line in lines) + "\n")
    options = (
        f"model.name={folder}",
        "model.add_tokens=['<kind>']",
        f"data.name={data}",
        "train.max_steps=5",
    )
    run = train(*options, "adapter.target_modules=[q_proj]", "train.learning_rate=1e-2")
    got = run_checks(run)
    assert all(check["passed"] for check in got.values())
    assert got["model.add_tokens"]["actual"].startswith("1 embedding rows")
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    trained = [name for name in tensors if "trainable_tokens" in name]
    assert len(trained) == (1 if head == "two_layers" else 2), "the head's rows too, where it has its own"
    assert sum(tensor.numel() for tensor in tensors.values()) < 50_000, "no whole embedding is saved"
    report = merging.run(run.path, dtype="float32")
    assert report["against_tuned"]["largest"] < 1e-5 * report["against_tuned"]["scale"]


def test_a_new_token_that_is_none_is_refused(capsys, train) -> None:
    train("model.add_tokens=['the']", code=2)
    assert "the tokenizer has these tokens already" in capsys.readouterr().err


def test_a_type_that_can_t_train_rows_says_how_to(train, capsys) -> None:
    train("adapter.type=ia3", "model.add_tokens=['<kind>']", code=2)
    assert "modules_to_save: [embed_tokens, lm_head]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("base", "saved", "says"),
    [
        ("two_layers", ["[embed_tokens]"], "but not in the output head"),
        ("untied", ["[embed_tokens]", "adapter.ensure_weight_tying=true"], "but not in the output head"),
        ("untied", ["[embed_tokens, lm_head]"], ""),
        ("untied", ["[model.embed_tokens]"], "but not in the output head"),
        ("untied", ["[model.embed_tokens, lm_head]"], ""),
        ("two_layers", ["[embed_tokens, lm_head]"], ""),
        ("two_layers", ["[embed_tokens]", "adapter.ensure_weight_tying=true"], ""),
    ],
)
# PEFT warns of ties that are lost or asked for: that is looked at (peft 0.21.2, tuners/tuners_utils.py)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:You have requested")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_new_rows_train_in_the_head_too_or_it_is_refused(base, saved, says, train, request, capsys) -> None:
    whole, *more = saved
    options = ("model.add_tokens=['<kind>']", f"adapter.modules_to_save={whole}", *more)
    given = (*options, f"model.name={request.getfixturevalue(base)}", "train.max_steps=1")
    if says:
        train(*given, code=2)
        assert says in (said := capsys.readouterr().err) and "[embed_tokens, lm_head]" in said
        return
    got = run_checks(train(*given))
    assert got["model.add_tokens"]["actual"] == "1 embedding rows train" and all(
        one["passed"] for one in got.values()
    )


@pytest.mark.parametrize("rows", ["model.add_tokens=['<kind>']", "adapter.trainable_token_indices=[5]"])
def test_rows_that_train_beside_a_tied_head_that_does_are_refused(rows, train, capsys, monkeypatch) -> None:
    """PEFT ends in a traceback where it saves them."""
    given = [str(QUICKSTART), rows, "adapter.modules_to_save=[lm_head]", f"model.name={MODEL}"]
    for command in ("check", "plan", "train"):
        assert main.main([command, *given]) == 2
        assert "[embed_tokens, lm_head]" in capsys.readouterr().err
    assert main.main(["check", *given[:2], "adapter.modules_to_save=[lm_head, lm_haed]", given[3]]) == 2
    said = capsys.readouterr().err
    assert "[embed_tokens, lm_head, lm_haed]" in said and "lm_haed" in said  # all at once
    monkeypatch.setattr(checker, "check_without_examples", lambda recipe: [])  # as of a base on the Hub
    train(*given[1:], code=2)
    assert "[embed_tokens, lm_head]" in capsys.readouterr().err


def test_whole_modules_train_beside_the_adapter(train, untied) -> None:
    run = train(
        "adapter.modules_to_save=[lm_head]",
        "adapter.target_modules=[q_proj]",
        f"model.name={untied}",
        "train.max_steps=2",
    )
    got = run_checks(run)
    assert got["adapter.modules_to_save"]["actual"] == "1 tensors train"
    assert "modules_to_save 1 of 1" in got["trained weights changed"]["actual"]


def test_biases_of_the_base_train_and_the_base_is_still_the_base(train, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL)
    config = model.config
    config.attention_bias, config.num_hidden_layers = True, 2
    biased = type(model)(config)
    biased.load_state_dict(model.state_dict(), strict=False)
    folder = tmp_path / "biased"
    biased.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    options = ("adapter.target_modules=[q_proj]", f"model.name={folder}", "train.learning_rate=1e-2")
    run = train("adapter.bias=all", *options, "train.max_steps=2", name="all")
    none = train(*options, "train.max_steps=2", name="none")
    assert "weights 8 of 8" in run_checks(run)["trained weights changed"]["actual"]
    assert run.read("eval.json")["base"] == none.read("eval.json")["base"]
    assert run.read("eval.json")["tuned"]["loss"] < none.read("eval.json")["tuned"]["loss"]


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("adapter.target_modules=[q_porj, v_proj]", "adapter.target_modules", "q_proj"),
        ("adapter.target_modules=[a, b]", "adapter.target_modules", "down_proj"),
        ("adapter.target_modules=[lm_head]", "adapter.target_modules", "modules_to_save: [lm_head]"),
        ("adapter.modules_to_save=[lm_haed]", "adapter.modules_to_save", "lm_head"),
        ("adapter.rank_pattern={q_porj: 4}", "adapter.rank_pattern.q_porj", "q_proj"),
        ("adapter.rank_pattern={layers.1.mlp.down_proj: 8, down_proj: 4}", "_pattern", '"(layers.1.mlp.'),
        ("adapter.alpha_pattern={v_proj: 8, 'q_proj|v_proj': 4}", "_pattern", "the same module"),
        ("adapter.exclude_modules=[o_prj]", "adapter.exclude_modules", "o_proj"),
        ("adapter.exclude_modules=['layers.0.*']", "adapter.exclude_modules", "matches no module"),
        ("adapter.target_parameters=[up_proj.wieght]", "adapter.target_parameters", "up_proj.weight"),
        ("adapter.layers_to_transform=[0, 6]", "adapter.layers_to_transform", "0 to 5"),
    ],
)
def test_a_name_that_nothing_answers_to_is_an_error(override: str, key: str, says: str, capsys) -> None:
    assert main.main(["check", str(QUICKSTART), override]) == 2
    said = capsys.readouterr().err
    assert key in said and says in said


def test_a_rank_for_a_module_without_an_adapter_is_an_error(capsys) -> None:
    given = ["adapter.rank_pattern={q_proj: 4}", "adapter.target_modules=[v_proj, o_proj]"]
    assert main.main(["check", str(QUICKSTART), *given]) == 2
    said = capsys.readouterr().err
    assert "adapter.rank_pattern.q_proj: " in said and "v_proj, o_proj" in said


def test_patterns_that_overlap_in_the_order_of_the_alphabet_are_taken() -> None:
    """As PEFT saves them; and in another, with one value for what both match."""
    for pattern in ("{(layers.1.mlp.down_proj): 8, down_proj: 4}", "{mlp.*: 4, q_proj|up_proj: 8}"):
        assert main.main(["check", str(QUICKSTART), f"adapter.rank_pattern={pattern}"]) == 0
    same = "adapter.rank_pattern={v_proj: 8, q_proj|v_proj: 8}"
    assert main.main(["check", str(QUICKSTART), same]) == 0


@pytest.mark.parametrize("first", ["q_proj", "^model.layers.0.self_attn.q_proj", "self_attn.q_proj"])
@pytest.mark.parametrize("second", ["(q|v)_proj", "((q)|v)_proj", ".*q_proj", "[qv]_proj"])
def test_what_is_advised_of_patterns_is_taken(first: str, second: str, capsys) -> None:
    """And is what PEFT takes first then, of both orders."""
    given = {first: 4, second: 8}
    if sorted(given)[0] != first:
        assert main.main(["check", str(QUICKSTART), f"adapter.rank_pattern={json.dumps(given)}"]) == 2
        advised = re.findall(r'help: +"(.*)" in place of', capsys.readouterr().err)[0]
        given = {advised: 4, second: 8}
    assert main.main(["check", str(QUICKSTART), f"adapter.rank_pattern={json.dumps(given)}"]) == 0
    for keys in (list(given), sorted(given)):
        assert given[get_pattern_key(keys, "model.layers.0.self_attn.q_proj")] == 4


def test_tokens_the_model_has_not_are_refused(train, capsys) -> None:
    train("adapter.trainable_token_indices=[3, 99999]", code=2)
    assert "99999" in capsys.readouterr().err


def copy_of_model(folder: Path) -> Path:
    """The embedded model's files without its weights."""
    folder.mkdir()
    for path in MODEL.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_layers_that_differ_are_said(tmp_path, capsys) -> None:
    folder = copy_of_model(tmp_path / "uneven")
    (folder / "model.safetensors").write_bytes((MODEL / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config |= {"model_type": "qwen3_moe", "mlp_only_layers": [0, 3], **experts}
    (folder / "config.json").write_text(json.dumps(config))
    assert main.main(["check", str(QUICKSTART), f"model.name={folder}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mlp.gate_proj, mlp.up_proj, mlp.down_proj get no adapter, because PEFT takes" in said
    named = "adapter.target_modules=.*layers\\.[0-2].*q_proj"
    assert main.main(["check", str(QUICKSTART), f"model.name={folder}", named]) == 0
    assert "layers differ: q_proj in 3 of 6" in capsys.readouterr().out


def test_weight_that_the_files_lack_is_said_by_check_and_train(tmp_path, capsys) -> None:
    from safetensors.torch import save_file

    folder = copy_of_model(tmp_path / "lacking")
    tensors = load_file(MODEL / "model.safetensors")
    del tensors["model.layers.3.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    options = [f"model.name={folder}", f"train.output_dir={tmp_path / 'run'}"]
    said = []
    for command in ("check", "train"):
        assert main.main([command, str(QUICKSTART), *options]) == 2
        said.append(capsys.readouterr().err)
        assert "lack 1 of the model's weights" in said[-1] and "3.self_attn.q_proj" in said[-1]
    assert said[0] == said[1]


def test_training_goes_on_from_an_adapter(train, two_layers) -> None:
    options = (f"model.name={two_layers}", "train.learning_rate=1e-2")
    first = train(*options, "train.max_steps=6", name="first")
    second = train(
        f"adapter.init_from={first.path}", *options, "adapter.r=16", "train.max_steps=6", name="second"
    )
    got = run_checks(second)
    assert got["adapter.init_from"]["actual"].startswith("all 28") and all(r["passed"] for r in got.values())
    before, after = (run.read("eval.json")["tuned"]["loss"] for run in (first, second))
    assert after < before
    lines = [json.loads(line) for line in (second.path / "metrics.jsonl").read_text().splitlines()]
    earlier = [json.loads(line) for line in (first.path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] < earlier[0]["loss"], "it began where the other ended"


def test_all_layers_asked_of_an_adapter_that_has_fewer(train, two_layers, capsys) -> None:
    """What the adapter leaves out by an option of its own is not asked for."""
    base = (f"model.name={two_layers}", "train.max_steps=1", "adapter.target_modules=all-linear")
    few = train(*base[:2], "adapter.target_modules=[q_proj]", name="few")
    train(*base, f"adapter.init_from={few.path}", code=5, name="more")
    assert "run check failed" in capsys.readouterr().err
    but = train(*base, "adapter.exclude_modules=[q_proj]", name="but")
    train(*base, f"adapter.init_from={but.path}", name="on")


def test_what_training_can_t_go_on_from(train, two_layers, tmp_path, capsys) -> None:
    lora = train(f"model.name={two_layers}", name="lora")
    ada = train("adapter.type=adalora", f"model.name={two_layers}", "train.max_steps=2", name="ada")
    (tmp_path / "empty").mkdir()
    for options, says in (
        ((f"adapter.init_from={lora.path}", "adapter.type=dora", f"model.name={two_layers}"), "another type"),
        (
            (f"adapter.init_from={lora.path}", "adapter.lora_alpha=64", f"model.name={two_layers}"),
            "the saved adapter has another value",
        ),
        ((f"adapter.init_from={lora.path}",), "trained on another base model"),
        ((f"adapter.init_from={ada.path}", "adapter.type=adalora"), "can't continue to train"),
        ((f"adapter.init_from={tmp_path / 'empty'}",), "holds no adapter"),
        (("adapter.init_from=./nothing/there",), "does not exist"),
    ):
        capsys.readouterr()
        assert main.main(["check", str(QUICKSTART), *options]) == 2, options
        said = capsys.readouterr().err
        assert says in said and "adapter." in said


def test_stacking_on_another_base_has_to_be_asked_for(train, two_layers, untied) -> None:
    lora = train(f"model.name={two_layers}", "train.max_steps=2", name="lora")
    options = (f"adapter.init_from={lora.path}", f"model.name={untied}")
    train(*options, code=2, name="refused")
    run = train(*options, "adapter.from_other_base=true", "train.max_steps=2", name="asked")
    assert run_checks(run)["base model of the adapter"]["actual"] == str(untied)


def test_dora_on_rows_of_zeros_is_finite(train, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, model = tmp_path / "zeros", AutoModelForCausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3] = 0
        model.model.layers[5].mlp.down_proj.weight[:5] = 0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    run = train("adapter.type=dora", f"model.name={folder}", "train.max_steps=2")
    got = run_checks(run)
    assert (
        got["DoRA on rows of zeros"]["actual"].startswith("6 given") and got["saved weights"]["actual"] == "0"
    )


def test_dora_s_dropout_is_what_we_say_of_it(two_layers, capsys) -> None:
    """PEFT: m/||W+sBA|| s x'A'B' + (m/||W+sBA|| - 1) x'W' + xW', where x' = dropout(x), and x in the last."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(two_layers, dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM", use_dora=True, lora_dropout=0.5, target_modules=["q_proj"], r=4
    )
    layer = get_peft_model(base, config).base_model.model.model.layers[0].self_attn.q_proj.train()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.manual_seed(0)
    with torch.no_grad():
        b.normal_()
        layer.lora_magnitude_vector["default"].weight.mul_(1.5)
    x = torch.randn(3, 256)
    torch.manual_seed(1)
    got = layer(x)
    torch.manual_seed(1)
    dropped = torch.nn.functional.dropout(x, 0.5)
    w, s = layer.base_layer.weight, layer.scaling["default"]
    ratio = layer.lora_magnitude_vector["default"].weight / torch.linalg.norm(w + s * b @ a, dim=1)
    wanted = x @ w.T + (ratio - 1) * (dropped @ w.T) + ratio * (dropped @ a.T @ b.T) * s
    assert torch.allclose(got, wanted, atol=1e-5)
    assert main.main(["check", str(QUICKSTART), "adapter.type=dora", "adapter.lora_dropout=0.1"]) == 0
    assert "applies dropout also to the inputs of the base layer" in capsys.readouterr().out
