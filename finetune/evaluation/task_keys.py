"""Define every key and value that a task file in lm-eval's form can have.

docs/reference/task_files.md lists the keys, and finetune reads no other key. lm-eval would import the
functions and metrics that a file names, download from addresses, and render most strings as templates. Here,
lists hold every name that a file can use. This module does not import lm-eval, and a test compares the lists
with lm-eval's registry.
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
        "chrf++",
    ]  # fmt: skip
    """A metric that lm-eval registers. A path or a metric on the Hub is not allowed."""
    aggregation: (
        Literal[
            "mean", "nanmean", "median", "perplexity", "weighted_perplexity", "bits_per_byte", "f1",
            "matthews_corrcoef", "bleu", "chrf", "chrf++", "brier_score",
        ]
        | None
    ) = None  # fmt: skip
    """How the values of all examples are aggregated. By default, lm-eval's choice for the metric."""
    higher_is_better: bool | None = None
    """By default, lm-eval's choice for the metric."""
    hf_evaluate: Literal[False] = False
    """`true` would load code from the Hub."""
    ignore_case: bool | None = None
    """For `exact_match`: ignore upper and lower case."""
    ignore_punctuation: bool | None = None
    """For `exact_match`: ignore punctuation."""
    ignore_numbers: bool | None = None
    """For `exact_match`: ignore digits."""
    regexes_to_ignore: Texts | None = None
    """For `exact_match`: patterns that are removed from answer and target."""


class Step(Section):
    """An item of `filter_list.filter`: one step between the answer of the model and the metrics."""

    function: Literal[
        "take_first", "take_first_k", "majority_vote", "lowercase", "uppercase", "remove_whitespace", "map",
        "regex", "multi_choice_regex",
    ]  # fmt: skip
    """A filter that lm-eval registers."""
    k: int | None = Field(default=None, ge=1, le=256)
    """For `take_first_k`: the number of answers to keep."""
    mapping_dict: dict[Text, Scalar] | None = None
    """For `map`: answer -> replacement."""
    default_value: Scalar = None
    """For `map`: replacement of all other answers."""
    regex_pattern: Annotated[str, StringConstraints(max_length=1000)] | None = None
    """For `regex` and `multi_choice_regex`. Each match has a time limit."""
    group_select: int | None = Field(default=None, ge=-100, le=100)
    """For `regex` and `multi_choice_regex`: the index of the match to use."""
    fallback: Text | None = None
    """For `regex` and `multi_choice_regex`: the answer if nothing matches."""
    ignore_case: bool | None = None
    """For `multi_choice_regex`: ignore upper and lower case."""
    ignore_punctuation: bool | None = None
    """For `multi_choice_regex`: ignore punctuation."""


OPTIONS = {  # metric or filter -> the options that it accepts
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
    """Its name in the results."""
    filter: list[Step] = Field(min_length=1, max_length=20)
    """Its steps, in order."""


class DatasetKwargs(Section):
    """Options that lm-eval would pass to `datasets.load_dataset`."""

    data_files: Files | dict[Name, Files] | None = None
    """Files and file patterns, or split -> files.

    finetune looks for local files in the folder of the task file and in the working directory. Files of a Hub
    dataset are in its repository. An address is not allowed.
    """
    data_dir: Text | None = None
    """Folder in the dataset."""
    revision: Text | None = None
    """Branch, tag or commit of a dataset on the Hub."""
    trust_remote_code: Literal[False] = False
    """`true` would run code."""


class Fewshot(Section):
    """`fewshot_config`."""

    sampler: Literal["default", "first_n"] = "default"
    """How few-shot examples are chosen."""
    split: Name | None = None
    """Split of the few-shot examples."""
    fewshot_indices: Annotated[list[int], Field(max_length=1000)] | None = None
    """Indices of the examples in the split."""
    samples: Annotated[list[dict[str, Any]], Field(max_length=1000)] | None = None
    """The examples themselves."""
    gen_prefix: Text | None = None
    """Text at the start of an answer."""
    fewshot_delimiter: Text | None = None
    """Text between examples."""
    target_delimiter: Text | None = None
    """Text between question and answer."""


class Generation(Section):
    """`generation_kwargs`."""

    until: Text | Texts | None = None
    """Texts that end an answer."""
    max_gen_toks: int | None = Field(default=None, ge=1, le=1_000_000)
    """Maximum number of generated tokens."""
    max_new_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """The same, with Transformers' name."""
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """The same, with vLLM's name."""
    do_sample: bool | None = None
    """Sample tokens instead of taking the most likely one."""
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    """Sampling temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this probability."""
    top_k: int | None = Field(default=None, ge=0, le=1_000_000)
    """Sample only from this many most likely tokens."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    """Values above 1 reduce repetitions."""
    num_beams: int | None = Field(default=None, ge=1, le=64)
    """Number of beams in beam search."""


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
    """The kind of request that lm-eval sends to the model."""
    dataset_path: Text = Field(min_length=1)
    """A local folder, or the id of a Hub dataset.

    Or a format (`json`, `csv`, `parquet`, `arrow`, `text`) with `dataset_kwargs.data_files`.
    """
    dataset_name: Name | None = None
    """Configuration of the dataset."""
    dataset_kwargs: DatasetKwargs | None = None
    """The files, see below."""
    training_split: Name | None = None
    """Split of few-shot examples."""
    validation_split: Name | None = None
    """Split to evaluate if there is no `test_split`."""
    test_split: Name | None = None
    """Split to evaluate."""
    fewshot_split: Name | None = None
    """Split of few-shot examples."""
    description: Text = ""
    """Text before the examples. It is not a template."""
    doc_to_text: Text | int | None = None
    """The prompt: a column, or a template that is rendered in the sandbox."""
    doc_to_target: Text | int | list[Text | int] | None = None
    """The correct answer: a column, a template, or the value itself."""
    doc_to_choice: Text | list[Text] | dict[str, Text] | None = None
    """The choices: a column, a template, or the choices themselves."""
    target_delimiter: Text = " "
    """Text between prompt and answer."""
    fewshot_delimiter: Text = "\n\n"
    """Text between examples."""
    gen_prefix: Text | None = None
    """Text at the start of an answer: a column or a text. It is not a template."""
    num_fewshot: int | None = Field(default=None, ge=0, le=100)
    """Number of few-shot examples before each question."""
    fewshot_config: Fewshot | None = None
    """How few-shot examples are chosen, see below."""
    metric_list: Annotated[list[Metric], Field(min_length=1, max_length=20)] | None = None
    """Metrics, see below. By default, lm-eval's choice for the output type."""
    filter_list: Annotated[list[Filter], Field(min_length=1, max_length=20)] | None = None
    """Filters, see below."""
    generation_kwargs: Generation | None = None
    """How answers are generated, see below."""
    repeats: int = Field(default=1, ge=1, le=256)
    """Number of answers to each question."""
    should_decontaminate: bool = False
    """Not used."""
    doc_to_decontamination_query: Text | None = None
    """Not used."""
    unsafe_code: Literal[False] = False
    """`true` would run code that the model wrote."""
    metadata: dict[Name, Scalar | list[Scalar]] | None = None
    """Version and notes."""


_CODE = "this key runs code, and finetune runs no code of a task file"
REFUSED = {  # keys of lm-eval that a file cannot have -> the reason
    **dict.fromkeys(("class", "custom_dataset", "process_docs", "process_results"), _CODE),
    "use_prompt": _CODE,
    "unsafe_code": "the task would run code that the model writes",
    "doc_to_image": "finetune does not evaluate images",
    "doc_to_audio": "finetune does not evaluate audio",
}
UNUSED = ("task_alias", "tag", "should_decontaminate", "doc_to_decontamination_query")
KEYS = {  # the model of each part, by the path that `recipe_errors.explain` uses
    "task": LmEvalTask,
    "task.metric_list": Metric,
    "task.filter_list": Filter,
    "task.filter_list.filter": Step,
    "task.dataset_kwargs": DatasetKwargs,
    "task.fewshot_config": Fewshot,
    "task.generation_kwargs": Generation,
}
