"""The shape of every JSON file of a run folder, which `RunFolder` checks when it writes and reads one.

A key that a model does not know is allowed: older and newer releases write other ones. A key that a model
knows must have its type, because reports and comparisons calculate with it. The version of the shapes is
`format_version` in environment.json.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from finetune.core import strict_json

LARGEST = 10**18  # the largest number that reports calculate with
Scores = dict[str, float | None]
Nothing = Annotated[dict[str, float], Field(max_length=0)]


Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Count = Annotated[float, Field(ge=0, le=LARGEST)]


class Shape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class RecipeModel(Shape):
    name: str = ""


class RecipeData(Shape):
    max_length: int | None = None
    validation: str | None = None
    validation_fraction: float | None = None


class RecipeAdapter(Shape):
    type: str | None = None
    r: int | None = None


class RecipeTrain(Shape):
    learning_rate: float | None = None


class ResolvedRecipe(Shape):
    """The keys of recipe.resolved.yaml that a report reads. Other commands load the file as a recipe."""

    model: RecipeModel = RecipeModel()
    data: RecipeData = RecipeData()
    adapter: RecipeAdapter = RecipeAdapter()
    train: RecipeTrain = RecipeTrain()


class Git(Shape):
    commit: str
    """Commit of finetune's own source folder."""
    dirty: bool = False
    """Whether the source folder has uncommitted changes."""


class Hardware(Shape):
    device: str
    """cuda or cpu."""
    name: str
    """Name of the GPU."""
    count: int
    """Number of visible devices."""
    memory_gib: float
    """Memory of one device."""
    cpu_cores: int
    """Number of CPU cores."""


class Launch(Shape):
    launcher: str
    """Program that started the processes."""
    processes: int = Field(ge=1)
    """Number of processes."""
    precision: str
    """Accelerate's `mixed_precision`."""
    splitter: str | None = None
    """FSDP or DeepSpeed, if the weights or the optimizer state are sharded."""
    environment: dict[str, str] = {}
    """Variables of the launch."""


class BaseIdentity(Shape):
    config: dict[str, Any] = {}
    """Values of config.json that change what the base model computes."""
    generation_config: dict[str, Any] = {}
    """Values of generation_config.json."""
    tensors: dict[str, str] = {}
    """Weight file: hash of its header and of both ends of each tensor."""


class Environment(Shape):
    """environment.json."""

    python: str
    """Version of Python."""
    platform: str
    """Operating system and processor."""
    packages: dict[str, str | None]
    """Package: version. Null if the package is not installed."""
    git: Git | None = None
    hardware: Hardware
    launch: Launch
    base_model: BaseIdentity | None = None
    """The base model that the run has trained."""


class Histogram(Shape):
    counts: list[Count] = Field(min_length=1)
    """Number of examples per bin."""
    edges: list[Finite]
    """Limits of the bins, in tokens."""
    percentiles: list[Finite] = Field(min_length=5, max_length=5)
    """The 1, 25, 50, 75 and 99% percentiles, in tokens."""

    @model_validator(mode="after")
    def _check_extent(self) -> Histogram:
        if len(self.edges) != len(self.counts) + 1 or self.edges[-1] <= self.edges[0] or not any(self.counts):
            raise ValueError("counts and edges do not form a histogram")
        return self


class Mix(Shape):
    weight: Count
    """The `weight` of the source in the recipe."""
    rows: Count
    """Number of examples."""
    tokens: Count
    """Number of tokens."""
    used_tokens: Count | None = None
    """Number of tokens in an epoch, each as often as it is used. Older runs do not have it."""


class Packing(Shape):
    rows: float
    """Number of sequences after packing."""
    budget: float
    """Tokens per sequence."""
    fill: float
    """Share of the tokens that are not padding."""


class Split(Shape):
    """What became of the rows of one split (`data.audit.Report`)."""

    sources: dict[str, str] = {}
    formats: dict[str, str] = {}
    unused: dict[str, dict[str, int] | list[str]] = {}
    """Source: unused column: number of examples with a value in it. A list in format 1."""
    read: dict[str, int] = {}
    passed_by: dict[str, list[str]] = {}
    folders: list[str] = []
    notes: list[str] = []
    rows: int = 0
    kept: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss_weight: float = 0.0
    trained_by: dict[str, int] = {}
    longest: int = 0
    lengths: Histogram | Nothing = {}
    cut_tokens: int = 0
    counts: dict[str, int] = {}
    places: dict[str, list[str]] = {}
    reasons: dict[str, list[str]] = {}
    mix: dict[str, Mix] = {}
    packing: Packing | Nothing = {}
    positions: int = 0
    longest_prompt: int = 0
    seen: int = 0
    seconds: float = 0.0
    token_ids: str = ""


class DataReport(Shape):
    """data_report.json."""

    train: Split
    validation: Split | None = None
    # Readers go through all splits
    __pydantic_extra__: dict[str, Split]  # pyright: ignore[reportIncompatibleVariableOverride] (pydantic's own way to type them)


class Check(Shape):
    """One of checks.json."""

    option: str
    """The setting that was checked."""
    expected: str
    """The value that you asked for."""
    actual: str
    """The value that ran."""
    how: str
    """Where finetune read the value."""
    passed: bool
    """Whether the two values agree."""


def _has_step(record: Scores) -> Scores:
    step = record.get("step")
    if step is None or not 0 <= step <= LARGEST:
        raise ValueError("a line has no valid step")
    return record


Step = Annotated[Scores, AfterValidator(_has_step)]
"""A line of metrics.jsonl: of a training step (`loss`) or of an evaluation in training."""


class MeasuredStep(Shape):
    """A training step of a run that an experiment measures."""

    step: Count
    loss: float
    tokens: float
    tokens_per_second: float
    step_seconds: float
    mfu: float | None
    gpu_memory_gib: float | None
    host_memory_gib: float
    cpu_seconds: float | None = None


def _check_alike(steps: list[MeasuredStep]) -> list[MeasuredStep]:
    for key in ("mfu", "gpu_memory_gib", "cpu_seconds"):
        if len({getattr(step, key) is None for step in steps}) > 1:
            raise ValueError(f"only some steps have {key}")
    return steps


class Difference(Shape):
    value: float
    """Score of the fine-tuned model minus the score of the base model."""
    low: float
    """Lower end of the 95% interval."""
    high: float
    """Upper end of the 95% interval."""
    p: float | None = None
    """p-value."""
    verdict: str = ""
    """better, worse or no significant difference."""


class Compared(Shape):
    base: Scores = {}
    """Metric: score of the base model."""
    tuned: Scores = {}
    """Metric: score of the fine-tuned model."""
    difference: dict[str, Difference] = {}
    """Metric: difference of the two scores."""


class Task(Compared):
    rows: int | None = None
    """Number of examples."""
    main: str | None = None
    """The metric that decides the verdict."""
    forgetting: bool = False
    """Whether the task measures forgetting."""
    higher_is_better: dict[str, bool | None] = {}
    """Metric: whether a higher score is better."""
    settings: dict[str, Any] = {}
    """Settings of the task, such as the number of examples in the prompt."""


class Source(Compared):
    source: str
    """File or Hub dataset of the validation set."""
    rows: int = 0
    """Number of its examples."""


class Message(Shape):
    role: str
    """system, user, assistant or tool."""
    content: Any = None
    """The text of the message."""


class Sample(Shape):
    prompt: str | list[Message]
    """The prompt."""
    reference: str | None = None
    """The answer in the validation set."""
    base: str | None = None
    """Answer of the base model."""
    tuned: str | None = None
    """Answer of the fine-tuned model."""
    where: str = ""
    """Place of the example, as file:line."""
    base_loss: float | None = None
    """Loss per token of the base model."""
    tuned_loss: float | None = None
    """Loss per token of the fine-tuned model."""


class Stops(Shape):
    answers: list[int]
    """Token ids that end an answer in the evaluation."""
    model: list[int]
    """Token ids that end an answer by the base model's own settings."""


class Settings(Shape):
    rows: int = 0
    """Number of validation examples."""
    notes: list[str] = []
    """Notes on the evaluation."""
    data: dict[str, str] = {}
    model: str | None = None
    """The base model."""
    storage: str | None = None
    """Quantization of the base model."""
    stops: Stops | Nothing = {}
    """Tokens that end an answer."""


class Verdict(Shape):
    word: str | None = None
    """The verdict in one word."""
    title: str | None = None
    """The verdict in one sentence."""
    why: str = ""
    """The reason."""
    forgot: list[str] = []
    """Tasks on which the fine-tuned model is worse."""


class PerExample(Shape):
    loss: list[float]
    """Sum of the loss, in nats."""
    exact_match: list[float | bool | None] | None = None
    """Whether the answer is correct."""


class Examples(Shape):
    group: list[int]
    """Group per example. Examples with the same prompt share a group."""
    tokens: list[Count]
    """Tokens per example that contribute to the loss, or the sum of their weights."""
    base: PerExample
    tuned: PerExample

    @model_validator(mode="after")
    def _check_lengths(self) -> Examples:
        if len({len(part) for part in (self.group, self.tokens, self.base.loss, self.tuned.loss)}) > 1:
            raise ValueError("the lists have different lengths")
        return self


class Evaluation(Compared):
    """eval.json, with numbers in place of the words for NaN and infinity."""

    tasks: dict[str, Task] = {}
    """Name of the task: its scores."""
    sources: list[Source] = []
    """The scores per source of the validation set."""
    samples: list[Sample] = []
    """Examples with the answers of both models."""
    worst: list[Sample] = []
    """Examples with the highest loss per token of the fine-tuned model."""
    settings: Settings = Settings()
    verdict: Verdict = Verdict()
    examples: Examples | None = None
    """Values per example, to compare two runs."""


class SavedFile(Shape):
    bytes: int = Field(ge=0)
    """Size of the file."""
    xxh3_128: str
    """Hash of its content."""


class SavedWeights(Shape):
    """weights.json: the files of the trained weights, which later commands compare."""

    folder: str
    """adapter or model."""
    files: dict[str, SavedFile]
    """Name of the file: its size and its hash."""


class Merge(Shape):
    """One of merge.json: what `finetune merge` reported of a folder."""

    dtype: str = ""
    """Dtype of the merged weights."""
    quantized: str | None = None
    """int8, int4 or fp8, after `--quantize`."""
    scores: dict[str, dict[str, Any]] = {}
    """Scores of the merged model."""
    files: dict[str, SavedFile] = {}
    """Name of the file: its size and its hash."""


class ComparedIds(Shape):
    """Token ids of prompts: how many prompts differ, or why they were not compared."""

    not_run: str | None = None
    prompts: int = 0
    different: int = 0


class ComparedStops(Shape):
    not_run: str | None = None
    expected: list[int] = []
    missing: list[int] = []


class ComparedAnswers(Shape):
    """Greedy answers: tokens, and the largest difference of a log-probability."""

    not_run: str | None = None
    prompts: int = 0
    tokens: int = 0
    largest_difference: float = 0.0
    tolerance: float = 0.0
    agree: bool = False


class ComparedLosses(Shape):
    """Losses in nats per token: of the fine-tuned model, and of the program that read the export."""

    not_run: str | None = None
    tokens: int = 0
    finetune: float = 0.0
    runtime: float = 0.0
    tolerance: float = 0.0
    agree: bool = False


class ComparedTemplate(Shape):
    """Ollama's template and the tokenizer's: how many chats they write differently."""

    chats: int = 0
    different: int = 0


class ServingCheck(Shape):
    """The serving check of an export. Without a `reader`, `not_run` says why."""

    reader: str | None = None
    not_run: str | None = None
    token_ids: ComparedIds | None = None
    stop_tokens: ComparedStops | None = None
    answers: ComparedAnswers | None = None
    loss: ComparedLosses | None = None
    template: ComparedTemplate | None = None


class Export(Shape):
    """One of export.json: what `finetune export` reported of a folder."""

    target: str = ""
    """gguf, ollama, vllm, mlx or compressed-tensors."""
    quantize: str = ""
    """How the weights are stored."""
    path: str = ""
    files: dict[str, int] = {}
    """The size of each file in bytes."""
    notes: list[str] = []
    serve: list[str] = []
    """Commands that serve the model."""
    serving_check: ServingCheck = ServingCheck()


class Chosen(Shape):
    """What `auto` became in the run of a checkpoint."""

    micro_batch: int | None = Field(default=None, ge=1, alias="train.per_device_train_batch_size")


class Contract(Shape):
    """checkpoints/contract.json, and contract.json of a checkpoint."""

    recipe: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    chosen: Chosen = Chosen()
    base: str | None = None
    sha256: str | None = None


class ManifestFile(Shape):
    bytes: int = Field(ge=0)
    sha256: str


class Manifest(Shape):
    """manifest.json of a checkpoint."""

    format: int
    step: int
    files: dict[str, ManifestFile]


class TrainerState(Shape):
    """trainer_state.json of a checkpoint: what transformers uses of its `TrainerState` in a resumed run."""

    epoch: Count = 0
    global_step: int = Field(ge=0, le=LARGEST)
    logging_steps: Count = 0
    eval_steps: Count = 0
    save_steps: Count = 0
    train_batch_size: int = Field(ge=1, le=LARGEST)
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[Any] = Field([], max_length=0)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    stateful_callbacks: dict[str, Any] = {}


class AdapterConfig(Shape):
    """adapter_config.json: what finetune itself reads of it. PEFT reads the other keys."""

    peft_type: str | None = None
    base_model_name_or_path: str | None = None
    r: int | None = None
    bias: str | None = None
    use_dora: bool | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, Any] | None = None


class Budget(Shape):
    """budget.json of a comparison: how many steps of each type fit."""

    budget_seconds: float
    runs: list[str]
    steps: dict[str, int]
    step_seconds: dict[str, float]
    failed: dict[str, str]
    besides_seconds: float | None = None
    sha256: str = ""
    """Hash of the other values (`verified_files.signed`). Without it, the steps are measured again."""


class AblationFile(Shape):
    """ablation.json of an ablation: what it was begun with."""

    values: dict[str, Any]


class Mark(Shape):
    """ablate.json and compare.json in a run folder: what a finished run of an experiment was."""

    identity: str
    seconds: float
    failed: str = ""
    date: str = ""
    host_memory_before_gib: float = 0.0


class Comparison(Shape):
    """compare.json in the folder of a comparison."""

    recipe: str
    types: dict[str, Any]


class StudyAttributes(Shape):
    """What `sweep` stores of a study."""

    identity: dict[str, str] = {}
    template_date: str = ""
    """The date that the chat template of every trial gets."""
    hashed: bool = False


class TrialAttributes(Shape):
    """What `sweep` stores of a trial, and the values that Optuna was asked to draw."""

    worker: str = Field("", pattern=r"^(\S* \d{1,7} -?\d+(\.\d+)?)?$")
    """Host, process id and start time of the process."""
    alive: Finite = 0.0
    own: bool = False
    without: list[str] = []
    again: int | None = None
    times: int = Field(0, ge=0, le=LARGEST)
    values: dict[str, Any] = {}
    reason: str = ""
    seconds: Finite = 0.0
    started_seconds: Finite = 0.0
    fixed_params: dict[str, Any] = {}


SHAPES: dict[str, Any] = {
    "recipe.resolved.yaml": ResolvedRecipe,
    "environment.json": Environment,
    "data_report.json": DataReport,
    "checks.json": list[Check],
    "metrics.jsonl": list[Step],
    "measured steps": Annotated[list[MeasuredStep], AfterValidator(_check_alike)],
    "eval.json": Evaluation,
    "eval.other.json": Evaluation,
    "weights.json": SavedWeights,
    "merge.json": dict[str, Merge],
    "export.json": dict[str, Export],
    "checkpoints/contract.json": Contract,
    "contract.json": Contract,
    "manifest.json": Manifest,
    "trainer_state.json": TrainerState,
    "adapter_config.json": AdapterConfig,
    "budget.json": Budget,
    "ablation.json": AblationFile,
    "ablate.json": Mark,
    "compare.json": Mark | Comparison,
    "mark": Mark,
    "study": StudyAttributes,
    "trial": TrialAttributes,
}


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(SHAPES.get(name, dict[str, Any]))


def parse(text: str) -> Any:
    """Parse JSON whose integers, texts and nesting every reader supports.

    Raises:
        ValueError: an integer is too large, a text can't be encoded, or the nesting is too deep.
    """
    try:
        found = json.loads(text, parse_int=_whole_number, object_pairs_hook=_object)
        if "\\ud" in text or "\\uD" in text:  # half a surrogate pair becomes a question mark
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("the JSON has too many levels") from None
    strict_json.check_depth(found)
    return found


def check(name: str, content: object) -> None:
    """Check that the content of a file has its shape.

    Raises:
        ValueError: it does not fit. The text names the place of the first fault.
    """
    try:
        _adapter(name).validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ValueError(f"{place[:100]}: {first['msg']}{more}".removeprefix(": ")) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # readers choose different values of a repeated key
        raise ValueError("an object has a key twice")
    return found


def _whole_number(digits: str) -> int:
    """Parse an integer of up to 64 bits. transformers writes the largest one for epochs without an end."""
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
