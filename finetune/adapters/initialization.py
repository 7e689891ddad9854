"""LoRA initializations that read weights or data, each with PEFT's own function.

PiSSA, OLoRA, CorDA and LoRA-GA move a part of the base model's weights into the adapter. After training,
finetune saves the difference from the initial adapter as a plain LoRA adapter of twice the rank. That adapter
loads on the published base model.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core import upstream_private
from finetune.core.errors import Exit, Problem, UserError
from finetune.recipe.adapter_types import PREPARED_INITS, REBASING_INITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from peft import LoraConfig, PeftConfig, PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    from finetune.core.run_checks import RunChecks

    Batches = Callable[[], list[dict[str, torch.Tensor]]]

CALIBRATION = (8, 4, 512)  # batches, sequences per batch, tokens per sequence


def attach(
    model: PreTrainedModel,
    config: Any,
    init: object,
    linear: Iterable[str],
    batches: Batches,
    checks: RunChecks,
) -> PeftModel:
    """Call `get_peft_model`, and run the preparation of `init_lora_weights` before or after it.

    Args:
        linear: full names of the linear layers, for preparations that don't support "all-linear".

    Raises:
        UserError: the preparation needs weights that are missing (exit 2).
    """
    from peft import get_peft_model

    if not isinstance(init, str) or not init.startswith(PREPARED_INITS):
        adapted: Any = get_peft_model(model, config)
        _start_zero_rows(adapted, checks)
        return adapted
    if config.target_modules == "all-linear":
        config.target_modules = set(linear)
    before = _first_logits(model, batches)
    prepare = {"eva": _eva, "loftq": _loftq, "corda": _corda, "lora_ga": _lora_ga}.get(init, _plain)
    adapted = prepare(model, config, batches)
    _start_zero_rows(adapted, checks)
    after = _first_logits(adapted, batches)
    changed = float((after - before).norm() / before.norm())
    actual = f"logits of one batch differ by {changed:.1e} from the base's"
    # LoftQ moves a 4-bit base model towards its unquantized weights. The other initializations do not change
    # the function of the model.
    is_unchanged = changed < (1.0 if init == "loftq" else 5e-2)
    checks.add(
        "adapter.init_lora_weights",
        expected=init,
        actual=f"{init}: {actual}",
        how="prepared by PEFT; ||with - without|| / ||without||, before training",
        ok=is_unchanged and _prepared(adapted),
    )
    return adapted


def calibration(dataset: Any, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return batches of the first training sequences.

    Each batch has input_ids, attention_mask and labels, int64 tensors of shape (sequences, tokens).
    """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    count, size, tokens = CALIBRATION
    keys, collate = ("input_ids", "labels"), DataCollatorForLanguageModeling(pad_token_id=0)
    rows = [{key: row[key][:tokens] for key in keys} for row in islice(dataset, count * size)]
    groups = (rows[start : start + size] for start in range(0, len(rows), size))
    return [{name: tensor.to(device) for name, tensor in collate(group).items()} for group in groups]


def rebases(adapted: nn.Module) -> bool:
    """Return whether the initialization of the live adapter changed the base model."""
    config = getattr(adapted, "peft_config", {}).get("default")
    init = getattr(config, "init_lora_weights", None)
    return isinstance(init, str) and init.startswith(REBASING_INITS)


def save(
    adapted: PreTrainedModel | PeftModel,
    target: Path,
    initial: Path,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Save the adapter. If it changed the base model, save the difference from the `initial` adapter.

    Args:
        state: the full tensors of a sharded model.
    """
    if rebases(adapted):
        adapted.save_pretrained(str(target), path_initial_model_for_weight_conversion=str(initial))
    else:
        options = embeddings(adapted)
        adapted.save_pretrained(str(target), state_dict=state, **options)


def embeddings(adapted: PreTrainedModel | PeftModel) -> dict[str, Any]:
    """Return the option that tells PEFT whether to save the embeddings.

    PEFT saves resized or adapted embeddings. Without this option, it compares their size with the config of
    the Hub's `main` branch, which may differ from the revision of the run.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    peft: Any = getattr(adapted, "peft_config", {}).get("default")
    if getattr(peft, "trainable_token_indices", None):  # the adapter holds the trained embeddings
        return {"save_embedding_layers": False}
    name = str(getattr(peft, "base_model_name_or_path", "."))
    if Path(name).exists() or isinstance(adapted.get_input_embeddings(), BaseTunerLayer):
        return {}
    then = type(adapted.config).from_pretrained(name, revision=peft.revision or "main")
    sizes = {getattr(one, "vocab_size", None) for one in (then, adapted.config)}
    return {"save_embedding_layers": len(sizes) > 1}


def save_initial(adapted: Any, initial: Path) -> None:
    """Save the initial adapter if it changed the base model, because `save` needs it after training."""
    if rebases(adapted):
        config = adapted.peft_config["default"]
        # PEFT would repeat the decomposition when it loads the adapter.
        init, config.init_lora_weights = config.init_lora_weights, True
        adapted.save_pretrained(str(initial))
        config.init_lora_weights = init


def _start_zero_rows(adapted: Any, checks: RunChecks) -> None:
    """Avoid the division 0/0 in DoRA for rows of a weight that are all zero.

    DoRA divides by the norm of each row of W + sBA, which is 0 for such rows at the start. They get
    B_i = 1e-6, and the resulting norm as magnitude. The result is finite in finetune and in plain PEFT.
    """
    import torch

    rows = 0
    for module in adapted.modules():
        vectors = getattr(module, "lora_magnitude_vector", {})
        if "default" not in vectors:
            continue
        magnitude = vectors["default"].weight.data
        zero = magnitude == 0
        if zero.any():
            a, b = module.lora_A["default"].weight.data, module.lora_B["default"].weight.data
            b[zero] = 1e-6
            magnitude[zero] = torch.linalg.norm(module.scaling["default"] * (b[zero] @ a), dim=1).to(
                magnitude
            )
            rows += int(zero.sum())
    if rows:
        checks.add(
            "DoRA on rows of zeros",
            expected=f"{rows} finite",
            actual=f"{rows} given a first direction of 1e-6",
            how="magnitudes that were 0",
            ok=True,
        )


def _plain(model: PreTrainedModel, config: PeftConfig, batches: Batches) -> Any:
    """Initialize PiSSA (arXiv 2404.02948) or OLoRA (arXiv 2406.01775), which read only the weights."""
    from peft import get_peft_model

    return get_peft_model(model, config)


def _eva(model: PreTrainedModel, config: PeftConfig, batches: Batches) -> Any:
    """Initialize EVA (arXiv 2410.07170): A from the inputs of each layer, more ranks for layers with more
    explained variance.
    """
    from peft import get_peft_model, initialize_lora_eva_weights

    adapted = get_peft_model(model, config)
    # Every process reads the same batches, so there is nothing to gather.
    initialize_lora_eva_weights(adapted, batches(), gather_distributed_inputs=False, show_progress_bar=False)
    return adapted


def _corda(model: PreTrainedModel, config: LoraConfig, batches: Batches) -> Any:
    """Initialize CorDA (arXiv 2406.05223), which decomposes the weights by the covariance of their inputs."""
    import torch
    from peft import get_peft_model
    from peft.tuners.lora.corda import preprocess_corda

    def look() -> None:
        with torch.no_grad():
            for batch in batches():  # PEFT's hooks take one sequence at a time
                for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                    model(input_ids=ids[mask.bool()][None])

    preprocess_corda(model, config, run_model=look)
    return get_peft_model(model, config)


def _lora_ga(model: PreTrainedModel, config: LoraConfig, batches: Batches) -> Any:
    """Initialize LoRA-GA (arXiv 2407.05000): A and B from the weights' gradient on the first batches."""
    from peft import get_peft_model
    from peft.tuners.lora.loraga import preprocess_loraga

    def backward() -> None:
        for batch in batches():
            model(**batch).loss.backward()

    preprocess_loraga(model, config, train_step=backward)
    model.zero_grad(set_to_none=True)
    return get_peft_model(model, config)


def _loftq(model: PreTrainedModel, config: PeftConfig, batches: Batches) -> Any:
    """Initialize LoftQ (arXiv 2310.08659) on a 4-bit base model: A and B reduce its quantization error."""
    if model.device.type != "cuda":
        raise UserError(
            Problem(
                "PEFT's LoftQ needs a CUDA GPU",
                "adapter.init_lora_weights",
                found=f"device {model.device.type}",
                fix="init_lora_weights: true",
                code="hardware",
            ),
            code=Exit.ENVIRONMENT,
        )
    from huggingface_hub import snapshot_download
    from peft import get_peft_model, replace_lora_weights_loftq

    adapted: Any = get_peft_model(model, config)
    name = str(model.name_or_path)
    commit = upstream_private.commit_hash(model.config)
    local = Path(name).exists()
    folder = name if local else snapshot_download(name, revision=commit, local_files_only=True)
    try:
        replace_lora_weights_loftq(adapted, f"{folder}/model.safetensors")
    except FileNotFoundError as error:
        raise UserError(
            Problem(
                "LoftQ needs the weights in one file model.safetensors",
                "model.name",
                found=str(error),
                fix="adapter.init_lora_weights: true",
                code="adapter-option",
            )
        ) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float().contiguous()
    return adapted


def _first_logits(model: nn.Module, batches: Batches) -> torch.Tensor:
    import torch

    batch = {name: tensor for name, tensor in batches()[0].items() if name != "labels"}
    with torch.no_grad():
        return model.eval()(**batch).logits.float()


def _prepared(adapted: Any) -> bool:
    """Return whether the adapter has a prepared initialization instead of LoRA's random one.

    LoRA's own initialization has B = 0 and random rows of A. Otherwise B is not zero, or the rows of A are
    orthonormal. If EVA whitens them, they are only orthogonal.
    """
    import torch

    weights = {name: weight.detach().float() for name, weight in adapted.named_parameters()}
    grams = [a @ a.T for name, a in weights.items() if "lora_A" in name]
    set_b = any(bool(b.any()) for name, b in weights.items() if "lora_B" in name)
    config = adapted.peft_config["default"].eva_config
    whiten = config is not None and config.whiten
    wanted = [torch.diag(g.diagonal()) if whiten else torch.eye(len(g)).to(g) for g in grams]
    close = [bool((g - w).norm() < 1e-2 * w.norm()) for g, w in zip(grams, wanted, strict=True)]
    return set_b or (bool(close) and all(close))
