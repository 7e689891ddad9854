"""The operators of a mixture of experts: sorting, grouped GEMMs, a gated activation, a weighted sum.

Each operator is registered with torch, so that torch.compile does not look into it. On a GPU it is a Triton
kernel of `triton_experts`. On a CPU it is plain torch, and the tests compare the kernels with it. No operator
waits for the GPU, and no shape depends on the routing. The exception is `grouped_mm` without torch's kernel.

T is the number of tokens, K of a token's experts, N = T K of rows and E of experts. H is the hidden size,
F the width of an expert and R a rank, padded to a power of two of at least 16. Rows are sorted by expert.
Row i belongs to token order[i] / K.
"""

from __future__ import annotations

from typing import Any

import torch

from finetune.hardware import detection
from finetune.kernels import ops
from finetune.kernels.ops import act_of
from finetune.kernels.registration import operator, shapes_of

triton_experts: Any = None
if torch.cuda.is_available():
    from finetune.kernels import triton_experts

# Rows that one program of the activation kernels computes. They belong to one expert.
TILE = 64
# Experts up to which one program finds the rows of all of them.
MOST_EXPERTS = 4096
# Rows of torch's grouped GEMM are a multiple of so many bytes.
ALIGNED = 16


@operator("sort_by_expert(Tensor ids, int experts) -> (Tensor, Tensor, Tensor, Tensor)")
def sort_by_expert(
    ids: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort rows by expert. Rows of one expert keep their order.

    Args:
        ids: The experts of each token [T, K].

    Returns:
        order: The index in the flat `ids` of each sorted row [N].
        places: The sorted row of each index [N].
        ends: The end of each expert's rows [E].
        tiles: Expert, first row and end of each tile [N / TILE + E, 3]. The last tiles may be empty.
    """
    flat = ids.flatten()
    found, order = torch.sort(flat.to(torch.int16 if experts < 2**15 else flat.dtype), stable=True)
    if ids.is_cuda and experts <= MOST_EXPERTS:
        return triton_experts.places_of_experts(found, order, experts)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(flat), device=ids.device)
    every = torch.arange(experts, device=ids.device, dtype=found.dtype)
    ends = torch.searchsorted(found, every, right=True)
    starts = torch.nn.functional.pad(ends, (1, 0))
    until = ((starts[1:] - starts[:-1] + TILE - 1) // TILE).cumsum(0)  # tiles up to each expert's last
    tile = torch.arange(len(flat) // TILE + experts, device=ids.device)
    expert = torch.searchsorted(until, tile, right=True)
    before = torch.nn.functional.pad(until, (1, 0))
    end = torch.nn.functional.pad(ends, (0, 1))[expert]  # 0 after the last expert: an empty tile
    first = starts[expert] + (tile - before[expert]) * TILE
    tiles = torch.stack([expert.clamp(max=experts - 1), first, torch.minimum(first + TILE, end)], dim=1)
    narrow = torch.int32
    return order.to(narrow), places.to(narrow), ends.to(narrow), tiles.to(narrow)


@shapes_of("sort_by_expert")
def _(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = ids.numel()
    sizes: list[Any] = [(rows,), (rows,), (experts,), (rows // TILE + experts, 3)]
    order, places, ends, tiles = (ids.new_empty(size, dtype=torch.int32) for size in sizes)
    return order, places, ends, tiles


@operator("rows_of_experts(Tensor x, Tensor places) -> Tensor")
def rows_of_experts(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Copy each token of x [T, H] to its rows [N, H]."""
    if x.is_cuda:
        return triton_experts.rows_of_experts(x.contiguous(), places)
    out = x.new_empty(len(places), x.shape[1])
    out[places.long()] = x.repeat_interleave(len(places) // len(x), dim=0)
    return out


@shapes_of("rows_of_experts")
def _(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x.new_empty(places.shape[0], x.shape[1])


@operator("sum_of_experts(Tensor rows, Tensor places, Tensor? weights, int tokens) -> Tensor")
def sum_of_experts(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None, tokens: int
) -> torch.Tensor:
    """Sum the rows [N, H] of each token, times their `weights` [T, K] if given: [T, H].

    The sum is in float32 (float64 for float64 rows), in the order of the token's experts.
    """
    if rows.is_cuda:
        return triton_experts.sum_of_experts(rows, places, weights, tokens)
    exact = torch.promote_types(rows.dtype, torch.float32)
    each = rows[places.long()].view(tokens, -1, rows.shape[1]).to(exact)
    each = each if weights is None else each * weights.to(exact)[..., None]
    return each.sum(1).to(rows.dtype)


@shapes_of("sum_of_experts")
def _(rows: torch.Tensor, places: torch.Tensor, weights: object, tokens: int) -> torch.Tensor:
    return rows.new_empty(tokens, rows.shape[1])


@operator("grouped_mm(Tensor x, Tensor weight, Tensor ends, bool transposed) -> Tensor")
def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Multiply the rows of each expert by its weight: x [N, in] weight^T, with weight [E, out, in].

    torch's kernel needs bf16 and compute capability 9.0. Elsewhere, each expert is one GEMM, and the function
    waits once for the GPU to learn the number of rows of each expert.

    Args:
        transposed: Multiply by weight^T. Without it: x [N, out] weight, for the gradient of the input.
    """
    right = weight.transpose(1, 2) if transposed else weight
    if x.is_cuda and has_grouped_kernel(x, weight):
        return torch.nn.functional.grouped_mm(x, right, offs=ends)
    out, start = x.new_empty(len(x), right.shape[2]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], right[expert], out=out[start:end])
        start = end
    return out


@shapes_of("grouped_mm")
def _(x: torch.Tensor, weight: torch.Tensor, ends: object, transposed: bool) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])


def has_grouped_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether torch has a grouped kernel: bf16 on Hopper or later, rows of a multiple of 16 bytes."""
    widths = [size * weight.element_size() for size in weight.shape[1:]]
    aligned = not any(width % ALIGNED for width in widths)
    return x.dtype == weight.dtype == torch.bfloat16 and aligned and detection.capability(x.device) >= (9, 0)


@operator(
    "dequantize_experts(Tensor[] stored, Tensor? thin, bool below, ScalarType dtype, Tensor? after=None) "
    "-> Tensor"
)
def dequantize_experts(
    stored: list[torch.Tensor],
    thin: torch.Tensor | None,
    below: bool,
    dtype: torch.dtype,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize the stacked weights of experts [E, out, in], and write an adapter's matrices next to them.

    Args:
        stored: The tensors of a quantized weight. 4 bits have three tensors, as `four_bit` describes them:
            packed [E, out, in / 2] uint8, absmax and table. 8 bits have two tensors: values [E, out, in] in
            e4m3 or int8, and one scale for each output [E, out, 1] in float32.
        thin: Matrices of an adapter in `dtype`: [E, R, in] with `below`, otherwise [E, out, R]. Or `None`.
        below: Whether `thin` goes below the rows of each weight. Otherwise it goes behind the columns.
        after: A tensor that must be computed before. The backward pass gives its gradient. Otherwise a
            compiler would save the weight of the forward pass for the backward pass.

    Returns:
        [E, out + R, in] or [E, out, in + R] in `dtype`.
    """
    if stored[0].is_cuda:
        return triton_experts.dequantize(stored, thin, below, dtype)
    if len(stored) == 2:
        weight = (stored[0].float() * stored[1]).to(dtype)
    else:
        packed, absmax, table = stored
        blocks = packed.reshape(absmax.numel(), -1)
        flat = ops.dequantize([blocks, absmax, table], dtype)
        weight = flat.view(*packed.shape[:2], 2 * packed.shape[2])
    return weight if thin is None else torch.cat([weight, thin], dim=1 if below else 2)


@shapes_of("dequantize_experts")
def _(
    stored: list[torch.Tensor],
    thin: torch.Tensor | None,
    below: bool,
    dtype: torch.dtype,
    after: object = None,
) -> torch.Tensor:
    experts, outputs, inputs = stored[0].shape
    inputs *= 2 if len(stored) == 3 else 1
    outputs += thin.shape[1] if thin is not None and below else 0
    inputs += thin.shape[2] if thin is not None and not below else 0
    return stored[0].new_empty(experts, outputs, inputs, dtype=dtype)


@operator("activate_experts(Tensor z, Tensor? b, Tensor? a, Tensor tiles, int size, str act) -> Tensor")
def activate_experts(
    z: torch.Tensor,
    b: torch.Tensor | None,
    a: torch.Tensor | None,
    tiles: torch.Tensor,
    size: int,
    act: str,
) -> torch.Tensor:
    """Compute h = act(gate) up and u = h a^T, with (gate, up) = z[:, :2 F] + t b^T and t = z[:, 2 F:].

    Args:
        z: [N, 2 F + R], or [N, 2 F] without `b`.
        b: The first adapter's outer matrices [E, 2 F, R], or `None`.
        a: The second adapter's inner matrices [E, R, F], or `None`.
        size: F.
        act: `silu` or `gelu_tanh`.

    Returns:
        [h | u], [N, F + R], or h alone without `a`.
    """
    if z.is_cuda:
        return triton_experts.activate(z, b, a, tiles, size, act)
    gate, up = _gate_and_up(z, b, tiles, size)
    h = (act_of(gate, act)[0] * up).to(z.dtype)
    return h if a is None else torch.cat([h, multiply_tiles(h, a.transpose(1, 2), tiles).to(z.dtype)], dim=1)


@shapes_of("activate_experts")
def _(z: torch.Tensor, b: object, a: torch.Tensor | None, tiles: object, size: int, act: str) -> torch.Tensor:
    return z.new_empty(z.shape[0], size + (0 if a is None else a.shape[1]))


@operator(
    "activate_experts_backward(Tensor z, Tensor? b, Tensor? a, Tensor grad, Tensor weights, Tensor "
    "order, Tensor tiles, int size, str act) -> (Tensor, Tensor, Tensor, Tensor)"
)
def activate_experts_backward(
    z: torch.Tensor,
    b: torch.Tensor | None,
    a: torch.Tensor | None,
    grad: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    size: int,
    act: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of `activate_experts`. It recomputes h and u.

    Args:
        grad: The gradient of [h | u] [N, F + R], without the factor of the routing weight.
        weights: The routing weights [T, K].

    Returns:
        dz: The gradient of z.
        h: [N, F]. Empty without `a`.
        thin: The gradient of u, and u times the routing weight [N, 2 R]. Empty without `a`.
        dweights: The gradient of the routing weights [T, K] in float32.
    """
    if z.is_cuda:
        return triton_experts.activate_backward(z, b, a, grad, weights, order, tiles, size, act)
    gate, up = _gate_and_up(z, b, tiles, size)
    exact = gate.dtype
    value, slope = act_of(gate, act)
    weight = weights.to(exact).flatten()[order.long()][:, None]
    h, g = value * up, grad.to(exact)
    dweight, dh = (h * g[:, :size]).sum(1), weight * g[:, :size]
    thin, kept = z.new_empty(0), z.new_empty(0)
    if a is not None:
        kept = h.to(z.dtype)
        u, du = multiply_tiles(kept, a.transpose(1, 2), tiles), weight * g[:, size:]
        dweight = dweight + (u * g[:, size:]).sum(1)
        thin = torch.cat([du, weight * u], dim=1).to(z.dtype)
        dh = dh + multiply_tiles(thin[:, : a.shape[1]], a, tiles)
    dz = torch.cat([dh * up * slope, dh * value], dim=1).to(z.dtype)
    if b is not None:
        dz = torch.cat([dz, multiply_tiles(dz, b, tiles).to(z.dtype)], dim=1)
    flat = torch.empty_like(dweight)
    flat[order.long()] = dweight
    return dz, kept, thin, flat.view(weights.shape)


@shapes_of("activate_experts_backward")
def _(
    z: torch.Tensor,
    b: object,
    a: torch.Tensor | None,
    grad: object,
    weights: torch.Tensor,
    order: object,
    tiles: object,
    size: int,
    act: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    exact = torch.promote_types(z.dtype, torch.float32)
    h = z.new_empty((z.shape[0], size) if a is not None else 0)
    thin = z.new_empty((z.shape[0], 2 * a.shape[1]) if a is not None else 0)
    return torch.empty_like(z), h, thin, weights.new_empty(weights.shape, dtype=exact)


@operator("product_of_experts(Tensor left, Tensor right, Tensor ends, Tensor? order, int each) -> Tensor")
def product_of_experts(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, order: torch.Tensor | None, each: int
) -> torch.Tensor:
    """Compute left^T right over the rows of each expert, for adapter gradients: [E, R, columns] in float32.

    Args:
        left: [N, R].
        right: [N, columns], or [T, columns] with the `order` of `sort_by_expert`.
        each: K.
    """
    if left.is_cuda:
        return triton_experts.product_of_experts(left, right, ends, order, each)
    rows = right if order is None else right[order.long() // each]
    exact = torch.promote_types(left.dtype, torch.float32)
    out, start = left.new_empty(len(ends), left.shape[1], right.shape[1], dtype=exact), 0
    for expert, end in enumerate(ends.tolist()):
        out[expert] = left[start:end].to(exact).t() @ rows[start:end].to(exact)
        start = end
    return out


@shapes_of("product_of_experts")
def _(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, order: object, each: int) -> torch.Tensor:
    exact = torch.promote_types(left.dtype, torch.float32)
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1], dtype=exact)


def _gate_and_up(
    z: torch.Tensor, b: torch.Tensor | None, tiles: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    both = z[:, : 2 * size].to(torch.promote_types(z.dtype, torch.float32))
    if b is not None:
        both = both + multiply_tiles(z[:, 2 * size :], b.transpose(1, 2), tiles)
    gate, up = both.chunk(2, dim=1)
    return gate, up


def multiply_tiles(rows: torch.Tensor, right: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Multiply each tile's rows by its expert's matrix of `right` [E, in, out], in float32 or float64.

    The operators use it on the CPU, because it waits for the tiles.
    """
    exact = torch.promote_types(rows.dtype, torch.float32)
    out = rows.new_empty(len(rows), right.shape[2], dtype=exact)
    for expert, first, end in tiles.tolist():
        if end > first:
            out[first:end] = rows[first:end].to(exact) @ right[expert].to(exact)
    return out
