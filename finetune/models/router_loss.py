"""The load-balancing loss of a mixture of experts, which TRL adds to the loss of the tokens."""

from __future__ import annotations

from typing import Any

from finetune.core import model_config
from finetune.core.errors import Problem, UserError
from finetune.core.model_config import ModelConfig

COEFFICIENT = "router_aux_loss_coef"  # a key of the model's config and of `train:`
SET = ("num_experts", "num_experts_per_tok", "output_router_logits", COEFFICIENT)


def check(config: ModelConfig, requested: float | None, adapter: str, routers: int | None = None) -> str:
    """Check that a model with a router loss has a router, and a number of experts in its config (exit 2).

    Args:
        requested: `train.router_aux_loss_coef`; `None` uses the value of the model's config.
        adapter: the type of the adapter.
        routers: the number of the model's routers; `None` if it is not known.

    Returns:
        A note if the config has a coefficient and the model no router, such as Jamba with one expert. The
        run then has no router loss. Else the empty string.
    """
    text = config.get_text_config()
    has_router = hasattr(text, "output_router_logits")
    coefficient = getattr(text, COEFFICIENT, None) if requested is None else requested
    if not coefficient or (requested is None and not has_router):
        return ""
    if requested is None and routers == 0:
        why = f"this {text.model_type} has no router that returns the logits of its experts"
        return f"train.{COEFFICIENT}: 0, because {why}"
    if wrong := _refusal(text, has_router and routers != 0, coefficient, adapter):
        raise UserError(wrong)
    return ""


def _refusal(text: ModelConfig, has_router: bool, coefficient: float, adapter: str) -> Problem | None:
    """Return why a model can't train with a router loss."""
    key, found = f"train.{COEFFICIENT}", f"{coefficient:g}"
    if not has_router:
        return Problem(
            "the base model has no router",
            key,
            found=found,
            fix=f"remove `{COEFFICIENT}`",
            why="this loss is only for mixture-of-experts models whose routers return their logits",
            code="recipe-conflict",
        )
    if adapter == "prefix_tuning":
        return Problem(
            "prefix_tuning can't train with the router loss",
            key,
            found=found,
            fix=f"{COEFFICIENT}: 0.0, or another adapter.type",
            why="PEFT lengthens the attention mask, and the router loss needs one entry for each token",
            code="recipe-conflict",
        )
    if not (model_config.experts(text) and model_config.experts_of_a_token(text)):
        return Problem(
            f"the config of {text.model_type} lacks the number of experts that the router loss needs",
            key,
            found=found,
            fix=f"{COEFFICIENT}: 0.0",
            code="model-config",
        )
    return None


def count_experts(config: ModelConfig) -> dict[str, Any]:
    """Add the keys by which TRL reads the number of experts to a live model's config.

    TRL reads `num_experts` and `num_experts_per_tok`. GraniteMoE has `num_local_experts`, and DeepSeek-V3
    `n_routed_experts`. TRL itself sets the other two keys of SET.

    Returns:
        The previous values, for `restore`.
    """
    text = config.get_text_config()
    before = {name: vars(text)[name] for name in SET if name in vars(text)}
    counts = model_config.experts(text), model_config.experts_of_a_token(text)
    for name, count in zip(SET, counts, strict=False):
        if count and getattr(text, name, None) is None:
            setattr(text, name, count)
    return before


def restore(config: ModelConfig, before: dict[str, Any]) -> None:
    """Undo what `count_experts` and TRL changed, so that the model is saved with its own config."""
    text = config.get_text_config()
    for name in SET:
        vars(text).pop(name, None)
    vars(text).update(before)
