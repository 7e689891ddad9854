"""Loading, overriding and explaining recipes."""

import pytest

from finetune.core.errors import UserError
from finetune.data import source_loading
from finetune.preflight import checker
from finetune.recipe import loader, recipe_errors
from finetune.run_folder import settings_text
from support.adapters import ADAPTERS
from support.paths import QUICKSTART


def problems(path: object, *overrides: str) -> dict[str, str]:
    """Key -> whole message of each problem that loading a recipe gives."""
    with pytest.raises(UserError) as raised:
        loader.load(path, overrides)
    assert raised.value.code == 2
    return {problem.key or problem.where: str(problem) for problem in raised.value.problems}


def test_the_quickstart_says_what_it_will_do() -> None:
    loaded = loader.load(QUICKSTART)
    assert loaded.train.max_steps and loaded.data.validation
    assert loaded.train.passed_on()["logging_steps"] == 1
    assert loaded.adapter.options()["r"] == 16
    assert loaded.origin.set_by["adapter.r"] == "recipe"


def test_it_is_frozen() -> None:
    loaded = loader.load(QUICKSTART)
    with pytest.raises(ValueError, match="frozen"):
        loaded.train.seed = 1


@pytest.mark.parametrize("kind", ADAPTERS)
def test_one_key_swaps_the_adapter(kind: str) -> None:
    loaded = loader.load(QUICKSTART, [f"adapter.type={kind}"])
    assert loaded.adapter.type == kind
    assert loaded.origin.set_by["adapter.type"] == "override"
    assert ("r" in loaded.adapter.options()) == (kind not in ("ia3", "full"))


def test_a_key_of_another_type_is_left_out_and_named() -> None:
    loaded = loader.load(QUICKSTART, ["adapter.type=ia3"])
    assert any(
        notice.startswith("adapter.r: finetune ignores 16: ia3 has no such key")
        for notice in loaded.origin.notices
    )


def test_a_key_that_the_type_has_under_another_name_is_an_error(recipe_file) -> None:
    """It was left out: trained with another alpha than the recipe's. Where an override swaps the type it is
    said; what the new type has not at all (`r` of ia3) is left out however the type was swapped."""
    text = "model: {name: '{model}'}\ndata: {name: '{data}'}\nadapter: {type: KIND, r: 8, KEY: 64}\n"
    for kind, key, name in (
        ("lora", "alpha", "lora_alpha: 64"),
        ("dora", "alpha", "lora_alpha: 64"),
        ("loha", "lora_alpha", "alpha: 64"),
        ("randlora", "lora_alpha", "randlora_alpha: 64"),
    ):
        path = recipe_file(text.replace("KIND", kind).replace("KEY", key))
        said = problems(path)[f"adapter.{key}"]
        assert (
            f"{kind} has this key under another name" in said
            and f"help:      {name}" in said
            and f"{path}:3:" in said
        )
    assert (
        "help:      use `adapter.r`"
        in problems(path, "adapter.lora_alpha=null", "adapter.rank=8")["adapter.rank"]
    )
    swapped = loader.load(path, ["adapter.type=loha"]).origin.notices
    assert "adapter.lora_alpha: finetune ignores 64: loha has no such key. loha calls it `alpha`" in swapped
    path = recipe_file(text.replace("KIND", "ia3").replace("KEY", "lora_alpha"))
    assert "adapter.lora_alpha: finetune ignores 64: ia3 has no such key" in loader.load(path).origin.notices


def test_a_key_of_no_type_is_an_error() -> None:
    found = problems(QUICKSTART, "adapter.type=ia3", "adapter.lora_alhpa=3")
    assert "unknown key" in found["adapter.lora_alhpa"]


def test_an_override_displaces_its_rival() -> None:
    loaded = loader.load(QUICKSTART, ["train.num_train_epochs=2"])
    assert loaded.train.max_steps is None and loaded.train.num_train_epochs == 2
    assert any("train.max_steps" in notice for notice in loaded.origin.notices)
    loaded = loader.load(QUICKSTART, ["train.max_steps=7", "train.num_train_epochs=2", "train.max_steps=5"])
    assert loaded.train.max_steps == 5 and loaded.train.num_train_epochs is None


def test_what_an_override_leaves_unread_is_displaced(recipe_file) -> None:
    """In one file, or asked for beside it, it is an error."""
    text = "model: {name: '{model}'}\ndata: {name: '{data}'}\nadapter: {type: lora}\ntrain: "
    for key, value, override in (
        ("save_steps", "50", "train.save_strategy=epoch"),
        ("train_sampling_strategy", "group_by_length", "data.streaming=true"),
        ("data_seed", "1", "data.streaming=true"),
    ):
        loaded = loader.load(path := recipe_file(f"{text}{{{key}: {value}}}"), [override])
        assert f"train.{key}: finetune ignores {value}, because you override `" in loaded.origin.notices[0]
        assert not {**loaded.train.passed_on(), "save_steps": loaded.train.save_steps}.get(key)
        assert "no effect with" in problems(path, f"train.{key}={value}", override)[f"train.{key}"]
    for steps in (["train.save_strategy=steps"], ["train.save_strategy=epoch", "train.save_strategy=steps"]):
        assert loader.load(recipe_file(text + "{save_steps: 50}"), steps).train.save_steps
    found = problems(recipe_file(text + "3"), "data.streaming=true")
    assert "wrong type" in found["train"]


def test_values_of_overrides_are_yaml() -> None:
    loaded = loader.load(QUICKSTART, ["adapter.target_modules=[q_proj, v_proj]", "train.learning_rate=1e-4"])
    assert loaded.adapter.options()["target_modules"] == ["q_proj", "v_proj"]
    assert loaded.train.learning_rate == 1e-4


def test_every_problem_at_once_each_with_its_place(recipe_file) -> None:
    path = recipe_file(
        """model: {name: "{model}", torch_dtype: bfloat16}
data:
  name: "{data}"
  r: 16
adapter:
  type: lora
  lora_dropout: 1.5
train:
  learning_rat: 1e-4
  max_steps: ten
"""
    )
    found = problems(path)
    assert set(found) == {
        "model.torch_dtype",
        "data.r",
        "adapter.lora_dropout",
        "train.learning_rat",
        "train.max_steps",
    }
    assert f"{path}:1:" in found["model.torch_dtype"] and "mixed_precision" in found["model.torch_dtype"]
    assert "move it to `adapter:`" in found["data.r"] and f"{path}:4:3" in found["data.r"]
    assert "less than 1" in found["adapter.lora_dropout"] and "1.5" in found["adapter.lora_dropout"]
    assert "learning_rate" in found["train.learning_rat"] and f"{path}:9:3" in found["train.learning_rat"]
    assert "an integer" in found["train.max_steps"] and '"ten"' in found["train.max_steps"]


def test_keys_of_what_is_inside_a_section(recipe_file) -> None:
    """They were held against the keys of the section round it."""
    text = "model: {name: '{model}'}\nadapter: {type: lora}\ndata: "
    for data, key, at, fix in (
        ("{name: '{data}', expect: {dropd: 0.1}}", "data.expect.dropd", ":3:", "rename it to `dropped`"),
        (
            "{name: '{data}', dropped: 0.1}",
            "data.dropped",
            ":3:",
            "move it to `data.expect:`",
        ),
        ("[{name: '{data}', wieght: 2}]", "data.name.0.wieght", ":3:", "rename it to `weight`"),
    ):
        path = recipe_file(text + (data if "[" not in data else f"{{name: {data}}}"))
        ((found, said),) = problems(path).items()
        assert found == key and f"recipe.yaml{at}" in said and "null" not in said
        assert "expected:" not in said and said.endswith(f"help:      {fix}")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.warmup_ratio=0.1", "train.warmup_steps"),
        ("train.max_seq_length=512", "data.max_length"),
        ("model.torch_dtype=bfloat16", "the accelerate config"),
        ("train.evaluation_strategy=steps", "eval.eval_steps"),
        ("train.eval_strategy=steps", "eval.eval_steps"),
        ("train.load_best_model_at_end=true", "eval.load_best_model_at_end"),
        ("train.metric_for_best_model=loss", "eval.metric_for_best_model"),
        ("train.greater_is_better=true", "eval.metric_for_best_model"),
        ("train.use_liger_kernel=true", "speed.loss"),
        ("model.load_in_4bit=true", "adapter.type: qlora"),
        ("adapter.use_dora=true", "adapter.type"),
        ("train.bf16=true", "`mixed_precision` in the accelerate config"),
        ("train.packing=true", "data"),
        ("train.gradient_checkpointing=true", "speed.activation_checkpointing"),
        ("train.gradient_accumulation_steps=4", "train.effective_batch_size"),
        ("train.push_to_hub=true", "publish"),
        ("train.fsdp=full_shard", "`fsdp_config` in the accelerate config"),
        ("train.eval_steps=3", "eval.eval_steps"),
        ("train.ddp_timeout=3", "the accelerate config"),
        ("model.attn_implementation=sdpa", "model.attention"),
        ("adapter.lora_r=8", "adapter.r"),
        ("adapter.total_step=8", "the number of steps of the run"),
        ("speed.learning_rate=1", "move it to `train:`"),
        ("adapter.type=lorra", "lora"),
        ("model.attention=flash", "flash_attention_2"),
        ("train.optim=adamw_tourch", "adamw_torch"),
        ("lora.r=3", "unknown section"),
    ],
)
def test_old_and_misplaced_names_are_explained(override: str, says: str) -> None:
    found = problems(QUICKSTART, override)
    assert len(found) == 1
    assert says in next(iter(found.values()))


def test_allowed_values_of_strings_and_booleans_are_the_strings() -> None:
    """pydantic names `True` without quotes: it became an empty text, and the nearest to what was written."""
    item = {"type": "literal_error", "input": 1, "ctx": {"expected": "'fast', True or 'slow'"}}
    assert recipe_errors._expected(item, "optim") in ("fast, slow", "slow, fast")


def test_only_three_keys_are_required(recipe_file) -> None:
    path = recipe_file("model: {name: '{model}'}\ndata: {name: '{data}'}\nadapter: {type: lora}\n")
    assert loader.load(path).adapter.options() == {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    empty = recipe_file("model: {}\ndata: {}\nadapter: {}\n", "empty.yaml")
    assert set(problems(empty)) == {"model.name", "data.name", "adapter.type"}


def test_paths_are_looked_up_beside_the_recipe_too(recipe_file, tmp_path, monkeypatch) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    path = recipe_file("model: {name: '{model}'}\ndata: {name: rows.jsonl}\nadapter: {type: lora}\n")
    assert loader.load(path).data.name == str(tmp_path / "rows.jsonl")
    odd = tmp_path / "a[1]"  # in a folder and under a name that look like globs
    odd.mkdir()
    (odd / "x[2].jsonl").write_text("")
    (odd / "r.yaml").write_text(path.read_text().replace("rows.jsonl", "'x[2].jsonl'"))
    assert loader.load(odd / "r.yaml").data.name == str(odd / "x[2].jsonl")
    every = loader.load(odd / "r.yaml", ["data.name='*.jsonl'"]).data.name
    assert source_loading.files(str(every), "data.name") == [odd / "x[2].jsonl"]
    for nothing in ("['', rows.jsonl]", "[{name: ''}, rows.jsonl]"):  # not all that is beside it
        with pytest.raises(UserError, match=r"data\.name: a source has no name"):
            checker.check_without_examples(loader.load(path, [f"data.name={nothing}"]))
    monkeypatch.chdir(tmp_path)
    assert loader.load(path).data.name == "rows.jsonl"


def test_data_may_be_called_as_a_task_is(recipe_file, tmp_path) -> None:
    """Of the two the data alone is a path."""
    for name in ("arc_easy", "own.yaml"):
        (tmp_path / name).mkdir()
    text = "model: {name: '{model}'}\ndata: {name: arc_easy}\nadapter: {type: lora}\n"
    loaded = loader.load(recipe_file(text + "eval: {tasks: [arc_easy, own.yaml]}\n"))
    assert loaded.data.name == str(tmp_path / "arc_easy")
    assert loaded.eval.tasks == ["arc_easy", str(tmp_path / "own.yaml")]


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (
            ["adapter.type=qlora", "adapter.init_lora_weights=pissa"],
            "init_lora_weights",
            "excludes a quantized base model",
        ),
        (
            ["model.quantization=int8", "adapter.init_lora_weights=olora"],
            "init_lora_weights",
            "excludes a quantized base model",
        ),
        (
            ["adapter.type=dora", "adapter.init_lora_weights=corda"],
            "init_lora_weights",
            "corda excludes DoRA",
        ),
        (
            ["adapter.type=adalora", "adapter.init_lora_weights=eva"],
            "init_lora_weights",
            "only LoRA and DoRA",
        ),
        (["adapter.init_lora_weights=loftq"], "init_lora_weights", "needs a 4-bit base model"),
        (["adapter.type=qlora", "model.quantization=int8"], "model.quantization", "needs a 4-bit base model"),
        (
            ["adapter.type=loha", "model.quantization=nf4"],
            "model.quantization",
            "can't compute with nf4 weights",
        ),
        (["adapter.type=full", "model.quantization=int8"], "model.quantization", "can't train int8 weights"),
        (["adapter.type=prompt_tuning", "data.packing=true"], "data.packing", "before every example"),
        (
            ["adapter.type=p_tuning", "train.label_smoothing_factor=0.1"],
            "train.label_smoothing_factor",
            "have no labels",
        ),
        (["adapter.type=xlora"], "adapter.type", "trains no new one"),
        (["adapter.loraplus_lr_ratio=0.5"], "loraplus_lr_ratio", "at least 1"),
    ],
)
def test_what_excludes_an_adapter_is_said_with_a_remedy(overrides: list[str], key: str, says: str) -> None:
    found = problems(QUICKSTART, *overrides)[key if "." in key else f"adapter.{key}"]
    assert says in found


def test_a_run_folder_at_home_is_not_a_folder_called_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert loader.load(QUICKSTART, ["train.output_dir=~/runs/x"]).train.output_dir == f"{tmp_path}/runs/x"


@pytest.mark.parametrize("flat", ["packing", "padding_free"])
def test_noise_goes_with_rows_that_stand_apart(flat: str) -> None:
    """Upstream divides it by the root of a row's length, which end to end is that of the whole batch."""
    assert "train.neftune_noise_alpha" in problems(QUICKSTART, "train.neftune_noise_alpha=1e40")
    steps = problems(QUICKSTART, "adapter.init_lora_weights=pissa_niter_999999999")
    assert "unknown initialization" in steps["adapter.init_lora_weights"]
    given = ["train.neftune_noise_alpha=5", "data.packing=false", f"data.{flat}=true"]
    assert f"excludes `data.{flat}: true`" in problems(QUICKSTART, *given)["train.neftune_noise_alpha"]


@pytest.mark.parametrize("flat", ["packing", "padding_free"])
def test_rows_end_to_end_are_not_padded_to_a_multiple(flat: str) -> None:
    """Each token that fills up would be a document: more of them than a compiled step has borders for."""
    given = ["train.pad_to_multiple_of=64", "data.packing=false", f"data.{flat}=true"]
    assert f"excludes `data.{flat}: true`" in problems(QUICKSTART, *given)["train.pad_to_multiple_of"]
    rows = ["train.pad_to_multiple_of=64", "data.packing=false", "data.padding_free=false"]
    assert loader.load(QUICKSTART, rows).train.passed_on()["pad_to_multiple_of"] == 64


def test_keys_of_peft_s_own_configs_are_checked_by_name_and_type() -> None:
    given = ["adapter.init_lora_weights=eva", "adapter.eva_config.rhoo=2", "adapter.eva_config.tau=x"]
    found = problems(QUICKSTART, *given)
    assert "rho" in found["adapter.eva_config.rhoo"] and "a number" in found["adapter.eva_config.tau"]


def test_the_resolved_recipe_is_a_recipe_with_the_same_values(tmp_path) -> None:
    overrides = ["adapter.type=dora", "adapter.rank_pattern={q_proj: 8}", "train.seed=7"]
    loaded = loader.load(QUICKSTART, overrides)
    path = tmp_path / "again.yaml"
    path.write_text(settings_text.resolved_yaml(loaded, {"train.steps": (200, "asked for")}))
    again = loader.load(path)
    assert again.model_dump() == loaded.model_dump()
    text = path.read_text()
    assert "seed: 7  # override" in text and "r: 16  # recipe" in text and "samples: 3  # recipe" in text


@pytest.mark.parametrize(
    "given",
    [
        "speed.qat={config: IntxWeightOnlyConfig, group_size: null}",
        "data.expect={dropped: 0.5}",
        "data.name=[{name: examples/tiny_llama/data/train.jsonl, weight: 2}]",
        "adapter.use_bdlora={target_modules_bd_a: [q_proj], nblocks: 2}",
    ],
)
def test_what_is_inside_a_section_survives_the_run_folder(given: str, tmp_path) -> None:
    """A null that is not the default, too: it was left out, and read back as the default."""
    loaded, path = loader.load(QUICKSTART, [given]), tmp_path / "again.yaml"
    path.write_text(settings_text.resolved_yaml(loaded, {}))
    assert loader.load(path).model_dump() == loaded.model_dump()


@pytest.mark.parametrize(
    ("override", "place", "says"),
    [
        ("model.name.x=3", "override", "has a value and no keys below it"),
        ("foo.bar=3", "override", "unknown section"),
        ("train.run_name=hf_" + "c" * 30, "override", "HF_TOKEN"),
        ("train.seed=4294967296", "override", "less than 4,294,967,296"),
        ("train.learning_rate=.inf", "override", "finite"),
        ("train.warmup_steps=.inf", "override", "at most 1,000,000,000,000,000"),
        ("train.num_train_epochs=.inf", "override", "finite"),
        ("train.pad_to_multiple_of=0", "override", "at least 1"),
        ("train.logging_steps=1.5", "override", "an integer"),
        ("train.save_steps=0", "override", "train.save_steps"),
        ("train.adam_beta1=x", "override", "train.adam_beta1:"),
        ("train.eos_token=x", "override", "a tokenizer with this token"),
    ],
)
def test_overrides_are_checked_like_the_file(override: str, place: str, says: str) -> None:
    text = "\n".join(problems(QUICKSTART, override).values())
    assert place in text and says in text and "cccc" not in text


def test_an_empty_section_is_an_empty_section(recipe_file) -> None:
    path = recipe_file("model: {name: '{model}'}\ndata: {name: '{data}'}\nadapter: {type: lora}\ntrain:\n")
    assert loader.load(path).train.seed == 42


def test_a_word_that_only_looks_like_a_secret_is_fine(recipe_file, tmp_path) -> None:
    name = "task-specific-instructions.jsonl"
    (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n')
    path = recipe_file(f"model: {{name: '{{model}}'}}\ndata: {{name: {name}}}\nadapter: {{type: lora}}\n")
    assert loader.load(path).data.name.endswith(name)


@pytest.mark.parametrize("value", [float("inf"), 1e-05, 3.0, "\U0001f600 a: b", None, True, {"a": [1, "x"]}])
def test_what_is_written_reads_back(value: object) -> None:
    from finetune.core import strict_yaml

    document = strict_yaml.parse(f"key: {settings_text.flow(value)}", "-")
    assert document.value["key"] == value and not document.problems


@pytest.mark.parametrize(
    ("kind", "change", "key"),
    [
        ("dora", "adapter.lora_bias=true", "adapter.lora_bias"),
        ("qdora", "adapter.lora_bias=true", "adapter.lora_bias"),
        ("frod", "adapter.sparse_rate=0", "adapter.sparse_rate"),  # its rotation has nothing to train
        ("unilora", "adapter.init_theta_d_bound=.nan", "adapter.init_theta_d_bound"),
    ],
)
def test_option_with_which_peft_does_not_train_is_an_error(kind: str, change: str, key: str) -> None:
    assert key in problems(QUICKSTART, f"adapter.type={kind}", change)


@pytest.mark.parametrize(
    ("change", "key", "fix"),
    [
        (
            "adapter.target_modules=.*\\.(q_proj|v_proj",
            "adapter.target_modules",
            "target_modules: [q_proj, v_proj]",
        ),
        ("adapter.exclude_modules=(q_proj", "adapter.exclude_modules", "exclude_modules: [q_proj]"),
        ("adapter.exclude_modules=a{99999999999}", "adapter.exclude_modules", "exclude_modules: [a]"),
        ("adapter.modules_to_save=['(lm_head']", "adapter.modules_to_save", "lm_head"),
        ("adapter.modules_to_save=['(?i)lm_head']", "adapter.modules_to_save", "lm_head"),
        ("adapter.layers_pattern=[layers, '(h']", "adapter.layers_pattern", "h"),
        ("adapter.layers_pattern='(layers'", "adapter.layers_pattern", "layers"),
        ("adapter.layers_pattern='(?P<idx>layers)'", "adapter.layers_pattern", "layers"),
        ("adapter.rank_pattern={'(q_proj': 4}", "adapter.rank_pattern", "q_proj"),
        ("adapter.alpha_pattern={'*': 4}", "adapter.alpha_pattern", "remove `alpha_pattern`"),
    ],
)
def test_pattern_that_is_no_regular_expression_is_an_error_of_its_key(
    change: str, key: str, fix: str
) -> None:
    said = problems(QUICKSTART, change)[key]
    assert f"{key}: not a valid regular expression" in said and said.endswith(f"help:      {fix}")


def test_pattern_of_the_names_of_layers_may_have_groups() -> None:
    from finetune.adapters import target_modules

    options = {"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "(layers|h)"}
    assert [target_modules.is_targeted(options, f"model.layers.{layer}.q") for layer in (0, 1)] == [
        False,
        True,
    ]


def test_item_of_an_overridden_list_stands_in_the_override(recipe_file) -> None:
    adapter = "adapter: {type: lora, target_modules: [q_proj, v_proj]}"
    text = f"model: {{name: '{{model}}'}}\ndata: {{name: '{{data}}'}}\n{adapter}"
    override = "adapter.target_modules=[o_proj]"
    loaded = loader.load(recipe_file(text), [override])
    places = {place for key, place in loaded.origin.where.items() if key[1:2] == ("target_modules",)}
    assert places == {f"override {override!r}"}
