"""`finetune` in a process of a launch: rank 1 has no memory in its first step, unless norms are recomputed.

A script, since a process that starts again runs its command again. Rank 1 gets `torch.OutOfMemoryError` in
the forward pass of the second layer, on a GPU from the allocator. Under FSDP2, rank 0 waits for rank 1's
shard of the weights. On CPUs FSDP2 is imitated as in test_fsdp.py.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch
from transformers.models.llama import modeling_llama

from finetune.cli import main


def run_out_of_memory() -> None:
    forward = modeling_llama.LlamaDecoderLayer.forward

    def short_of_memory(self: Any, *args: Any, **given: Any) -> Any:
        in_first_step = any(thread.name == "first step" for thread in threading.enumerate())
        recomputes = "forward" in vars(self.input_layernorm)
        if in_first_step and not recomputes and self.self_attn.layer_idx == 1 and os.environ["RANK"] == "1":
            if torch.cuda.is_available():
                torch.cuda.set_per_process_memory_fraction(0.01)
                torch.empty(2**32, dtype=torch.uint8, device="cuda")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
        return forward(self, *args, **given)

    modeling_llama.LlamaDecoderLayer.forward = short_of_memory


if __name__ == "__main__":
    if not torch.cuda.is_available():
        from support import fsdp_on_cpus

        os.environ.update(fsdp_on_cpus.ENVIRONMENT, FSDP_CPU_RAM_EFFICIENT_LOADING="false")
        fsdp_on_cpus.imitate()
    run_out_of_memory()
    sys.exit(main.main(sys.argv[1:]))
