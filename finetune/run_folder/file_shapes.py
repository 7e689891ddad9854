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

LARGEST = 10**18  # of a whole number
Scores = dict[str, float | None]
Nothing = Annotated[dict[str, float], Field(max_length=0)]


Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[float, Field(allow_inf_nan=False, ge=0)]


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
    """What a report reads of recipe.resolved.yaml. Other commands load it as a recipe."""

    model: RecipeModel = RecipeModel()
    data: RecipeData = RecipeData()
    adapter: RecipeAdapter = RecipeAdapter()
    train: RecipeTrain = RecipeTrain()


class Git(Shape):
    commit: str
    dirty: bool = False


class Hardware(Shape):
    device: str
    name: str
    count: int
    memory_gib: float
    cpu_cores: int


class Launch(Shape):
    launcher: str
    processes: int = Field(ge=1)
    precision: str
    splitter: str | None = None
    environment: dict[str, str] = {}


class Environment(Shape):
    """environment.json."""

    python: str
    platform: str
    packages: dict[str, str | None]
    git: Git | None = None
    hardware: Hardware
    launch: Launch


class Histogram(Shape):
    counts: list[Count] = Field(min_length=1)
    edges: list[Finite]
    percentiles: list[Finite] = Field(min_length=5, max_length=5)

    @model_validator(mode="after")
    def _check_extent(self) -> Histogram:
        if len(self.edges) != len(self.counts) + 1 or self.edges[-1] <= self.edges[0] or not any(self.counts):
            raise ValueError("counts and edges do not form a histogram")
        return self


class Mix(Shape):
    weight: Count
    rows: Count
    tokens: Count


class Packing(Shape):
    rows: float
    budget: float
    fill: float


class Split(Shape):
    """What became of the rows of one split (`data.audit.Report`)."""

    sources: dict[str, str] = {}
    formats: dict[str, str] = {}
    unused: dict[str, dict[str, int] | list[str]] = {}
    """A list in format 1."""
    read: dict[str, int] = {}
    passed_by: dict[str, list[str]] = {}
    folders: list[str] = []
    notes: list[str] = []
    rows: int = 0
    kept: int = 0
    tokens: int = 0
    trained_tokens: int = 0
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


class Check(Shape):
    """One of checks.json."""

    option: str
    expected: str
    actual: str
    how: str
    passed: bool


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
    low: float
    high: float
    p: float | None = None
    verdict: str = ""


class Compared(Shape):
    base: Scores = {}
    tuned: Scores = {}
    difference: dict[str, Difference] = {}


class Task(Compared):
    rows: int | None = None
    main: str | None = None
    forgetting: bool = False
    higher_is_better: dict[str, bool | None] = {}
    settings: dict[str, Any] = {}


class Source(Compared):
    source: str
    rows: int = 0


class Message(Shape):
    role: str
    content: Any = None


class Sample(Shape):
    prompt: str | list[Message]
    reference: str | None = None
    base: str | None = None
    tuned: str | None = None
    where: str = ""
    base_loss: float | None = None
    tuned_loss: float | None = None


class Settings(Shape):
    rows: int = 0
    notes: list[str] = []
    data: dict[str, str] = {}
    model: str | None = None
    storage: str | None = None
    stops: dict[str, Any] = {}


class Verdict(Shape):
    word: str | None = None
    title: str | None = None
    why: str = ""
    forgot: list[str] = []


class PerExample(Shape):
    loss: list[float]
    exact_match: list[float | bool | None] | None = None


class Examples(Shape):
    group: list[int]
    tokens: list[int]
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
    sources: list[Source] = []
    samples: list[Sample] = []
    worst: list[Sample] = []
    settings: Settings = Settings()
    verdict: Verdict = Verdict()
    examples: Examples | None = None


class Merge(Shape):
    """One of merge.json: what `finetune merge` reported of a folder."""

    dtype: str = ""
    quantized: str | None = None
    scores: dict[str, dict[str, Any]] = {}


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


class Ladder(Shape):
    """ladder.json of an ablation: what it was begun with."""

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


SHAPES: dict[str, Any] = {
    "recipe.resolved.yaml": ResolvedRecipe,
    "environment.json": Environment,
    "data_report.json": DataReport,
    "checks.json": list[Check],
    "metrics.jsonl": list[Step],
    "measured steps": Annotated[list[MeasuredStep], AfterValidator(_check_alike)],
    "eval.json": Evaluation,
    "eval.other.json": Evaluation,
    "merge.json": dict[str, Merge],
    "checkpoints/contract.json": Contract,
    "contract.json": Contract,
    "manifest.json": Manifest,
    "adapter_config.json": AdapterConfig,
    "budget.json": Budget,
    "ladder.json": Ladder,
    "ablate.json": Mark,
    "compare.json": Mark | Comparison,
    "mark": Mark,
}


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(SHAPES.get(name, dict[str, Any]))


def parse(text: str) -> Any:
    """JSON with whole numbers that every reader can hold, text that can be written, and few levels.

    Raises:
        ValueError: it is not, with the reason.
    """
    try:
        found = json.loads(text, parse_int=_whole_number, object_pairs_hook=_object)
        if "\\ud" in text or "\\uD" in text:  # half a surrogate pair is no text: it becomes a question mark
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("the JSON has too many levels") from None
    strict_json.check_depth(found)
    return found


def check(name: str, content: object) -> None:
    """Hold the content of a file to its shape.

    Raises:
        ValueError: it does not fit, with the place of the first fault.
    """
    try:
        _adapter(name).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ValueError(f"{place[:100]}: {first['msg']}{more}".removeprefix(": ")) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # readers differ in which of the two they take
        raise ValueError("an object has a key twice")
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > 19 or abs(int(digits)) > LARGEST:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
