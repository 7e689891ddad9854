"""The sections of a recipe, each frozen, strict about types and closed. What a key does stands beside it."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from finetune.core import strict_yaml
from finetune.core.paths import can_be_path


class Section(BaseModel):
    """Frozen, strict about types, and closed: an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        defer_build=True,  # the validator that is used is the whole recipe's
        protected_namespaces=(),
    )


def _can_be_path(name: str) -> str:
    if not can_be_path(os.path.expanduser(name)):
        raise ValueError("no path: it has a NUL, or is too long")
    return name


PathName = Annotated[str, AfterValidator(_can_be_path)]  # or an id of the Hub
OptionalPath: TypeAlias = PathName | None
Quantization = Literal["auto", "none", "fp8", "nf4", "fp4", "int8", "torchao_int8"]


class Model(Section):
    name: PathName
    """Hub id (`meta-llama/Llama-3.1-8B`) or local folder."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    attention: Literal[
        "auto",
        "eager",
        "sdpa",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
        "cudnn",
        "varlen",
        "flex_attention",
    ] = "auto"
    """Attention kernel in training; `auto` chooses for this GPU, model and data, and says why. `cudnn`:
    cuDNN's SDPA, for rows that are not packed; `varlen`: torch's own FlashAttention-2. Evaluation takes
    `sdpa`, or `eager` where that was asked for."""
    quantization: Quantization = "auto"
    """How the weights of the frozen base model are stored. `none`: in the launch's precision. `auto`: nf4 for
    the q-types; fp8 (e4m3) under lora, rslora, dora, adalora and ia3 where the GPU has fp8 GEMMs and the
    layers are large enough to gain; else none. nf4, fp4 and int8 are bitsandbytes'. A checkpoint that is
    quantized already keeps its own storage, or is dequantized (docs/quantized_checkpoints.md)."""
    add_tokens: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that become tokens of their own; their rows begin as the mean of all others, and train."""


class Source(Section):
    """One of several sources in `data.name`."""

    name: PathName
    """File, folder, glob or Hub id."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How often a row is used in an epoch: 2 is twice, 0.5 is half of the rows, drawn with `train.seed`."""
    revision: str | None = None
    """Commit (or tag or branch) of a Hub data set; `null`: `data.revision`."""
    subset: str | None = None
    """Configuration of a Hub data set; `null`: `data.subset`."""
    split: str | None = None
    """Split of a Hub data set; `null`: `data.split`."""
    max_example_bytes: int | None = Field(default=None, ge=1, le=2**31 - 2)
    """Longest example of these files in bytes; `null`: `data.max_example_bytes`."""
    max_uncompressed_bytes: int | None = Field(default=None, ge=1, le=2**53)
    """What a compressed file may expand to; `null`: `data.max_uncompressed_bytes`."""


class Expect(Section):
    """What the audit lets pass. Each limit is a share of all rows; more than that ends the run (exit 2)."""

    unreadable: float = Field(default=0.0, ge=0, le=1)
    """Rows that are not JSON objects."""
    malformed: float = Field(default=0.0, ge=0, le=1)
    """Rows with an unknown role, or with a content that is empty or not text."""
    role_order: float = Field(default=0.0, ge=0, le=1)
    """Chats that the assistant begins, or in which a role speaks twice in a row."""
    dropped: float = Field(default=0.05, ge=0, le=1)
    """Rows left out: too long, no answer at the end, or no token to train on."""
    duplicates: float = Field(default=0.2, ge=0, le=1)
    """Rows that repeat an earlier one."""
    in_validation: float = Field(default=0.01, ge=0, le=1)
    """Validation examples that are also in the training data (a share of the validation set)."""
    no_end_of_turn: float = Field(default=0.01, ge=0, le=1)
    """Rows that do not teach the model to stop: their last trained token does not end the turn."""


def _iso_date(text: str) -> str:
    return datetime.date.fromisoformat(text).isoformat()


class Data(Section):
    name: PathName | list[PathName | Source]
    """File (jsonl, json, csv, parquet, arrow, tar, txt), folder, glob or Hub id, or a list of these."""
    revision: str | None = None
    """Commit (or tag or branch) of a Hub data set."""
    subset: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Split of a Hub data set."""
    format: Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text"] = "auto"
    """What a row looks like; `auto` goes by the columns and says what it found."""
    columns: dict[str, str] = {}
    """The data's names for ours: `{instruction: question, output: answer}`."""
    role_map: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """The data's names for roles: `{bot: assistant}`."""
    reasoning: Literal["keep", "cut"] = "keep"
    """`<think>` parts of the assistant's messages."""
    validation: PathName | None = None
    """File with the validation set; or see `validation_fraction`."""
    validation_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the examples in the validation set, drawn with `train.seed`; equal ones, and those of one
    conversation, stay on one side."""
    max_length: int = Field(default=1024, ge=8)
    """Longest row in tokens; with packing, the tokens of a packed row."""
    too_long: Literal["drop", "truncate_prompt", "split", "error"] = "drop"
    """What happens to a longer row. An answer is never cut; `split` is for plain text."""
    train_on: Literal["assistant", "last_turn", "completion", "all"] = "assistant"
    """Tokens that carry loss: the assistant's turns with their ends, its last one, those after the last
    user's turn, or every token."""
    chat_template: PathName | None = None
    """A bundled template (llama3, qwen3, mistral, gemma, phi3, chatml ...) or a Jinja file, in place of the
    tokenizer's own."""
    template_date: Annotated[str, AfterValidator(_iso_date)] | None = None
    """Date for chat templates that ask for it, as in `2026-11-27`; `null`: the day on which the run starts.
    Evaluation, chat and a resumed run keep it."""
    packing: bool = False
    """Several rows in one of `max_length` tokens, none seeing another."""
    padding_free: bool = False
    """Rows of a batch end to end in place of padding (packing always does it)."""
    streaming: bool = False
    """Read while training, for what does not fit on disk a second time; needs `train.max_steps`."""
    shuffle_buffer: int = Field(default=10_000, ge=1)
    """Rows that are shuffled (and packed) together when streaming."""
    max_example_bytes: int = Field(default=32 * 2**20, ge=1, le=2**31 - 2)
    """Longest example in bytes: a line, a .txt file, the files of an example in a tar. A longer one
    is an error."""
    max_uncompressed_bytes: int | None = Field(default=None, ge=1, le=2**53)
    """What a compressed file (tar, parquet) may expand to; `null`: 100 times its size, at least 256 MiB."""
    cache_dir: PathName | None = None
    """Folder of prepared data; `null`: $FINETUNE_CACHE or ~/.cache/finetune."""
    expect: Expect = Expect()
    """Limits of the audit that runs before any weight is loaded."""


class Adapter(Section):
    """The part every type shares; the recipe's section adds PEFT's own keys for its type, and ours."""

    type: str
    """The method. Swapping it is all it takes."""

    @property
    def source(self) -> str | None:
        """The adapter to go on from."""
        return getattr(self, "init_from", None)

    def options(self) -> dict[str, Any]:
        """The PEFT keys that were set, by the recipe or by a default of ours."""
        ours = {"type", *PEFT_KEYS, *LORA_KEYS, *ADALORA_KEYS}
        values = {name: getattr(self, name) for name in sorted(self.model_fields_set - ours)}
        return {
            name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
            for name, value in values.items()
        }

    def ours(self, key: str) -> Any:
        """The value of a key of ours that only some types have; `None` if this one has not."""
        return getattr(self, key, None)


PEFT_KEYS: dict[str, Any] = {
    "init_from": (
        OptionalPath,
        Field(
            default=None,
            description="Adapter to go on training: a run or PEFT folder, or organisation/name@commit.",
        ),
    ),
    "from_other_base": (
        bool,
        Field(default=False, description="Go on from an adapter that was trained on another base."),
    ),
}
LORA_KEYS: dict[str, Any] = {
    "loraplus_lr_ratio": (
        float | None,
        Field(
            default=None,
            ge=1,
            allow_inf_nan=False,
            description="LoRA+ (arXiv 2402.12354): B learns so many times as fast as A; 16 is usual.",
        ),
    ),
}
ADALORA_KEYS: dict[str, Any] = {
    "orth_reg_every": (
        int,
        Field(
            default=1,
            ge=1,
            description="The orthogonality term at every n-th step, with n times its weight.",
        ),
    ),
}


QAT_CONFIGS = ("Int8DynamicActivationIntxWeightConfig", "IntxWeightOnlyConfig")


class Qat(Section):
    """Quantisation-aware training: forward rounds weights as they will be stored (torchao)."""

    config: str = Field(json_schema_extra={"enum": [*QAT_CONFIGS]})
    """torchao's name of how weights are stored; Int8DynamicActivation... also rounds each layer's input."""
    weight_dtype: Literal["int4", "int8"] = "int4"
    """What `finetune merge --quantize` will store."""
    group_size: int | None = Field(default=32, ge=2)
    """Weights that share one scale (torchao's PerGroup); `null`: one for each output (PerAxis(0))."""


_Checkpointing = (
    Literal["auto", "none", "norms", "mlp", "mlp_int8", "full"]
    | Annotated[str, Field(pattern=r"^(mlp|mlp_int8|full):[1-9]\d{0,3}$")]
)


def _checkpointing_of(value: object) -> Any:
    """`true` means `full`, `false` means `none`."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def _metric_of(value: object) -> Any:
    """Transformers prefixes the names of its metrics."""
    return value.removeprefix("eval_") if value in ("eval_loss", "eval_exact_match") else value


class Speed(Section):
    fused: Literal["auto"] | bool = "auto"
    """Adapters run at the cost of their products (LoRA, DoRA, AdaLoRA, IA3); `auto`: on GPUs."""
    compile: (
        Literal["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | bool
    ) = "auto"
    """torch.compile for each decoder layer, if need be in one of torch's modes; `auto`: on GPUs, in runs
    whose products take more than two minutes at 40 % of the GPU's peak. `auto` and `true` make CUDA graphs of
    a Llama's layers (`reduce-overhead`) where passes are all alike and so small that a GPU waits for Python;
    `default` does not."""
    activation_checkpointing: Annotated[
        _Checkpointing, BeforeValidator(_checkpointing_of, _Checkpointing | bool)
    ] = "auto"
    """What the backward pass recomputes, so that fewer activations are saved. `norms`: the norms, a seventh
    of the saved activations. `mlp`: also the first half of fused MLPs: two thirds less memory for a sixth
    more time (`mlp:8`: in eight layers). `mlp_int8`: that half is saved in int8: a third less memory for a
    fiftieth more time, gradients change by one percent (`mlp_int8:8`: eight layers recompute it instead).
    `full`: all layers, for a third more time (`full:12`: twelve layers, and `mlp` in the others). `true`
    means `full`, `false` means `none`. `auto` takes the least that fits (`mlp_int8` only on an fp8 base)."""
    offload: (
        Literal["auto", "none", "activations", "optimizer", "all"]
        | Annotated[str, Field(pattern=r"^activations:[1-9]\d{0,3}$")]
    ) = "auto"
    """What a GPU keeps in the CPU's memory. `activations`: what layers keep under `mlp`, which
    `activation_checkpointing: auto` takes where the CPU has room for it, or the inputs of layers that are
    recomputed whole (under `mlp_int8`: all else); `activations:8`: of eight layers; copied beside the layers.
    `optimizer`: AdamW's state, which steps on the CPU; for `full`, as an adapter's is small. `auto`: on
    an fp8 base, where int8 is not enough, activations of as many layers as let none be made again, if copies
    take no longer than what they run beside."""
    loss: Literal["auto", "chunked", "trl"] = "auto"
    """Cross-entropy in chunks of tokens, or TRL's; `auto`: chunked where it is the same."""
    qat: Qat | None = None
    """Quantisation-aware training, for `finetune merge --quantize`; `null`: none."""


class Train(Section):
    """Ours; `train_section` adds every SFTConfig field that no other section owns."""

    output_dir: PathName | None = None
    """The run folder; `null`: `runs/<recipe>-<time>`."""
    effective_batch_size: int = Field(default=32, ge=1)
    """Sequences in one optimizer step, over all processes."""
    per_device_train_batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] | None = None
    """Sequences in one forward pass; `null`: the largest divisor of each process's share that is <= 8;
    `auto`: the largest that memory has room for, tried with the longest rows before training."""
    learning_rate: float = Field(default=2e-4, ge=0, allow_inf_nan=False)
    """Peak learning rate. LoRA-like adapters: about 2e-4; ia3: about 1e-2; full: about 1e-5."""
    max_steps: int | None = Field(default=None, ge=1, le=10**15)
    """Optimizer steps; excludes `num_train_epochs`."""
    num_train_epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Passes over the data; neither given: 3."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seeds adapter initialisation, dropout, shuffling and the validation split."""

    save_strategy: Literal["auto", "no", "steps", "epoch"] = "auto"
    """When checkpoints are made; `auto`: each `save_steps` if that is given, else every ten minutes; `no`:
    only when the run is told to stop, by a signal or `--until`."""
    save_steps: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Optimizer steps from one checkpoint to the next; below 1: a share of the run."""
    save_total_limit: int | None = Field(default=2, ge=1)
    """Checkpoints that are kept, the newest; `null`: all."""

    dataloader_timeout: int = Field(default=600, ge=0, le=10**6)
    """Seconds to wait for a batch of a data loader worker; after it the run ends (exit 5). 0: no limit."""
    skip_nonfinite: int = Field(default=0, ge=0)
    """Steps in a row that may be left out because their gradients are not finite: no update, and the
    schedule waits; 0: the first one ends the run (exit 5)."""
    stop_at_spike: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """End the run (exit 5) where three logged losses in a row are over so many times the median of the 32
    before them; `null`: say so once, at 2 times."""

    def passed_on(self) -> dict[str, Any]:
        """The SFTConfig keys the recipe set, to be handed over as they are."""
        ours = Train.model_fields.keys()
        return {name: getattr(self, name) for name in sorted(self.model_fields_set - ours)}


class Eval(Section):
    tasks: list[PathName] = []
    """lm-eval's tasks by name, the shipped `general_knowledge`, or task files: `[arc_easy, my/task.yaml]`."""
    limit: int | None = Field(default=None, ge=1)
    """Rows of each task; `null`: all."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Solved examples before each question of lm-eval's tasks; `null`: as the task has it."""
    apply_chat_template: bool = False
    """Whether lm-eval's tasks go through the chat template; a local task says so itself (`chat`)."""
    engine: Literal["hf", "vllm"] = "hf"
    """What answers `tasks`: transformers, or vLLM where it is installed."""
    forgetting: bool | PathName = True
    """Text on which forgetting is measured: the shipped one, or a file with a `text` in each row."""
    generate: bool = True
    """Whether base and tuned also answer the validation set at the end, for exact match and samples; `false`:
    their loss alone, which takes a fraction of the time."""
    samples: int = Field(default=5, ge=0)
    """Validation examples whose answers by base and tuned are shown side by side."""
    batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Rows generated or scored at once; `auto`: as many as memory has room for, 64 at most."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Evaluate on the validation set every so many steps of training; `null`: only at its end."""
    metric_for_best_model: Annotated[str, BeforeValidator(_metric_of)] = "loss"
    """What decides which step's weights are kept: `loss` (or `eval_loss`), `exact_match`, or a task's metric
    (`arc_easy/acc`)."""
    load_best_model_at_end: bool = True
    """Save the weights of the best evaluation in training, not those of the last (needs `eval_steps`)."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after so many evaluations in training without a better one; `null`: never."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest generated answer; `null`: the longest reference answer and 16 tokens more."""
    min_loss_difference: float = Field(default=0.01, ge=0)
    """Smallest difference of a loss that matters, in nats per token; a smaller one is called negligible."""
    min_score_difference: float = Field(default=0.01, ge=0, le=1)
    """Smallest difference of exact match, accuracy and other scores that matters: 0.01 is 1 point of 100."""


class Publish(Section):
    repo: str | None = None
    """Hub repository (`organisation/name`) to push to; `null`: nothing leaves this machine."""
    private: bool = True
    """Whether the repository is private; `false` makes a new one public."""
    revision: str | None = None
    """Branch to push to; `null`: main."""
    base_model: str | None = None
    """What a base that is a local folder is on the Hub (`organisation/name`)."""
    license: str | None = None
    """Licence of what is published, by the Hub's name for it; `null`: the base's."""
    samples: bool = True
    """Whether eval.json goes up with its samples of the validation set."""


@dataclass
class Origin:
    """Where a recipe came from: for error messages, and for `recipe.resolved.yaml`."""

    path: Path
    where: dict[strict_yaml.Keys, str] = field(default_factory=dict)
    set_by: dict[str, str] = field(default_factory=dict)
    """Dotted key -> recipe | override | default (with the reason)."""
    notices: list[str] = field(default_factory=list)
    """What was left out or displaced, each to be said once."""
    file_type: str = ""
    """The file's `adapter.type`, where an override names another one."""


class Recipe(Section):
    """One run, whole. Only `training.pipeline.run` sees all of it; every other function gets its section."""

    model: Model
    data: Data
    adapter: Adapter
    speed: Speed = Speed()
    train: Train = Train()
    eval: Eval = Eval()
    publish: Publish = Publish()
    _origin: Origin = PrivateAttr()

    @property
    def origin(self) -> Origin:
        return self._origin
