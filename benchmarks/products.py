"""Measure the GEMMs of an 8B Llama layer, each kernel for one second. The results are in products.json.

    python benchmarks/products.py [--seconds 1.0] [--turns 2] [--only bf16|fp8]

A LoRA step on an H200 runs at the GPU's power limit. There, energy limits the speed of a kernel, and a tuner
that times it for a few milliseconds measures another speed. So the script runs each kernel for half a second
until the clock has dropped, and then measures TFLOP/s, mean power and clock for `--seconds`. It repeats all
kernels in `--turns`. Differences between turns are noise.

The GEMMs are the forward pass and the input gradient of the four groups of linear layers with 16,384 tokens.
The bf16 kernels are cuBLAS, cuBLASLt and, if installed, QuACK's kernels (`quack-kernels`, CuTe DSL) with
several tiles. The fp8 kernels are cuBLASLt with row-wise and tensor-wise scales, and with fp32 accumulation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).with_name("products.json")
TOKENS = 16384
STACKS = {"q, k, v": (6144, 4096), "o": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
COPIES = 6  # copies of each operand, so that no weight is still in the cache of 60 MB
# tile rows, tile columns, ping-pong, cluster rows, cluster columns, transposed GEMM, swizzle
TILES = [(128, 256, False, 2, 1, True, 8), (128, 256, False, 1, 2, True, 8), (128, 256, False, 2, 1, True, 4)]
TILES += [
    (128, 256, False, 2, 1, True, 16),
    (128, 256, False, 2, 1, False, 8),
    (256, 192, False, 2, 1, True, 8),
]
TILES += [(256, 192, False, 2, 1, False, 8), (128, 208, True, 2, 1, True, 8)]
E4M3 = torch.float8_e4m3fn


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", choices=["bf16", "fp8"])
    parser.add_argument("--stacks", default=",".join(STACKS).replace(", ", "+"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    stacks = [name.replace("+", ", ") for name in options.stacks.split(",")]
    found: list[dict[str, Any]] = []
    for turn in range(options.turns):
        for stack in stacks:
            for way in ("forward", "backward"):
                for dtype in [options.only] if options.only else ["bf16", "fp8"]:
                    operands = [made(*STACKS[stack], way, dtype) for _ in range(COPIES)]
                    for name, call in kernels(dtype).items():
                        row = {"turn": turn, "stack": stack, "way": way, "dtype": dtype, "kernel": name}
                        try:
                            row |= sustained(call, operands, options.seconds)
                        except Exception as error:  # the tile does not fit this GPU
                            row["error"] = f"{type(error).__name__}: {error}"[:300]
                        print(row, flush=True)
                        found.append(row)
                    del operands
        gpu = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        day = time.strftime("%Y-%m-%d")
        results = {**gpu, "date": day, "rows": found}
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


def made(outputs: int, inputs: int, way: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x (T, K), w (K, N) with the memory layout of this GEMM, and the output (T, N).

    The forward pass multiplies by the transpose of W (outputs, inputs). The backward pass multiplies by W in
    bf16, and by a transposed copy in fp8, because fp8 GEMMs need that layout.
    """
    columns, inner = (outputs, inputs) if way == "forward" else (inputs, outputs)
    x = torch.randn(TOKENS, inner, device="cuda")
    if way == "forward" or dtype == "fp8":
        w = (0.02 * torch.randn(columns, inner, device="cuda")).t()
    else:
        w = 0.02 * torch.randn(inner, columns, device="cuda")
    out = torch.empty(TOKENS, columns, device="cuda", dtype=torch.bfloat16)
    if dtype == "bf16":
        return x.bfloat16(), w.bfloat16(), out
    return (x / x.abs().amax(1, True) * 448).to(E4M3), (w / w.abs().amax(0, True) * 448).to(E4M3), out


def kernels(dtype: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    if dtype == "bf16":
        for library in ("cublas", "cublaslt"):
            found[library] = by_torch(library)
    else:
        found["rows"] = scaled(rows=True, fast=True)
        found["tensors"] = scaled(rows=False, fast=True)
        found["rows, fp32 sums"] = scaled(rows=True, fast=False)
        return found
    try:
        import quack.gemm_interface  # type: ignore[reportMissingImports]  # noqa: F401  (GPU only)
    except ImportError as error:
        print(f"QuACK: {error}")
        return found
    for tile in TILES:
        rows, columns, pingpong, along, across, swap, swizzle = tile
        name = f"quack {rows} x {columns}{' ping-pong' * pingpong}, {along} x {across}"
        found[f"{name}{', swapped' * swap}, {swizzle}"] = by_quack(*tile)
    return found


def by_torch(library: str) -> Callable[..., Any]:
    def call(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        torch.backends.cuda.preferred_blas_library(library)
        torch.mm(x, w, out=out)

    return call


def scaled(*, rows: bool, fast: bool) -> Callable[..., Any]:
    def call(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        one = torch.ones((), device="cuda")
        a, b = (one.expand(len(x), 1), one.expand(1, w.shape[1])) if rows else (one, one)
        scales = [scale.contiguous() for scale in (a, b)]
        torch._scaled_mm(x, w, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast, out=out)

    return call


def by_quack(
    rows: int, columns: int, pingpong: bool, along: int, across: int, swap: bool, swizzle: int
) -> Callable[..., Any]:
    from quack.gemm_config import GemmConfig  # type: ignore[reportMissingImports]  (GPU only)
    from quack.gemm_interface import gemm_tuned  # type: ignore[reportMissingImports]  (GPU only)

    config = GemmConfig(
        tile_m=rows,
        tile_n=columns,
        pingpong=pingpong,
        cluster_m=along,
        cluster_n=across,
        is_dynamic_persistent=False,
        swap_ab=swap,
        max_swizzle_size=swizzle,
    )

    def call(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        gemm_tuned.fn(x, w, out, config=config)

    return call


def sustained(call: Callable[..., Any], operands: list[Any], seconds: float) -> dict[str, float]:
    """Run a kernel alone for `seconds`. Return TFLOP/s, watts, MHz and the relative error of one result."""
    x, w, out = operands[0]
    out.fill_(float("nan"))
    call(x, w, out)
    exact = x[:64].float() @ w.float()
    error = float((out[:64].float() - exact).norm() / exact.norm())
    each = timed(call, operands, 3)
    timed(call, operands, round(0.5 / each))
    query = ["nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits"]
    watch = subprocess.Popen([*query, "-lms", "50"], stdout=subprocess.PIPE, text=True)
    took = timed(call, operands, round(seconds / each))
    watch.terminate()
    seen = [line.split(",") for line in watch.communicate()[0].splitlines() if line.count(",") == 1]
    power, clock = ([float(line[place]) for line in seen[1:]] or [float("nan")] for place in (0, 1))
    flops = 2 * x.shape[0] * x.shape[1] * w.shape[1]
    rate = {"tflops": flops / took / 1e12, "at first": flops / each / 1e12}
    return {**rate, "watts": mean(power), "mhz": mean(clock), "error": error}


def timed(call: Callable[..., Any], operands: list[Any], times: int) -> float:
    """Return seconds per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for count in range(times):
        call(*operands[count % len(operands)])
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times / 1e3


def table(found: dict[str, Any]) -> str:
    """Return a table of TFLOP/s, the mean of all turns, with the fastest of QuACK's kernels."""
    names = {"bf16": ["cublas", "cublaslt"], "fp8": ["rows", "tensors", "rows, fp32 sums"]}
    heads = [
        "bf16: cuBLAS",
        "cuBLASLt",
        "QuACK's best",
        "fp8: a scale per row",
        "per tensor",
        "per row, sums in fp32",
    ]
    lines = [f"| GEMM | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    products = dict.fromkeys((row["stack"], row["way"]) for row in found["rows"])
    for stack, way in products:
        cells = [f"{stack}: {way}"]
        for dtype, kernels in names.items():
            rates: dict[str, list[float]] = {}
            for row in found["rows"]:
                if (row["stack"], row["way"], row["dtype"]) == (stack, way, dtype) and "tflops" in row:
                    rates.setdefault(row["kernel"], []).append(row["tflops"])
            others = {name: mean(turns) for name, turns in rates.items() if name.startswith("quack")}
            cells += [f"{mean(rates[name]):.0f}" for name in kernels]
            if dtype == "bf16":
                best = max(others, key=others.__getitem__, default="")
                cells.append(f"{others[best]:.0f} ({best.removeprefix('quack ')})" if best else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
