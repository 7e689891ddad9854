"""What each attention and fp8 kernel needs. This module does not import torch."""

from __future__ import annotations

# Names that finetune registers with transformers for kernels without a mask (attention_functions.py). In each
# layer, transformers' own flash_attention_* wait for the device to get the borders of the examples, which
# breaks the compiled graph. Without the package, they download a kernel from the Hub.
IMPLEMENTATIONS = {
    "flash_attention_4": "finetune_fa4",
    "flash_attention_3": "finetune_fa3",
    "flash_attention_2": "finetune_fa2",
    "cudnn": "finetune_cudnn",
    "varlen": "finetune_varlen",
}
# flash-attention: distribution (2 and 4 share an import name) and the extra that installs it, if any
FLASH = {
    "flash_attention_2": ("flash-attn", "flash"),
    "flash_attention_3": ("flash-attn-3", ""),
    "flash_attention_4": ("flash-attn-4", "kernels"),
}
FLASH_MODULES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute.interface",
}
# Lowest compute capability; the largest head size forward and backward
LIMITS = {
    "flash_attention_4": ((9, 0), 256),
    "flash_attention_3": ((9, 0), 256),
    "flash_attention_2": ((8, 0), 256),
    "cudnn": ((8, 0), 128),
    "varlen": ((8, 0), 256),
}

# cuDNN needs 0.1 to 0.3 s on an H100 for each new length of a batch (benchmarks/LOG.md). Padding to a
# multiple of 64 tokens limits the number of lengths.
LENGTH_MULTIPLES = {"cudnn": 64}

FP8_CAPABILITY = (8, 9)  # the first GPUs with fp8 GEMMs: Ada, then Hopper
FP8_MULTIPLE = 16  # fp8 GEMMs need both dimensions of a weight to be a multiple of this
