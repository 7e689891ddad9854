"""Measure GEMMs, attention, copies and all-reduce on this machine (`finetune doctor --measure`).

Each measurement repeats for some seconds, so that a GPU reaches its power limit as in a run. The best of a
few milliseconds is about 10% higher. `finetune plan` reads the rates from a file.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.autoconfig import memory_estimate
from finetune.autoconfig.memory_estimate import Widths
from finetune.core import safe_files, verified_files
from finetune.core.paths import writing
from finetune.core.verified_files import Damaged
from finetune.hardware import gpus
from finetune.models import architecture
from finetune.planning import measured_rates
from finetune.recipe.schema import Recipe

SECONDS = {"cuda": 3.0, "cpu": 0.25}  # per measurement
TOKENS = {"cuda": 8192, "cpu": 256}
ROW = {"cuda": 4096, "cpu": 256}
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes
LARGEST = 1024  # hidden size of the layer that is timed on a CPU: wider layers run at the same rate
NAMES = {
    "product": "matrix multiplications (bf16; fp32 on the CPU)",
    "fp8": "matrix multiplications in fp8",
    "forward": "attention, forward pass",
    "backward": "attention, backward pass",
    "layer": "a whole transformer layer",
    "bandwidth": "memory copies (read and write)",
    "link": "all-reduce, sent by each GPU",
}
# Rates in bytes/s. The others are in FLOP/s.
MOVED = ("bandwidth", "link")
# Rates that every file must hold. The file of a CPU must also hold `layer`.
NEEDED = ("product", "forward", "backward", "bandwidth")
AGAIN = "run `finetune doctor --measure` to write it again"
# The rates apply to models that are at most this many times wider or narrower.
ALIKE = 2.0


def file_of(device: str, one: Widths) -> Path:
    """Return the file with the rates of a device at a model's widths.

    Its name comes from the GPU's name in `--gpu`, or from the device's name if the table of GPUs lacks it.
    """
    cache = Path(os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune")
    known = gpus.of_device(device)
    kind = next((name for name, gpu in gpus.GPUS.items() if gpu is known), device)
    name = re.sub("[^a-z0-9]+", "-", kind.lower()).strip("-")
    return cache / "ceilings" / f"{name}-{one.hidden}x{one.intermediate}.json"


def read_for(device: str, one: Widths) -> tuple[dict[str, Any] | None, str]:
    """Return the rates that were measured on a device at the shapes closest to a model's.

    Returns:
        The rates and the empty string. Or `None` and why the existing files are not used, the empty string
        if there is no file.
    """
    own = file_of(device, one)
    at_widths = re.compile(rf"{re.escape(own.stem.rpartition('-')[0])}-\d+x\d+\.json")
    paths = sorted(path for path in own.parent.glob("*.json") if at_widths.fullmatch(path.name))
    there: list[tuple[float, dict[str, Any], Path]] = []
    wrong: list[str] = []
    for path in paths:
        found, problem = _content(path)
        if problem:
            wrong.append(f"finetune ignores {path}: {problem}")
        elif found:
            there.append((_apart(found["shapes"], one, device), found, path))
    if not there:
        return None, "; ".join(wrong)
    apart, found, path = min(there, key=lambda each: each[0])
    if apart <= ALIKE:
        return found, ""
    what = f"it was measured at {found['shapes']}, and this model has {one.hidden} and {one.intermediate}"
    return None, "; ".join([*wrong, f"finetune ignores {path}: {what}"])


def _apart(shapes: str, one: Widths, device: str) -> float:
    """Return how many times wider or narrower the measured layer is than the model's."""
    there, own = [int(number) for number in re.findall(r"\d+", shapes)], [one.hidden, one.intermediate]
    if device == "CPU":  # no wider layer is timed there
        there, own = ([min(LARGEST, sizes[0])] for sizes in (there, own))
    return max(max(a / b, b / a) for a, b in zip(there, own, strict=True))


def _content(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Read a file of rates. Return its content, or `None` and what is wrong with it."""
    if not path.exists():
        return None, ""
    try:
        held = verified_files.read_signed(path)
    except Damaged as damage:
        return None, f"{damage}; {AGAIN}"
    if held.pop("of", None) != path.name:
        return None, f"it was renamed; {AGAIN}"
    rates = {name for name, rate in held.items() if name in NAMES and _positive(rate)}
    wanted = {*NEEDED, *(["layer"] if held.get("device") == "CPU" else []), *(NAMES.keys() & held.keys())}
    wrong = [
        *sorted(wanted - rates),
        *(key for key in ("date", "shapes") if not isinstance(held.get(key), str)),
    ]
    wrong += ["shapes"] if "shapes" not in wrong and len(re.findall(r"[1-9]\d*", held["shapes"])) != 2 else []
    if wrong:
        return None, f"it has no usable {', '.join(wrong)}; {AGAIN}"
    return held, ""


def _positive(rate: object) -> bool:
    return isinstance(rate, int | float) and math.isfinite(rate) and rate > 0


def run(device: str, name: str, one: Widths, *, fp8: bool, cards: int) -> dict[str, Any]:
    """Measure all rates, write them to the device's file, and return them in FLOP/s and bytes/s.

    Args:
        device: cuda or cpu.
        name: the name of the device.
        one: the widths of the model. They give the shapes of the GEMMs.
        fp8: whether to measure fp8 GEMMs.
        cards: the number of GPUs of this machine.
    """
    import torch

    path = file_of(name, one)
    with writing(path.parent):  # a folder that can't be written is an error before anything is timed
        path.parent.mkdir(parents=True, exist_ok=True)
    rates = {"product": products(device, one)}
    if fp8:
        rates["fp8"] = fp8_products(device, one)
    rates["forward"], rates["backward"] = attention(device, one)
    rates["bandwidth"] = copies(device)
    if device == "cpu":
        rates["layer"] = layer(one)
    if cards > 1:
        rates["link"] = sums(cards)
    made = {
        "device": name,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "shapes": f"hidden {one.hidden}, intermediate {one.intermediate}",
    }
    with writing(path):
        text = verified_files.signed({"of": path.name, **made, **rates})
        safe_files.write_text(path.parent, path.name, text)
    return {**made, **rates}


def rate(work: float, call: Callable[[], Any], device: str, seconds: float | None = None) -> float:
    """Return `work` per second over calls that repeat for some seconds."""
    import torch

    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    limit = SECONDS[device] if seconds is None else seconds
    # On a GPU the second part counts, after a warm-up. On a CPU the fastest part counts, because other
    # processes use the CPU too.
    kept = []
    for part in (limit / 3, limit) if device == "cuda" else [limit / 6] * 6:
        wait()
        begun, calls = time.perf_counter(), 0
        while time.perf_counter() - begun < part:
            for _ in range(10 if device == "cuda" else 1):
                call()
                calls += 1
            wait()
        kept.append(work * calls / (time.perf_counter() - begun))
    return kept[-1] if device == "cuda" else max(kept)


def products(device: str, one: Widths) -> float:
    """Measure FLOP/s of the linear layers' GEMMs, in bf16 on a GPU and in fp32 on the CPU.

    It runs the GEMMs of the forward pass and of the gradient of the input.
    """
    import torch

    dtype, tokens = torch.bfloat16 if device == "cuda" else torch.float32, TOKENS[device]
    flops, calls = 0.0, []
    for outputs, inputs in _shapes(one):
        x = torch.randn(tokens, inputs, device=device, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
        gradient = torch.randn(tokens, outputs, device=device, dtype=dtype)
        calls.append((x, weight, gradient))
        flops += 4.0 * tokens * outputs * inputs

    def all_of_them() -> None:
        for x, weight, gradient in calls:
            torch.mm(x, weight.t())
            torch.mm(gradient, weight)

    return rate(flops, all_of_them, device)


def fp8_products(device: str, one: Widths) -> float:
    """Measure FLOP/s of the linear layers' fp8 GEMMs with row-wise scales, without the cast to fp8."""
    import torch

    from finetune.kernels import ops
    from finetune.quantization import fp8_linear

    tokens, flops, calls = TOKENS[device], 0.0, []
    for outputs, inputs in _shapes(one):
        x = ops.quantize_rows(torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16))
        weight = ops.quantize_rows(torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16))
        calls.append((x, weight))
        flops += 2.0 * tokens * outputs * inputs

    def all_of_them() -> None:
        for (codes, scale), (weight, weight_scale) in calls:
            fp8_linear.product(codes, scale, weight, weight_scale, torch.bfloat16)

    return rate(flops, all_of_them, device)


def attention(device: str, one: Widths) -> tuple[float, float]:
    """Measure FLOP/s of causal attention, forward and backward, in torch's scaled_dot_product_attention."""
    import torch

    dtype, row = torch.bfloat16 if device == "cuda" else torch.float32, ROW[device]
    heads, size = max(1, one.queries // 128), min(128, one.queries)
    q, k, v = (
        torch.randn(1, heads, row, size, device=device, dtype=dtype, requires_grad=True) for _ in "qkv"
    )
    flops = 2.0 * row * row * heads * size
    attend = torch.nn.functional.scaled_dot_product_attention

    out = attend(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v, is_causal=True)

    return rate(flops, forward, device), rate(2.5 * flops, backward, device)


def copies(device: str) -> float:
    """Measure bytes/s that a copy in a device's memory reads and writes."""
    import torch

    source = torch.zeros(COPIED[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return rate(2.0 * COPIED[device], lambda: target.copy_(source), device)


def sums(cards: int) -> float:
    """Measure bytes/s that each GPU sends during NCCL's all-reduce over all GPUs."""
    import torch
    from torch.cuda import nccl

    tensors = [torch.zeros(2**26, device=f"cuda:{index}") for index in range(cards)]
    sent = 2.0 * (cards - 1) / cards * tensors[0].nbytes

    def all_reduce() -> None:
        nccl.all_reduce(tensors)

    return rate(sent, all_reduce, "cuda")


def layer(one: Widths, seconds: float = 0.5) -> float:
    """Measure FLOP/s of a frozen Llama layer, forward and backward, on the CPU in fp32.

    The FLOPs count only the GEMMs of the linear layers. The time includes norms, attention and activation.
    """
    import torch

    scale = min(1.0, LARGEST / one.hidden)
    hidden, wide = (max(64, round(size * scale) // 64 * 64) for size in (one.hidden, one.intermediate))
    heads, tokens = hidden // 64, TOKENS["cpu"]
    square = [torch.randn(hidden, hidden) * 0.02 for _ in range(4)]
    gate, up, down = (
        torch.randn(wide, hidden) * 0.02,
        torch.randn(wide, hidden) * 0.02,
        torch.randn(hidden, wide),
    )
    x = torch.randn(tokens, hidden, requires_grad=True)
    linear, normed = torch.nn.functional.linear, torch.nn.functional.rms_norm

    def both() -> None:
        a = normed(x, (hidden,))
        q, k, v = (linear(a, w).view(1, tokens, heads, -1).transpose(1, 2) for w in square[:3])
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = x + linear(y.transpose(1, 2).reshape(tokens, hidden), square[3])
        b = normed(h, (hidden,))
        h = h + linear(torch.nn.functional.silu(linear(b, gate)) * linear(b, up), down)
        torch.autograd.grad(h.sum(), x)

    return rate(4.0 * tokens * (4 * hidden * hidden + 3 * hidden * wide), both, "cpu", seconds)


def _shapes(one: Widths) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of a layer's GEMMs. One GEMM computes q, k and v, another gate and up."""
    hidden, wide = one.hidden, one.intermediate
    return [(one.qkv, hidden), (hidden, one.queries), (2 * wide, hidden), (hidden, wide)]


def cpu_rate(recipe: Recipe) -> float:
    """Return FLOP/s of a layer of this model on this CPU.

    The rate comes from `finetune doctor --measure`, or is measured now.
    """
    one = memory_estimate.widths(architecture.read(recipe.model).config)
    found, _ = measured_rates.read_for("CPU", one)
    return found["layer"] if found else measured_rates.layer(one)
