"""Every key that a task file in lm-eval's form may have, with its values.

docs/task_files.md lists the keys. finetune reads no other key. lm-eval would import the names of metrics and
functions, fetch addresses, and render most strings as templates. Here a list holds every name that a file may
use. This module does not import lm-eval. A test compares the lists with the registry of lm-eval.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from finetune.recipe.schema import Section

Text = Annotated[str, StringConstraints(max_length=20_000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f/\\]+$")]
Texts = Annotated[list[Text], Field(max_length=1000)]
Files = Text | Texts
Scalar = Text | int | float | bool | None


class Metric(Section):
    """An item of `metric_list`."""

    metric: Literal[
        "acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "perplexity", "word_perplexity",
        "byte_perplexity", "bits_per_byte", "likelihood", "brier_score", "f1", "mcc", "bleu", "chrf",
        "chrf++", "ter",
    ]  # fmt: skip
    """A metric that lm-eval registers, never a path or a metric of the Hub."""
    aggregation: (
        Literal[
            "mean", "nanmean", "median", "perplexity", "weighted_perplexity", "bits_per_byte", "f1",
            "matthews_corrcoef", "bleu", "chrf", "chrf++", "ter", "brier_score",
        ]
        | None
    ) = None  # fmt: skip
    """How the values of all examples become one; default: lm-eval's choice for the metric."""
    higher_is_better: bool | None = None
    """Default: lm-eval's choice for the metric."""
    hf_evaluate: Literal[False] = False
    """`true` would load code from the Hub."""
    ignore_case: bool | None = None
    """Of `exact_match`."""
    ignore_punctuation: bool | None = None
    """Of `exact_match`."""
    ignore_numbers: bool | None = None
    """Of `exact_match`."""
    regexes_to_ignore: Texts | None = None
    """Of `exact_match`: patterns that are removed from answer and target."""


class Step(Section):
    """An item of `filter_list.filter`: one step between the answer of the model and the metrics."""

    function: Literal[
        "take_first", "take_first_k", "majority_vote", "lowercase", "uppercase", "remove_whitespace", "map",
        "regex", "multi_choice_regex",
    ]  # fmt: skip
    """A filter that lm-eval registers."""
    k: int | None = Field(default=None, ge=1, le=256)
    """Of `take_first_k`."""
    mapping_dict: dict[Text, Scalar] | None = None
    """Of `map`: answer -> replacement."""
    default_value: Scalar = None
    """Of `map`: replacement of other answers."""
    regex_pattern: Annotated[str, StringConstraints(max_length=1000)] | None = None
    """Of `regex` and `multi_choice_regex`; each match has a time limit."""
    group_select: int | None = Field(default=None, ge=-100, le=100)
    """Of `regex` and `multi_choice_regex`: which match counts."""
    fallback: Text | None = None
    """Of `regex` and `multi_choice_regex`: the answer where nothing matches."""
    ignore_case: bool | None = None
    """Of `multi_choice_regex`."""
    ignore_punctuation: bool | None = None
    """Of `multi_choice_regex`."""


OPTIONS = {  # metric or filter -> the options that it takes
    "exact_match": ("ignore_case", "ignore_punctuation", "ignore_numbers", "regexes_to_ignore"),
    "take_first_k": ("k",),
    "map": ("mapping_dict", "default_value"),
    "regex": ("regex_pattern", "group_select", "fallback"),
    "multi_choice_regex": (
        *("regex_pattern", "group_select", "fallback"),
        *("ignore_case", "ignore_punctuation"),
    ),
}
NEEDED = {
    "take_first_k": ("k",),
    "map": ("mapping_dict",),
    "regex": ("regex_pattern",),
    "multi_choice_regex": ("regex_pattern",),
}


class Filter(Section):
    """An item of `filter_list`."""

    name: Name
    """How results name it."""
    filter: list[Step] = Field(min_length=1, max_length=20)
    """Its steps, in order."""


class DatasetKwargs(Section):
    """What lm-eval would hand to `datasets.load_dataset`."""

    data_files: Files | dict[Name, Files] | None = None
    """Files and patterns of files, or split -> files. finetune looks for local files in the folder of the
    task file and in the working directory. Files of a Hub dataset are in its repository. Never an address."""
    data_dir: Text | None = None
    """Folder in the dataset."""
    revision: Text | None = None
    """Branch, tag or commit of a dataset on the Hub."""
    trust_remote_code: Literal[False] = False
    """`true` would run code."""


class Fewshot(Section):
    """`fewshot_config`."""

    sampler: Literal["default", "first_n"] = "default"
    """How examples are chosen."""
    split: Name | None = None
    """Split that they come from."""
    fewshot_indices: Annotated[list[int], Field(max_length=1000)] | None = None
    """Which examples of the split."""
    samples: Annotated[list[dict[str, Any]], Field(max_length=1000)] | None = None
    """The examples themselves."""
    gen_prefix: Text | None = None
    """Start of an answer."""
    fewshot_delimiter: Text | None = None
    """Between examples."""
    target_delimiter: Text | None = None
    """Between question and answer."""


class Generation(Section):
    """`generation_kwargs`."""

    until: Text | Texts | None = None
    """Texts that end an answer."""
    max_gen_toks: int | None = Field(default=None, ge=1, le=1_000_000)
    """Tokens of an answer at most."""
    max_new_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """The same, by Transformers' name."""
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """The same, by vLLM's name."""
    do_sample: bool | None = None
    """Draw tokens, or take the most likely one."""
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    """Of drawn tokens."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Of drawn tokens."""
    top_k: int | None = Field(default=None, ge=0, le=1_000_000)
    """Of drawn tokens."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    """Above 1: fewer repetitions."""
    num_beams: int | None = Field(default=None, ge=1, le=64)
    """Beams of a search."""


class LmEvalTask(Section):
    """A task file in lm-eval's form."""

    task: Name
    """Its name in eval.json."""
    task_alias: Name | None = None
    """Not used."""
    tag: Name | Annotated[list[Name], Field(max_length=100)] | None = None
    """Not used."""
    output_type: Literal["multiple_choice", "generate_until", "loglikelihood", "loglikelihood_rolling"] = (
        "generate_until"
    )
    """How lm-eval asks the model."""
    dataset_path: Text = Field(min_length=1)
    """A local folder or the id of a dataset on the Hub. Or a format with `dataset_kwargs.data_files`:
    `json`, `csv`, `parquet`, `arrow` or `text`."""
    dataset_name: Name | None = None
    """Configuration of the dataset."""
    dataset_kwargs: DatasetKwargs | None = None
    """Which files, below."""
    training_split: Name | None = None
    """Split of few-shot examples."""
    validation_split: Name | None = None
    """Split that is evaluated where there is no `test_split`."""
    test_split: Name | None = None
    """Split that is evaluated."""
    fewshot_split: Name | None = None
    """Split of few-shot examples."""
    description: Text = ""
    """Text before the examples; no template."""
    doc_to_text: Text | int | None = None
    """The prompt: a column, or a template that is rendered in the sandbox."""
    doc_to_target: Text | int | list[Text | int] | None = None
    """The right answer: a column, a template, or the value itself."""
    doc_to_choice: Text | list[Text] | dict[str, Text] | None = None
    """The choices: a column, a template, or the choices themselves."""
    target_delimiter: Text = " "
    """Between prompt and answer."""
    fewshot_delimiter: Text = "\n\n"
    """Between examples."""
    gen_prefix: Text | None = None
    """Start of an answer: a column or a text; no template."""
    num_fewshot: int | None = Field(default=None, ge=0, le=1000)
    """Examples before each question."""
    fewshot_config: Fewshot | None = None
    """How they are chosen, below."""
    metric_list: Annotated[list[Metric], Field(min_length=1, max_length=20)] | None = None
    """Metrics, below; default: lm-eval's of the output type."""
    filter_list: Annotated[list[Filter], Field(min_length=1, max_length=20)] | None = None
    """Filters, below."""
    generation_kwargs: Generation | None = None
    """How answers are generated, below."""
    repeats: int = Field(default=1, ge=1, le=256)
    """Answers to each question."""
    should_decontaminate: bool = False
    """Not used."""
    doc_to_decontamination_query: Text | None = None
    """Not used."""
    unsafe_code: Literal[False] = False
    """`true` would run what the model wrote."""
    metadata: dict[Name, Scalar | list[Scalar]] | None = None
    """Version and notes."""


REFUSED = {  # keys of lm-eval that no file may have -> why
    "class": "takes code from elsewhere",
    "custom_dataset": "takes code from elsewhere",
    "process_docs": "takes code from elsewhere",
    "process_results": "takes code from elsewhere",
    "use_prompt": "takes code from elsewhere",
    "unsafe_code": "takes code from elsewhere",
    "doc_to_image": "is for images, which are not evaluated",
    "doc_to_audio": "is for sound, which is not evaluated",
}
UNUSED = ("task_alias", "tag", "should_decontaminate", "doc_to_decontamination_query")
KEYS = {  # of each part, by the path that `recipe_errors.explain` gives it
    "task": LmEvalTask,
    "task.metric_list": Metric,
    "task.filter_list": Filter,
    "task.filter_list.filter": Step,
    "task.dataset_kwargs": DatasetKwargs,
    "task.fewshot_config": Fewshot,
    "task.generation_kwargs": Generation,
}
