"""First weights of LoRA that take more than a random draw, each by PEFT's own function.

PiSSA, OLoRA, CorDA and LoRA-GA move part of the base's weights into the adapter. What is saved is the
difference from that first adapter, a plain LoRA of twice the rank: it loads on the base as it was published.
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
    from peft import PeftConfig, PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    from finetune.core.run_checks import RunChecks

    Batches = Callable[[], list[dict[str, torch.Tensor]]]

CALIBRATION = (8, 4, 512)  # batches, rows of each, tokens of a row


def attach(
    model: PreTrainedModel, config: Any, init: Any, linear: Iterable[str], batches: Batches, ledger: RunChecks
) -> PeftModel:
    """`get_peft_model`, with the preparation that `init_lora_weights` asks for before it or after it.

    Args:
        linear: full names of the linear layers, for preparations that don't know "all-linear".

    Raises:
        UserError: weights that are needed and not at hand (exit 2).
    """
    from peft import get_peft_model

    if not isinstance(init, str) or not init.startswith(PREPARED_INITS):
        adapted: Any = get_peft_model(model, config)
        _start_zero_rows(adapted, ledger)
        return adapted
    if config.target_modules == "all-linear":
        config.target_modules = set(linear)
    before = _first_logits(model, batches)
    prepare = {"eva": _eva, "loftq": _loftq, "corda": _corda, "lora_ga": _lora_ga}.get(init, _plain)
    adapted = prepare(model, config, batches)
    _start_zero_rows(adapted, ledger)
    after = _first_logits(adapted, batches)
    changed = float((after - before).norm() / before.norm())
    got = f"logits of one batch differ by {changed:.1e} from the base's"
    # LoftQ moves a 4-bit base towards the weights it was made from; the others leave the function as it was
    kept = changed < (1.0 if init == "loftq" else 5e-2)
    how = "prepared by PEFT; ||with - without|| / ||without||, before training"
    ledger.add("adapter.init_lora_weights", init, f"{init}: {got}", how, ok=kept and _prepared(adapted))
    return adapted


def calibration(dataset: Any, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Batches of the first training rows: input_ids, attention_mask and labels, (rows, tokens), int64."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    count, size, tokens = CALIBRATION
    keys, collate = ("input_ids", "labels"), DataCollatorForLanguageModeling(pad_token_id=0)
    rows = [{key: row[key][:tokens] for key in keys} for row in islice(dataset, count * size)]
    groups = (rows[start : start + size] for start in range(0, len(rows), size))
    return [{name: tensor.to(device) for name, tensor in collate(group).items()} for group in groups]


def rebases(adapted: nn.Module) -> bool:
    """Whether the live adapter stands on a base that it changed."""
    config = getattr(adapted, "peft_config", {}).get("default")
    init = getattr(config, "init_lora_weights", None)
    return isinstance(init, str) and init.startswith(REBASING_INITS)


def save(adapted: Any, target: Path, initial: Path, state: dict[str, torch.Tensor] | None = None) -> None:
    """Save what was trained; from a changed base, as the difference from the `initial` adapter.

    Args:
        state: its tensors, where the model itself has but parts of them.
    """
    if rebases(adapted):
        adapted.save_pretrained(str(target), path_initial_model_for_weight_conversion=str(initial))
    else:
        options = embeddings(adapted)
        adapted.save_pretrained(str(target), state_dict=state, **options)


def embeddings(adapted: PeftModel) -> dict[str, Any]:
    """What PEFT is told of embeddings, which it saves where they were resized or are adapted themselves.

    By itself it compares their size with the config that the Hub's `main` has just then.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    peft: Any = getattr(adapted, "peft_config", {}).get("default")
    if getattr(peft, "trainable_token_indices", None):  # trained rows are in the adapter
        return {"save_embedding_layers": False}
    name = str(getattr(peft, "base_model_name_or_path", "."))
    if Path(name).exists() or isinstance(adapted.get_input_embeddings(), BaseTunerLayer):
        return {}
    then = type(adapted.config).from_pretrained(name, revision=peft.revision or "main")
    sizes = {getattr(one, "vocab_size", None) for one in (then, adapted.config)}
    return {"save_embedding_layers": len(sizes) > 1}


def save_initial(adapted: Any, initial: Path) -> None:
    """Keep the first adapter of a changed base: `save` needs it at the end."""
    if rebases(adapted):
        config = adapted.peft_config["default"]
        init, config.init_lora_weights = config.init_lora_weights, True  # loading it must not decompose again
        adapted.save_pretrained(str(initial))
        config.init_lora_weights = init


def _start_zero_rows(adapted: Any, ledger: RunChecks) -> None:
    """DoRA divides by the norm of each row of W + sBA, which starts as 0 where a row of W is all zero: 0/0.

    Such rows get a first direction, B_i = 1e-6, and its own norm as magnitude: finite here and in plain PEFT.
    """
    import torch

    rows = 0
    for module in adapted.modules():
        held = getattr(module, "lora_magnitude_vector", {})
        if "default" not in held:
            continue
        magnitude = held["default"].weight.data
        zero = magnitude == 0
        if zero.any():
            a, b = module.lora_A["default"].weight.data, module.lora_B["default"].weight.data
            b[zero] = 1e-6
            magnitude[zero] = torch.linalg.norm(module.scaling["default"] * (b[zero] @ a), dim=1).to(
                magnitude
            )
            rows += int(zero.sum())
    if rows:
        got = f"{rows} given a first direction of 1e-6"
        ledger.add("DoRA on rows of zeros", f"{rows} finite", got, "magnitudes that were 0", ok=True)


def _plain(model: PreTrainedModel, config: PeftConfig, batches: Batches) -> Any:
    """PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775) look at the weights alone."""
    from peft import get_peft_model

    return get_peft_model(model, config)


def _eva(model: PreTrainedModel, config: PeftConfig, batches: Batches) -> Any:
    """EVA (arXiv 2410.07170): A from the inputs of each layer, ranks where they explain most."""
    from peft import get_peft_model, initialize_lora_eva_weights

    adapted = get_peft_model(model, config)
    initialize_lora_eva_weights(
        adapted, batches(), gather_distributed_inputs=False, show_progress_bar=False
    )  # every process sees the same rows
    return adapted


def _corda(model: PreTrainedModel, config: Any, batches: Batches) -> Any:
    """CorDA (arXiv 2406.05223): the weights decomposed in the directions of their inputs."""
    import torch
    from peft import get_peft_model
    from peft.tuners.lora.corda import preprocess_corda

    def look() -> None:
        with torch.no_grad():
            for batch in batches():  # PEFT's hooks take one row at a time
                for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                    model(input_ids=ids[mask.bool()][None])

    preprocess_corda(model, config, run_model=look)
    return get_peft_model(model, config)


def _lora_ga(model: PreTrainedModel, config: Any, batches: Batches) -> Any:
    """LoRA-GA (arXiv 2407.05000): A and B from the gradient of the weights on the first batches."""
    from peft import get_peft_model
    from peft.tuners.lora.loraga import preprocess_loraga

    def backward() -> None:
        for batch in batches():
            model(**batch).loss.backward()

    preprocess_loraga(model, config, train_step=backward)
    model.zero_grad(set_to_none=True)
    return get_peft_model(model, config)


def _loftq(model: PreTrainedModel, config: PeftConfig, batches: Batches) -> Any:
    """LoftQ (arXiv 2310.08659) on a 4-bit base: A and B make good what quantizing lost, as far as r goes."""
    if model.device.type != "cuda":
        what, fix = "PEFT's LoftQ needs a CUDA GPU", "init_lora_weights: true"
        found, code = f"device {model.device.type}", "hardware"
        problem = Problem(what, "adapter.init_lora_weights", found=found, fix=fix, code=code)
        raise UserError(problem, code=Exit.ENVIRONMENT)
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
        what, fix = "LoftQ needs the weights in one file model.safetensors", "adapter.init_lora_weights: true"
        found, code = str(error), "adapter-option"
        raise UserError(Problem(what, "model.name", found=found, fix=fix, code=code)) from error
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
    """Not LoRA's own draw, B = 0 and rows of A of any length at any angle: B is set, or A's rows are
    orthonormal (only orthogonal, if EVA whitens them)."""
    import torch

    weights = {name: weight.detach().float() for name, weight in adapted.named_parameters()}
    grams = [a @ a.T for name, a in weights.items() if "lora_A" in name]
    set_b = any(bool(b.any()) for name, b in weights.items() if "lora_B" in name)
    config = adapted.peft_config["default"].eva_config
    whiten = config is not None and config.whiten
    wanted = [torch.diag(g.diagonal()) if whiten else torch.eye(len(g)).to(g) for g in grams]
    close = [bool((g - w).norm() < 1e-2 * w.norm()) for g, w in zip(grams, wanted, strict=True)]
    return set_b or (bool(close) and all(close))
