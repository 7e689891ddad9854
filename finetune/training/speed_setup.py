"""Apply `speed:` to the model of a run."""

from __future__ import annotations

from peft import PeftModel
from transformers import PreTrainedModel
from trl.trainer.sft_config import SFTConfig

from finetune.autoconfig import compilation, packing_support
from finetune.checkpointing import resume_contract
from finetune.core import run_checks
from finetune.distributed import collectives
from finetune.speed import apply_to_model, lm_head_loss, packing_isolation
from finetune.training import auto_correction
from finetune.training.run_context import RunContext

AS_BEFORE = "as in the checkpoint's run"


PROOF_TOKENS = 128  # length of the sequence that tests the isolation of packed examples


def make_fast(
    run: RunContext, adapted: PreTrainedModel | PeftModel, arguments: SFTConfig, work: compilation.Work
) -> dict[str, run_checks.Choice]:
    """Apply `speed:` to the model, verify attention before and after, and return the choices by option."""
    recipe, setup, checks = run.recipe, run.setup, run.checks
    kernel, flat = setup.attention.value, recipe.data.flat
    proved = packing_isolation.twin(adapted, setup, str(arguments.device)) if work.sharded else adapted
    with setup.autocast():  # before layers are compiled, so that they see only shapes of training
        packing_isolation.prove_same(proved, PROOF_TOKENS, kernel, flat, checks)
    name = collectives.from_main(lambda: setup.hardware.name)  # ranks may have different GPUs
    section, before = resume_contract.as_chosen(recipe.speed, run.checkpoint, name)
    corrected = run.correction.choice(auto_correction.CHECKPOINTING)
    if corrected:
        section = section.model_copy(update={"activation_checkpointing": corrected.value})
    fast = apply_to_model.apply(adapted, section, work, setup.hardware, checks).by_option()
    fast |= {auto_correction.CHECKPOINTING: corrected} if corrected else {}
    same = [f"speed.{key}" for key in before] + ["CUDA graphs"] * ("compile" in before)
    fast["speed.loss"] = collectives.from_main(lambda: lm_head_loss.choose(section.loss, adapted, arguments))
    fast |= {name: fast[name]._replace(reason=AS_BEFORE) for name in same}
    if flat:
        with setup.autocast():
            tokens, off = min(PROOF_TOKENS, recipe.data.max_length), packing_support.switch_off(recipe.data)
            packing_isolation.prove_apart(proved, tokens, kernel, checks, off)
    return fast
