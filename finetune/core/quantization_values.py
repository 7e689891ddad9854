"""Check that the quantization in a model's config has values of the types that libraries expect.

transformers reads lists of modules to skip as regular expressions. `skipped` returns these lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from finetune.core.errors import Problem
from finetune.core.pattern_time import Pattern

KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' old name
SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules")
MOST_SKIPPED = 1000
LARGEST_BLOCK = 2**16
_TEXT = re.compile(r"[ -~]{1,1000}")
_FLAGS = (
    "load_in_4bit", "load_in_8bit", "dequantize", "bnb_4bit_use_double_quant", "llm_int8_has_fp16_weight",
    "llm_int8_enable_fp32_cpu_offload",
)  # fmt: skip
_DTYPES = ("float32", "float16", "bfloat16")
_CHOICES = {  # transformers reads these values of bitsandbytes
    "bnb_4bit_quant_type": ("nf4", "fp4"),
    "bnb_4bit_compute_dtype": _DTYPES,
    "bnb_4bit_quant_storage": (*_DTYPES, "float64", "int8", "uint8"),
}
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # transformers' `should_convert_module`, quantizers/quantizers_utils.py


def problems(entries: Iterable[tuple[str, Any]], path: str, key: str) -> Iterator[Problem]:
    """Find wrong values in the sections of a config that declare a quantization.

    Args:
        entries: each key and value of the config, also of nested objects.
    """
    for name, declared in entries:
        if name not in KEYS or declared is None:
            continue
        for field, value, expected in _wrong(declared):
            what, name_of = (
                "a value of the model's config has the wrong type",
                ".".join(filter(None, (name, field))),
            )
            yield Problem(
                what,
                key,
                where=path,
                found=f"{name_of}: {value!r}"[:200],
                expected=expected,
                fix="correct the file, or download the model again",
                code="model-config",
            )


def skipped(declared: dict[str, Any]) -> list[tuple[str, Pattern]]:
    """The modules that are not quantized: each text, and the regular expression that it becomes."""
    texts = [text for name in SKIPPED for text in declared.get(name) or ()]
    return [(text, Pattern("match", f"(?:{text}){_BOUNDARY}")) for text in texts]


def _wrong(declared: object) -> Iterator[tuple[str, Any, str]]:
    """The name and value of each field that has another type, and what is expected."""
    if not isinstance(declared, dict) or not declared:
        yield "", declared, "an object with quant_method"
        return
    method = declared.get("quant_method")
    if not isinstance(method, str | None):
        yield "quant_method", method, "a string"
    yield from (
        (name, declared[name], "true or false") for name in _FLAGS if not _is_flag(declared.get(name))
    )
    for name, choices in _CHOICES.items():
        if declared.get(name) not in (None, *choices):
            yield name, declared[name], " or ".join(choices)
    threshold = declared.get("llm_int8_threshold")
    if threshold is not None and type(threshold) is not float:
        yield "llm_int8_threshold", threshold, "a number such as 6.0"
    blocks = declared.get("weight_block_size")
    if blocks is not None and not _is_block(blocks):
        yield "weight_block_size", blocks, f"two integers from 1 to {LARGEST_BLOCK:,}"
    groups = declared.get("config_groups")
    if groups is not None and not _are_groups(groups):
        yield "config_groups", groups, "objects with an object `weights` each"
    for name in SKIPPED:
        expected = f"at most {MOST_SKIPPED:,} names or regular expressions of ASCII"
        if (names := declared.get(name)) is not None and not _are_patterns(names):
            yield name, names, expected


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_block(value: object) -> bool:
    sizes = value if isinstance(value, list) else []
    return len(sizes) == 2 and all(type(size) is int and 0 < size <= LARGEST_BLOCK for size in sizes)


def _are_groups(value: object) -> bool:
    groups = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(one, dict) and isinstance(one.get("weights"), dict | None) for one in groups)


def _are_patterns(value: object) -> bool:
    if not isinstance(value, list) or len(value) > MOST_SKIPPED:
        return False
    return all(isinstance(one, str) and _TEXT.fullmatch(one) and _compiles(one) for one in value)


def _compiles(text: str) -> bool:
    try:
        re.compile(f"(?:{text}){_BOUNDARY}")
    except (re.error, OverflowError, RecursionError):
        return False
    return True
