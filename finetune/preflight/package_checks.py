"""Find optional packages that a recipe needs and that are not installed, without importing them."""

from __future__ import annotations

from finetune.autoconfig import attention_choice, base_quantization, optimizer_choice
from finetune.core import packages
from finetune.core.errors import Problem
from finetune.recipe import adapter_types, qat_rules
from finetune.recipe.schema import Recipe

ADAPTERS = {"adamss": ("sklearn", "scikit-learn")}  # PEFT's type -> module and package that PEFT imports


def missing_packages(recipe: Recipe) -> list[Problem]:
    """Return a problem for each missing package of the model, the adapter, the optimizer and `speed.qat`."""
    kind, optimizer = adapter_types.find(recipe.adapter.type), optimizer_choice.asked(recipe.train)
    found = [
        base_quantization.missing_package(
            adapter_types.base_storage(recipe.adapter.type, recipe.model.quantization)
        ),
        _attention(recipe.model.attention),
        _adapter(kind.peft),
        qat_rules.missing() if recipe.speed.qat else None,
        *optimizer_choice.missing_packages(optimizer, recipe.speed),
    ]
    return [problem for problem in found if problem]


def _attention(name: str) -> Problem | None:
    how = attention_choice.not_installed(name)
    if not how:
        return None
    return Problem(
        f"the attention kernel {name} is not installed",
        "model.attention",
        found=name,
        fix=f"set `model.attention: auto`; or, on a machine with an NVIDIA GPU: {how}",
        code="package-missing",
    )


def _adapter(peft_type: str) -> Problem | None:
    module, package = ADAPTERS.get(peft_type, ("", ""))
    if not module or packages.installed(module):
        return None
    return Problem(
        f"PEFT's {peft_type} needs the package {package}, which is not installed",
        "adapter.type",
        found=peft_type,
        fix=packages.install_command(package),
        code="package-missing",
    )
