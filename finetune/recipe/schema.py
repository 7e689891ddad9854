"""The sections of a recipe: frozen, strict about types, and closed to unknown keys.

The docstring below a key describes it. `make schema` copies these texts to docs/reference/recipe.md and to
the JSON schema.
"""

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
    """A section is frozen and strict about types. An unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        defer_build=True,  # only the validator of the whole recipe is used
        protected_namespaces=(),
    )


# The error of a rule has three texts: the fault, the expected value and the remedy
def _can_be_path(name: str) -> str:
    if not can_be_path(os.path.expanduser(name)):
        raise ValueError(
            "the path is too long or has a NUL character",
            "a path that the system accepts",
            "name a shorter path",
        )
    return name


def _is_local(name: str) -> str:
    if "://" in name:
        raise ValueError(
            "finetune writes only to local folders",
            "a local path",
            "name a local folder, and copy it afterwards",
        )
    return name


PathName = Annotated[str, AfterValidator(_can_be_path)]  # a path or a Hub id
LocalFolder = Annotated[PathName, AfterValidator(_is_local)]
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
    """Attention implementation in training. `auto` chooses one for this GPU, model and data, and reports why.
    `cudnn` is cuDNN's SDPA, for sequences that are not packed. `varlen` is torch's own FlashAttention-2.
    Evaluation uses `sdpa` or `eager`."""
    quantization: Quantization = "auto"
    """Quantization of the frozen base model. `none` stores its weights in the launch's precision. `auto` is
    nf4 for the q-types. Under lora, rslora, dora, adalora and ia3 it is fp8 (e4m3) if the GPU has fp8 GEMMs
    and the layers are large enough. Otherwise it is `none`. bitsandbytes provides nf4, fp4 and int8. A
    checkpoint that is quantized already keeps its quantization, or is dequantized
    (docs/guides/quantized_checkpoints.md)."""
    add_tokens: list[Annotated[str, Field(min_length=1)]] = []
    """Strings to add as new tokens. Their embeddings start as the mean of all others and are trained."""


class Source(Section):
    """One of several sources in `data.name`."""

    name: PathName
    """File, folder, glob or Hub id."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How often an epoch uses each example. 2 uses each example twice. 0.5 uses half of the examples, drawn
    with `train.seed`."""
    revision: str | None = None
    """Commit, tag or branch of a Hub dataset; `null`: `data.revision`."""
    subset: str | None = None
    """Configuration of a Hub dataset; `null`: `data.subset`."""
    split: str | None = None
    """Split of a Hub dataset or of a folder; `null`: `data.split`."""
    max_example_bytes: int | None = Field(default=None, ge=1, le=2**31 - 2)
    """Longest example of these files in bytes; `null`: `data.max_example_bytes`."""
    max_uncompressed_bytes: int | None = Field(default=None, ge=1, le=2**53)
    """Largest uncompressed size of a compressed file in bytes; `null`: `data.max_uncompressed_bytes`."""


class Expect(Section):
    """Limits of the data audit. Each is a share of all examples. A larger share ends the run (exit 2)."""

    unreadable: float = Field(default=0.0, ge=0, le=1)
    """Examples that are not JSON objects."""
    malformed: float = Field(default=0.0, ge=0, le=1)
    """Examples with an unknown role, or with content that is empty or not a string."""
    role_order: float = Field(default=0.0, ge=0, le=1)
    """Chats that start with the assistant, or in which a role speaks twice in a row."""
    dropped: float = Field(default=0.05, ge=0, le=1)
    """Examples that are dropped: too long, no answer at the end, or no token to train on."""
    duplicates: float = Field(default=0.2, ge=0, le=1)
    """Examples that repeat an earlier example."""
    in_validation: float = Field(default=0.01, ge=0, le=1)
    """Validation examples that are also in the training data, as a share of the validation set."""
    no_end_of_turn: float = Field(default=0.01, ge=0, le=1)
    """Examples that do not teach the model to stop: their last trained token does not end the turn."""


def _iso_date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise ValueError("this is not a date", "a date such as 2026-07-31", "correct the date") from error


class Data(Section):
    name: PathName | list[PathName | Source]
    """File, folder, glob, Hub id, or a list of them. Formats: jsonl, json, csv, parquet, arrow, tar, txt."""
    revision: str | None = None
    """Commit, tag or branch of a Hub dataset."""
    subset: str | None = None
    """Configuration of a Hub dataset."""
    split: str = "train"
    """Split of a Hub dataset or of a folder (docs/guides/dataset_formats.md)."""
    format: Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text"] = "auto"
    """Format of the examples. `auto` detects it from the columns and reports it."""
    columns: dict[str, str] = {}
    """Maps finetune's column names to those of your data: `{instruction: question, output: answer}`."""
    role_map: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Maps the role names of your data to standard roles: `{bot: assistant}`."""
    reasoning: Literal["keep", "cut"] = "keep"
    """Whether to keep or cut the `<think>` parts of the assistant's messages."""
    validation: PathName | None = None
    """File with the validation set. `validation_fraction` is the alternative."""
    validation_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the examples in the validation set, drawn with `train.seed`. Equal examples, and examples of
    one conversation, stay on the same side."""
    max_length: int = Field(default=1024, ge=8)
    """Longest example in tokens. With packing, the length of a packed sequence."""
    too_long: Literal["drop", "truncate_prompt", "split", "error"] = "drop"
    """How to treat a longer example. An answer is never cut. `split` is only for plain text."""
    train_on: Literal["assistant", "last_turn", "completion", "all"] = "assistant"
    """Tokens that contribute to the loss: the assistant's turns with their ends, its last turn, all tokens
    after the last user turn, or all tokens."""
    chat_template: PathName | None = None
    """A Jinja file or a bundled template, such as llama3, qwen3, mistral, gemma, phi3 or chatml. `null`: the
    tokenizer's own template."""
    template_date: Annotated[str, AfterValidator(_iso_date)] | None = None
    """Date for chat templates that use one, such as `2026-11-27`. `null`: the day on which the run starts.
    Evaluation, chat and a resumed run use the same date."""
    packing: bool = False
    """Pack several examples into one sequence of `max_length` tokens. Packed examples cannot attend to each
    other."""
    padding_free: bool = False
    """Concatenate the examples of a batch instead of padding them. Packing always does this."""
    streaming: bool = False
    """Read the data while training, if it does not fit on the disk twice. Needs `train.max_steps`."""
    shuffle_buffer: int = Field(default=10_000, ge=1)
    """Number of examples that are shuffled (and packed) together when streaming. Each epoch has the same
    order."""
    max_example_bytes: int = Field(default=4 * 2**20, ge=1, le=2**31 - 2)
    """Longest example in bytes: a line, a .txt file, or the files of one example in a tar. A longer example
    is an error."""
    max_uncompressed_bytes: int | None = Field(default=None, ge=1, le=2**53)
    """Largest uncompressed size of a compressed file (tar, parquet) in bytes. `null`: 100 times the size of
    the file, at least 256 MiB."""
    cache_dir: LocalFolder | None = None
    """Folder of prepared data; `null`: $FINETUNE_CACHE or ~/.cache/finetune."""
    expect: Expect = Expect()
    """Limits of the data audit, which runs before any weight is loaded."""

    @property
    def flat(self) -> bool:
        """Whether the examples of a batch are concatenated, and not padded."""
        return self.packing or self.padding_free


class Adapter(Section):
    """The keys of every adapter type. `build.sections` adds the keys of the chosen type."""

    type: str
    """The fine-tuning method. Change only this key to switch methods."""

    @property
    def source(self) -> str | None:
        """The adapter from which training continues."""
        return getattr(self, "init_from", None)

    def options(self) -> dict[str, Any]:
        """Return the PEFT keys that the recipe or a default of finetune sets."""
        ours = {"type", *PEFT_KEYS, *LORA_KEYS, *ADALORA_KEYS}
        values = {name: getattr(self, name) for name in sorted(self.model_fields_set - ours)}
        return {
            name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
            for name, value in values.items()
        }

    def ours(self, key: str) -> Any:
        """Return the value of a finetune key that only some types have; `None` if this type lacks it."""
        return getattr(self, key, None)


PEFT_KEYS: dict[str, Any] = {
    "init_from": (
        OptionalPath,
        Field(
            default=None,
            description="Adapter to continue from: a run folder, a PEFT folder or organization/name@commit.",
        ),
    ),
    "from_other_base": (
        bool,
        Field(default=False, description="Continue from an adapter that was trained on another base model."),
    ),
}
LORA_KEYS: dict[str, Any] = {
    "loraplus_lr_ratio": (
        float | None,
        Field(
            default=None,
            ge=1,
            allow_inf_nan=False,
            description="LoRA+ (arXiv 2402.12354): learning rate of B divided by the rate of A. 16 is usual.",
        ),
    ),
}
ADALORA_KEYS: dict[str, Any] = {
    "orth_reg_every": (
        int,
        Field(
            default=1,
            ge=1,
            description="Compute the orthogonality term only in every n-th step, with n times its weight.",
        ),
    ),
}


QAT_CONFIGS = ("Int8DynamicActivationIntxWeightConfig", "IntxWeightOnlyConfig")


class Qat(Section):
    """Quantization-aware training with torchao: the forward pass rounds weights as they will be stored."""

    config: str = Field(json_schema_extra={"enum": [*QAT_CONFIGS]})
    """torchao's config for the stored weights. Int8DynamicActivation... also rounds each layer's input."""
    weight_dtype: Literal["int4", "int8"] = "int4"
    """The dtype that `finetune merge --quantize` will store."""
    group_size: int | None = Field(default=32, ge=2)
    """Number of weights that share one scale, as torchao's PerGroup. `null`: one scale per output, as
    PerAxis(0)."""


_Checkpointing = (
    Literal["auto", "none", "norms", "mlp", "mlp_int8", "full"]
    | Annotated[str, Field(pattern=r"^(mlp|mlp_int8|full):[1-9]\d{0,3}$")]
)


def _checkpointing_of(value: object) -> Any:
    """Convert `true` to `full` and `false` to `none`."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def _metric_of(value: object) -> Any:
    """Remove the prefix that Transformers gives the names of its metrics."""
    return value.removeprefix("eval_") if value in ("eval_loss", "eval_exact_match") else value


class Speed(Section):
    fused: Literal["auto"] | bool = "auto"
    """Run LoRA, DoRA, AdaLoRA and IA3 in fused kernels, which cost little more than the adapter's GEMMs.
    `auto`: on GPUs."""
    compile: (
        Literal["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | bool
    ) = "auto"
    """Compile each decoder layer with torch.compile. You can name one of torch's modes. `auto` compiles on
    GPUs, in runs whose GEMMs take more than two minutes at 40% of the GPU's peak. `auto` and `true` also use
    CUDA graphs (`reduce-overhead`) for Llama models, if all batches have one shape and are so small that the
    GPU waits for Python. `default` uses no CUDA graphs."""
    activation_checkpointing: Annotated[
        _Checkpointing, BeforeValidator(_checkpointing_of, _Checkpointing | bool)
    ] = "auto"
    """Activations that the backward pass recomputes, to save memory. `norms`: the norms, a seventh of the
    saved activations. `mlp`: also the first half of fused MLPs. It saves two thirds of the memory and takes a
    sixth more time. `mlp:8` does so in eight layers. `mlp_int8` stores that half in int8 instead. It saves a
    third of the memory, takes 2% more time, and changes gradients by 1%. `mlp_int8:8` recomputes it in eight
    layers. `full`: all layers, for a third more time. `full:12`: twelve layers, and `mlp` in the others.
    `true` means `full`, and `false` means `none`. `auto` recomputes as little as fits. It uses `mlp_int8`
    only on an fp8 base model."""
    offload: (
        Literal["auto", "none", "activations", "optimizer", "all"]
        | Annotated[str, Field(pattern=r"^activations:[1-9]\d{0,3}$")]
    ) = "auto"
    """Data that a GPU moves to CPU memory. `activations`: the activations that `mlp` or `mlp_int8` leaves, or
    the inputs of layers that are recomputed whole. `activation_checkpointing: auto` then becomes `mlp` if CPU
    memory has room, and `full` otherwise. Copies run at the same time as the layers. `activations:8`: the
    same in eight layers. `optimizer`: AdamW's state, so that AdamW runs on the CPU. This is meant for
    `adapter.type: full`, because an adapter's state is small. `all`: both. `auto` offloads only on an fp8
    base model, if `mlp_int8` alone does not fit and copies are not slower than the layers. It then offloads
    so many layers that no MLP is recomputed."""
    loss: Literal["auto", "chunked", "chunked_fp8", "trl"] = "auto"
    """Cross-entropy in chunks of tokens, or TRL's cross-entropy. `chunked_fp8` also computes the gradient of
    the hidden states with an fp8 GEMM. It needs a frozen bf16 output head and a GPU with fp8 GEMMs. `auto`:
    `chunked` if the loss equals the model's own loss, and `chunked_fp8` on an fp8 base model of a hidden size
    of at least 2,048."""
    fp8_experts: Literal["auto"] | bool = "auto"
    """Run the GEMMs of a mixture's quantized experts in fp8, on Hopper GPUs. Inputs and their gradients are
    rounded to fp8, and 4-bit weights too, for each GEMM. `auto`: with an fp8 base model. `true`: also with
    NF4 or FP4, which takes less time. `false`: the weights are dequantized to bf16 for each GEMM."""
    qat: Qat | None = None
    """Quantization-aware training, for `finetune merge --quantize`; `null`: none."""


class Train(Section):
    """finetune's own keys. `build.sections` adds every SFTConfig field that no other section owns."""

    output_dir: LocalFolder | None = None
    """The run folder; `null`: `runs/<recipe>-<time>`."""
    effective_batch_size: int = Field(default=32, ge=1)
    """Sequences in one optimizer step, over all processes."""
    per_device_train_batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] | None = None
    """Micro-batch size: sequences in one forward pass of a process. `null`: the largest divisor of each
    process's share up to 8. `auto`: the largest that fits in memory, tried with the longest sequences before
    training."""
    learning_rate: float = Field(default=2e-4, ge=0, allow_inf_nan=False)
    """Peak learning rate. Usual values are 2e-4 for LoRA-like adapters, 1e-2 for ia3 and 1e-5 for full."""
    max_steps: int | None = Field(default=None, ge=1, le=10**15)
    """Optimizer steps. Excludes `num_train_epochs`."""
    num_train_epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Number of epochs; 3 if you set neither this key nor `max_steps`."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of adapter initialization, dropout, shuffling and the validation split."""

    save_strategy: Literal["auto", "no", "steps", "epoch"] = "auto"
    """When to save checkpoints. `auto`: every `save_steps` if you set it, else every ten minutes. `no`: only
    when a signal or `--until` stops the run."""
    save_steps: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Optimizer steps between two checkpoints. A number below 1 is a share of the run."""
    save_total_limit: int | None = Field(default=2, ge=1)
    """Number of checkpoints to keep. finetune deletes older ones. `null`: all."""

    dataloader_timeout: int = Field(default=600, ge=0, le=10**6)
    """Seconds to wait for a batch from a data loader worker. Then the run ends (exit 5). 0: no limit."""
    skip_nonfinite: int = Field(default=0, ge=0)
    """Consecutive steps that may be skipped because their gradients are NaN or Inf. A skipped step changes
    neither the weights nor the schedule. 0: the first such step ends the run (exit 5)."""
    stop_at_spike: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """End the run (exit 5) if three consecutive logged losses exceed the median of the 32 losses before them
    by this factor. `null`: print a note once, at a factor of 2."""

    @property
    def epochs(self) -> float:
        """The number of epochs without `max_steps`: 3 by default, as in `TrainingArguments`."""
        return self.num_train_epochs or 3.0

    def passed_on(self) -> dict[str, Any]:
        """Return the SFTConfig keys that the recipe sets, to pass on unchanged."""
        ours = Train.model_fields.keys()
        return {name: getattr(self, name) for name in sorted(self.model_fields_set - ours)}


class Eval(Section):
    tasks: list[PathName] = []
    """Names of lm-eval tasks, the shipped `general_knowledge`, or task files: `[arc_easy, my/task.yaml]`."""
    limit: int | None = Field(default=None, ge=1)
    """Examples of each task; `null`: all."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Solved examples before each question of an lm-eval task; `null`: the task's own number."""
    apply_chat_template: bool = False
    """Apply the chat template to lm-eval tasks. A local task sets this itself (`chat`)."""
    engine: Literal["hf", "vllm"] = "hf"
    """Library that runs `tasks`: transformers, or vLLM if it is installed."""
    forgetting: bool | PathName = True
    """Text on which forgetting is measured. `true`: the shipped text. Each example of a file has a `text`."""
    generate: bool = True
    """Also generate answers to the validation set at the end, with the base model and the fine-tuned model,
    for exact match and samples. `false`: compute only the losses, in a fraction of the time."""
    samples: int = Field(default=5, ge=0)
    """Validation examples for which the answers of both models are shown side by side."""
    batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Sequences that are generated or scored together. `auto`: as many as fit in memory, at most 64."""
    eval_steps: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Training steps between two evaluations on the validation set. A number below 1 is a share of the run.
    `null`: only at the end."""
    metric_for_best_model: Annotated[str, BeforeValidator(_metric_of)] = "loss"
    """Metric that selects the best weights: `loss`, `eval_loss`, `exact_match`, or a task's metric such as
    `arc_easy/acc`."""
    load_best_model_at_end: bool = True
    """Save the weights of the best evaluation during training, not the last weights. Needs `eval_steps`."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this number of evaluations without an improvement; `null`: never."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest generated answer in tokens; `null`: the longest reference answer plus 16 tokens."""
    min_loss_difference: float = Field(default=0.01, ge=0)
    """Smallest loss difference that matters, in nats per token. A smaller difference is called negligible."""
    min_score_difference: float = Field(default=0.01, ge=0, le=1)
    """Smallest difference that matters in exact match, accuracy and other scores. 0.01 is 1 point of 100."""


class Publish(Section):
    repo: str | None = None
    """Hub repository (`organization/name`) to push to; `null`: finetune uploads nothing."""
    private: bool = True
    """Create a private repository. `false` makes a new repository public."""
    revision: str | None = None
    """Branch to push to; `null`: main."""
    base_model: str | None = None
    """Hub id (`organization/name`) of the base model, if `model.name` is a local folder."""
    license: str | None = None
    """License of the published model, by its name on the Hub; `null`: the base model's license."""
    samples: bool = True
    """Publish eval.json with its samples of the validation set."""


@dataclass
class Origin:
    """The origin of a recipe and of its values, for error messages and for `recipe.resolved.yaml`."""

    path: Path
    where: dict[strict_yaml.Keys, str] = field(default_factory=dict)
    set_by: dict[str, str] = field(default_factory=dict)
    """Dotted key -> recipe, override or default, with the reason."""
    notices: list[str] = field(default_factory=list)
    """Notices about ignored and displaced keys. Each is printed once."""
    file_type: str = ""
    """The file's `adapter.type`, if an override sets another type."""
    checked: dict[str, Any] = field(default_factory=dict)
    """The values that were checked. A copy of the recipe can have others."""


class Recipe(Section):
    """The complete settings of one run."""

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
