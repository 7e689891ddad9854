"""Save the adapter or the model of a run, with its tokenizer."""

from __future__ import annotations

from pathlib import Path

from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.adapters import initialization
from finetune.core import safe_files
from finetune.core.console import Console
from finetune.distributed import collectives, sharded_tensors, transformer_engine_layers
from finetune.evaluation import scoring
from finetune.models import generation_config
from finetune.run_folder.run_folder import WEIGHTS, RunFolder


def save(
    adapted: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: RunFolder,
    initial: Path,
    screen: Console,
) -> None:
    """Save adapter or model and tokenizer on rank 0. The other ranks send their shards and wait."""
    processes, tensors = (
        PartialState(),
        transformer_engine_layers.weights(adapted)
        if transformer_engine_layers.used()
        else sharded_tensors.gathered(adapted),
    )
    target = folder.adapter if hasattr(adapted, "peft_config") else folder.model
    if processes.is_main_process:
        if target == folder.model:
            stops = scoring.stop_ids(adapted, tokenizer)
            for note in generation_config.settle_generation(adapted.generation_config, stops):
                screen.say(f"note: {note}")
        safe_files.remove(folder.path, WEIGHTS)  # it is of the weights before
        with safe_files.replace_folder(folder.path, target.name) as private:
            initialization.save(adapted, private, initial, tensors)
            tokenizer.save_pretrained(str(private))
        folder.record_weights(target)
    processes.wait_for_everyone()
    collectives.appears(target / "tokenizer_config.json")  # the last file that is saved
