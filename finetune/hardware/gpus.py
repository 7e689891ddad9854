"""The table of GPUs with known peak rates, for `finetune plan`, MFU and other uses.

The rates come from NVIDIA's data sheets and architecture white papers. They are dense rates with fp32
accumulation. Memory is the amount that torch reports, which is less than the nominal amount. Links have the
total bandwidth of both directions. NVLink has 300 GB/s on V100, 600 on A100, 900 on H100 and 1,800 on B200.
PCIe has 64 GB/s as Gen4 and 128 as Gen5. `finetune doctor --measure` measures the rates that NCCL reaches.
"""

from __future__ import annotations

from typing import NamedTuple

from finetune.core.errors import Problem, UserError, nearest
from finetune.recipe.recipe_errors import choices


class Gpu(NamedTuple):
    """One kind of GPU, with the rates of one device."""

    device: tuple[str, ...]
    """Words that must all be in the name that torch reports."""
    capability: tuple[int, int]
    memory_gib: float
    bf16: float
    """Dense bf16 FLOP/s, or fp16 FLOP/s if the GPU has no bf16 (capability below 8.0)."""
    fp8: float
    """Dense fp8 FLOP/s; 0: the GPU has no fp8 GEMMs."""
    bandwidth: float
    """Memory bandwidth in bytes/s."""
    link: float
    """Bandwidth to other GPUs of the host, NVLink or PCIe, in bytes/s of both directions together."""
    watts: int

    @property
    def host(self) -> float:
        """Bandwidth to CPU memory in bytes/s of one direction.

        It assumes 16 lanes of PCIe: Gen5 from Hopper on, Gen4 from Ampere on, and Gen3 before.
        """
        return 64e9 if self.capability >= (9, 0) else 32e9 if self.capability >= (8, 0) else 16e9


GPUS = {  # more specific names come first: "H100 PCIe" contains "H100"
    "b200": Gpu(("B200",), (10, 0), 178.4, 2250e12, 4500e12, 8.0e12, 1800e9, 1000),
    "h200": Gpu(("H200",), (9, 0), 139.8, 989e12, 1979e12, 4.8e12, 900e9, 700),
    "h100-pcie": Gpu(("H100", "PCIe"), (9, 0), 79.1, 756e12, 1513e12, 2.0e12, 128e9, 350),
    "h100-nvl": Gpu(("H100", "NVL"), (9, 0), 93.0, 835e12, 1671e12, 3.9e12, 600e9, 400),
    "h100-80gb": Gpu(("H100",), (9, 0), 79.1, 989e12, 1979e12, 3.35e12, 900e9, 700),
    "h800": Gpu(("H800",), (9, 0), 79.1, 989e12, 1979e12, 3.35e12, 400e9, 700),
    "h20": Gpu(("H20",), (9, 0), 95.0, 148e12, 296e12, 4.0e12, 900e9, 400),
    "a100-40gb": Gpu(("A100", "40GB"), (8, 0), 39.4, 312e12, 0, 1.555e12, 600e9, 400),
    "a100-80gb": Gpu(("A100",), (8, 0), 79.2, 312e12, 0, 2.039e12, 600e9, 400),
    "l40s": Gpu(("L40S",), (8, 9), 44.4, 362e12, 733e12, 864e9, 64e9, 350),
    "l40": Gpu(("L40",), (8, 9), 44.4, 181e12, 362e12, 864e9, 64e9, 300),
    "l4": Gpu(("L4",), (8, 9), 22.0, 121e12, 242e12, 300e9, 64e9, 72),
    "a10g": Gpu(("A10G",), (8, 6), 22.1, 70e12, 0, 600e9, 64e9, 300),
    "a10": Gpu(("A10",), (8, 6), 22.1, 125e12, 0, 600e9, 64e9, 150),
    "rtx-pro-6000": Gpu(("RTX PRO 6000",), (12, 0), 94.9, 503e12, 1007e12, 1.792e12, 128e9, 600),
    "rtx6000-ada": Gpu(("RTX 6000 Ada",), (8, 9), 47.4, 364e12, 728e12, 960e9, 64e9, 300),
    "rtx-a6000": Gpu(("RTX A6000",), (8, 6), 47.4, 154.8e12, 0, 768e9, 112e9, 300),
    "rtx5090": Gpu(("RTX 5090",), (12, 0), 31.4, 209.5e12, 419e12, 1.792e12, 128e9, 575),
    "rtx4090": Gpu(("RTX 4090",), (8, 9), 23.5, 165.2e12, 330.3e12, 1.008e12, 64e9, 450),
    "rtx4080": Gpu(("RTX 4080",), (8, 9), 15.7, 97.5e12, 194.9e12, 717e9, 64e9, 320),
    "rtx3090": Gpu(("RTX 3090",), (8, 6), 23.6, 71e12, 0, 936e9, 112e9, 350),
    "t4": Gpu(("T4",), (7, 5), 14.6, 65e12, 0, 320e9, 32e9, 70),
    "v100-32gb": Gpu(("V100", "32GB"), (7, 0), 31.7, 125e12, 0, 900e9, 300e9, 300),
    "v100-16gb": Gpu(("V100",), (7, 0), 15.8, 125e12, 0, 900e9, 300e9, 300),
}


def named(name: str) -> Gpu:
    """Return the GPU for a name that a user types, such as `h100-80gb`, `H100 80GB`, `h100` or `RTX 4090`.

    Raises:
        UserError: the table has no such name. The error suggests the nearest one (exit 2).
    """
    plain = "-".join(name.lower().replace("nvidia", "").split())
    if plain in GPUS:
        return GPUS[plain]
    family = [known for known in GPUS if known.startswith(f"{plain}-")]
    if len(family) == 1 or plain == "h100":
        return GPUS["h100-80gb" if plain == "h100" else family[0]]
    if not family and " " in name and (known := of_device(name)):
        return known
    near = family or [gpu for gpu in [nearest(plain, GPUS)] if gpu]
    raise UserError(
        Problem(
            "the table of GPUs has no such GPU",
            "--gpu",
            found=name,
            expected="" if near else choices(plain, GPUS),
            fix=" or ".join(f"--gpu {gpu}" for gpu in near),
            code="value-choice",
        )
    )


def of_device(name: str) -> Gpu | None:
    """Return the GPU for the name that torch reports; `None` if the table lacks it.

    Laptop GPUs and MIG instances are not in the table, because they are slower than their names suggest.
    """
    words = f" {name.replace('-', ' ')} ".lower()
    if " laptop " in words or " mig " in words:
        return None
    return next(
        (gpu for gpu in GPUS.values() if all(f" {part.lower()} " in words for part in gpu.device)), None
    )
