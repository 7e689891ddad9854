"""Compare the attention kernels of a Hopper GPU, alone and in training. The results are in attention.json.

    python benchmarks/attention.py                          # speed and error of every available kernel
    python benchmarks/attention.py --loss --assets FOLDER   # the effect of an fp8 forward pass on the loss

The attention is that of Llama-3.1-8B in bf16: 32 heads of 128, and 8 heads for keys and values. A batch has
16,384 tokens, in causal sequences of 4,096 or in packed documents of 512 and 2,048.

TFLOP/s count the work of a causal kernel: half of the square, and 2.5 times as much in the backward pass.
They are the median of Triton's do_bench. Errors are relative norms on one sequence of 1,024 tokens, compared
with plain operations in float32.

`fp8 forward` is not an option of finetune. FlashAttention 3 quantizes queries, keys and values to e4m3, with
one scale for each head of keys. It has no backward pass for fp8, so the script uses the bf16 backward pass
with the outputs of the fp8 forward pass. `--loss` trains the model of loss_parity.py on its questions with
both forward passes, in eager mode and with the same seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parents[1]))

RESULTS = Path(__file__).with_name("attention.json")
HEADS, KEY_HEADS, SIZE, TOKENS = 32, 8, 128, 16384
ROWS = {"rows of 4,096": 4096, "documents of 2,048": 2048, "documents of 512": 512}
LARGEST = 448.0  # of e4m3
FP8 = "flash_attention_3, fp8 forward"


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS.parent)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "attention.json"
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    if options.loss:
        found["loss"] = {**machine(), **losses(options)}
    else:
        not_shared()
        found |= {**machine(), "kernels": {n: measured(n, k) for n, k in here().items()}}
        print(table(found))
    results.write_text(json.dumps(found, indent=1) + "\n")


def machine() -> dict[str, str]:
    gpu, day = torch.cuda.get_device_name(), time.strftime("%Y-%m-%d")
    return {"gpu": gpu, "torch": torch.__version__, "date": day}


def not_shared() -> None:
    """End if another process uses the GPU, because it would take part of the time."""
    torch.zeros(1, device="cuda")  # so that the list of processes includes this process
    listed = torch.cuda.list_gpu_processes()
    if "\nprocess" not in listed:
        print(f"note: not known whether other processes are on this GPU: {listed}")
    if listed.count("\nprocess") > 1:
        sys.exit(f"this GPU is shared, so times would be of all:\n{listed}")


def measured(name: str, kernel: Callable[..., Any]) -> dict[str, Any]:
    """Return the errors and TFLOP/s of a kernel."""
    made: dict[str, Any] = {"error": error(kernel)}
    for rows, length in ROWS.items():
        if name != "cudnn" or not rows.startswith("documents"):
            made[rows] = speed(kernel, length, packed=rows.startswith("documents"))
    print(name, made, flush=True)
    return made


def here() -> dict[str, Callable[..., Any]]:
    """Return every kernel that this machine has, and FlashAttention 3's fp8 forward pass."""
    from finetune.autoconfig.attention_choice import missing
    from finetune.hardware import detection
    from finetune.kernels.attention_functions import KERNELS
    from finetune.kernels.kernel_limits import IMPLEMENTATIONS

    machine = detection.detect()
    names = [name for name in IMPLEMENTATIONS if not missing(name, machine)]
    made = {name: KERNELS[name]() for name in names}
    return {**made, FP8: fp8_forward} if "flash_attention_3" in made else made


class _Fp8Forward(torch.autograd.Function):
    """FlashAttention 3's forward pass in e4m3, with its backward pass in bf16."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, scale: float, borders: Any, longest: int) -> Any:
        import flash_attn_interface as fa3  # type: ignore[reportMissingImports]  (GPU only)

        documents = {} if borders is None else {"max_seqlen_q": longest, "max_seqlen_k": longest}
        ctx.settings = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "softmax_scale": scale, **documents}
        rows = 1 if borders is None else len(borders) - 1
        codes, given = [], {}
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            heads = tensor.unflatten(-2, (key.shape[-2], -1))  # queries have the scale of their key's group
            dims = [d for d in range(heads.ndim) if d != heads.ndim - 3]
            step = heads.abs().amax(dims, keepdim=True).float().clamp(min=1e-12) / LARGEST
            codes.append((heads / step).to(torch.float8_e4m3fn).flatten(-3, -2))
            each = step.reshape(1, -1).expand(query.shape[0] if borders is None else rows, -1)
            given[f"{name}_descale"] = each.contiguous()
        out, sums, *_ = fa3._flash_attn_forward(*codes, causal=True, **ctx.settings, **given)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's is *args)
        import flash_attn_interface as fa3  # type: ignore[reportMissingImports]  (GPU only)

        query, key, value, out, sums = ctx.saved_tensors
        made = [torch.empty_like(tensor) for tensor in (query, key, value)]
        made_of = dict(zip(("dq", "dk", "dv"), made, strict=True))
        fa3._flash_attn_backward(
            gradient, query, key, value, out, sums, is_causal=True, **ctx.settings, **made_of
        )
        return (*made, None, None, None)


def fp8_forward(
    query: Any, key: Any, value: Any, *, scale: float, borders: Any, longest: int, **_: Any
) -> Any:
    """Run the attention with the arguments of the kernels in `attention_kernels`."""
    rows, tokens = query.shape[:2]
    if borders is not None:
        query, key, value = [t.reshape(rows * tokens, *t.shape[2:]) for t in (query, key, value)]
    out = _Fp8Forward.apply(query.contiguous(), key.contiguous(), value.contiguous(), scale, borders, longest)
    return out.view(rows, tokens, *out.shape[-2:])


def inputs(rows: int, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(rows, tokens, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(size, device="cuda").bfloat16().requires_grad_() for size in sizes]


def error(kernel: Callable[..., Any]) -> list[float]:
    """Return the errors of the output and of the gradients of queries, keys and values."""
    given = inputs(1, 1024)
    wide = [tensor.detach().float().requires_grad_() for tensor in given]
    gradient = torch.randn(1, 1024, HEADS, SIZE, device="cuda")
    q, k, v = (tensor.transpose(1, 2) for tensor in wide)
    plain = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    settings = {"scale": SIZE**-0.5, "window": None, "softcap": None, "borders": None, "longest": 1024}
    got = kernel(*given, **settings)
    wanted = [plain.detach(), *torch.autograd.grad(plain, wide, gradient)]
    made = [got.detach(), *torch.autograd.grad(got, given, gradient.bfloat16())]
    return [float((a.float() - b).norm() / b.norm()) for a, b in zip(made, wanted, strict=True)]


def speed(kernel: Callable[..., Any], length: int, *, packed: bool) -> dict[str, float]:
    """Return TFLOP/s of the forward pass and of the backward pass."""
    given = inputs(*((1, TOKENS) if packed else (TOKENS // length, length)))
    borders = torch.arange(0, TOKENS + 1, length, dtype=torch.int32, device="cuda") if packed else None
    settings = {"window": None, "softcap": None, "borders": borders, "longest": length}
    out = kernel(*given, scale=SIZE**-0.5, **settings)
    gradient = torch.randn_like(out)
    work = 2 * TOKENS * length * HEADS * SIZE  # two GEMMs, and half of each square
    forward = timed(lambda: kernel(*(t.detach() for t in given), scale=SIZE**-0.5, **settings))
    backward = timed(lambda: torch.autograd.grad(out, given, gradient, retain_graph=True))
    return {"forward": work / forward / 1e12, "backward": 2.5 * work / backward / 1e12}


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call: the median, with a cold cache."""
    from triton.testing import do_bench

    return do_bench(call, warmup=50, rep=200, return_mode="median") / 1000


def losses(options: Any) -> dict[str, Any]:
    """Return validation losses of loss_parity.py's bf16 run, with a bf16 and an fp8 forward pass of
    FlashAttention 3."""
    import loss_parity

    from finetune.kernels import attention_functions

    plain, found = attention_functions.KERNELS["flash_attention_3"], {}
    given = ["model.attention=flash_attention_3", "data.padding_free=false", "speed.compile=false"]

    def rounded(*tensors: Any, **settings: Any) -> Any:
        """Use fp8 only with gradients. The check that a kernel is exact has none, and fp8 would fail it."""
        return (fp8_forward if torch.is_grad_enabled() else plain())(*tensors, **settings)

    with tempfile.TemporaryDirectory() as folder:
        files = loss_parity.write_data("questions", options.assets, Path(folder))
        for name, kernel in (("bf16", plain), ("fp8", lambda: rounded)):
            attention_functions.KERNELS["flash_attention_3"] = kernel  # in this process alone
            run = loss_parity.train("bf16", files, options, Path(folder), *given)
            found[name] = {key: run[key] for key in ("before", "after", "held_out")}
    return found


def table(found: dict[str, Any]) -> str:
    """Return the measurements as Markdown."""
    lines = [
        "| kernel | "
        + " | ".join(ROWS).replace("rows of", "sequences of")
        + " | error: output | gradients |",
        "|---|" + "---|" * (len(ROWS) + 2),
    ]
    for name, made in found["kernels"].items():
        rates = [made.get(rows) for rows in ROWS]
        cells = [f"{one['forward']:.0f} / {one['backward']:.0f}" if one else "" for one in rates]
        out, *gradients = made["error"]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {out:.1e} | {max(gradients):.1e} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
