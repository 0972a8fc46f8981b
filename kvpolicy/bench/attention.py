"""Sparse attention and the indexer, each over different inputs in turn, so that no cache holds them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kvpolicy.bench.cases import Case, WrongResult
from kvpolicy.bench.sizes import Sizes
from kvpolicy.kernels import fp8
from kvpolicy.kernels.indexer import KeyPages

# Rows of the pool: on a GPU 2.4 GB in bf16, 40 times its second-level cache.
POOL_ROWS = {"cuda": 1 << 21, "cpu": 1 << 12}
# Rows and keys made at a time, so that their float32 form stays small.
PART = 1 << 18
FRAME = 1 << 16  # bytes of a frame of index keys
CHECKED_ROWS = 4
# Attention rounds its weights and its result to the narrow dtype; scores add up in float32.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def attention_cases(sizes: Sizes) -> Iterator[Case]:
    """By row format and batch. Bytes: the selected rows."""
    for form in sizes.formats:
        pool = row_pool(sizes, form)
        for n in sizes.batches:
            yield _attention(sizes, pool, form, n)


def indexer_cases(sizes: Sizes) -> Iterator[Case]:
    """By key format and batch: scores and top-k together. Bytes: the keys, once."""
    for form in sizes.formats:
        for n in sizes.batches:
            yield _indexer(sizes, key_pool(sizes, form, n), form, n)


def row_pool(sizes: Sizes, form: str) -> Tensor:
    """Random rows [frames, 64, width] of a format."""
    g = torch.Generator(sizes.device).manual_seed(0)
    cfg, rows = sizes.config, POOL_ROWS[sizes.device.type]
    parts = []
    for start in range(0, rows, PART):
        count = min(PART, rows - start)
        values = torch.randn(count, cfg.kv_rank + cfg.rope, device=sizes.device, generator=g)
        parts.append(
            fp8.quantize_rows(values, cfg.kv_rank) if form == "fp8" else _kept(values, form)
        )
    return torch.cat(parts).view(rows // 64, 64, -1)


def _kept(values: Tensor, form: str) -> Tensor:
    return values if form == "float32" else values.bfloat16()


def _attention(sizes: Sizes, pool: Tensor, form: str, n: int) -> Case:
    cfg, ops, k = sizes.config, sizes.ops(), sizes.topk
    g = torch.Generator(sizes.device).manual_seed(n)
    valid = torch.ones(n, k, dtype=torch.bool, device=sizes.device)
    rows, scale = pool.shape[0] * pool.shape[1], (cfg.nope + cfg.rope) ** -0.5

    def inputs() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(0, rows, (n, k), device=sizes.device, generator=g)
        shape = (n, cfg.heads, cfg.kv_rank + cfg.rope)
        query = torch.randn(shape, device=sizes.device, generator=g).to(sizes.dtype)
        return query, chosen.sort(dim=1).values

    def call(query: Tensor, chosen: Tensor) -> Tensor:
        return ops.sparse_mla(query, pool, chosen, valid, cfg.kv_rank, scale)

    made = [inputs() for _ in range(32 if n == 1 else 8)]

    def check() -> None:
        query, chosen = (x[:CHECKED_ROWS] for x in made[0])
        picked = pool.flatten(0, 1)[chosen]
        values = fp8.dequantize_rows(picked, cfg.kv_rank) if form == "fp8" else picked
        values = values.double()
        weight = torch.einsum("nhd,nkd->nhk", query.double(), values).mul(scale).softmax(-1)
        exact = torch.einsum("nhk,nkd->nhd", weight, values[..., : cfg.kv_rank])
        found = call(*made[0])[:CHECKED_ROWS].double()
        close(found, exact, TOLERANCE[sizes.dtype], "attention")

    size = n * k * pool.shape[2] * pool.element_size()
    return Case(
        group="attention",
        name=f"attention, {form} rows of {sizes.row_bytes(form)} B",
        batch=n,
        calls=[partial(call, *one) for one in made],
        check=check,
        device_bytes=size,
        flops=2 * n * k * cfg.heads * (2 * cfg.kv_rank + cfg.rope),
    )


def close(found: Tensor, exact: Tensor, tolerance: float, what: str) -> None:
    """WrongResult if the relative error is above the tolerance, or is no number."""
    error = float((found - exact).norm() / exact.norm())
    if not error < tolerance:
        raise WrongResult(f"{what}: relative error {error:.1e}, allowed {tolerance:.0e}")


def key_pool(sizes: Sizes, form: str, n: int) -> KeyPages:
    """Random keys of n segments in scattered frames."""
    g = torch.Generator(sizes.device).manual_seed(1)
    width = sizes.config.index_dim
    item = width + 4 if form == "fp8" else width * (4 if form == "float32" else 2)
    per = FRAME // item
    frames = -(-sizes.context // per)
    arena = torch.empty(n * frames, FRAME, dtype=torch.uint8, device=sizes.device)
    view = arena[:, : per * item].view(-1, per, item)
    if form != "fp8":
        view = view.view(torch.float32 if form == "float32" else torch.bfloat16)
    for start in range(0, len(view), 512):
        part = view[start : start + 512]
        keys = torch.randn(len(part) * per, width, device=sizes.device, generator=g)
        part.copy_((fp8.quantize_keys(keys) if form == "fp8" else keys).view(part.shape))
    order = torch.randperm(len(view), device=sizes.device, generator=g)
    return KeyPages(view, order.view(n, frames))


def _indexer(sizes: Sizes, pages: KeyPages, form: str, n: int) -> Case:
    cfg, ops, context = sizes.config, sizes.ops(), sizes.context
    g = torch.Generator(sizes.device).manual_seed(n)
    segment = torch.arange(n, device=sizes.device)
    visible = torch.full((n,), context, device=sizes.device)
    scale = cfg.index_dim**-0.5

    def inputs() -> tuple[Tensor, Tensor]:
        shape = (n, cfg.index_heads, cfg.index_dim)
        q = torch.randn(shape, device=sizes.device, generator=g).to(sizes.dtype)
        return q, torch.randn(n, cfg.index_heads, device=sizes.device, generator=g)

    def call(q: Tensor, weights: Tensor) -> Tensor:
        return ops.index_top_k(q, weights, pages, segment, visible, context, sizes.topk, scale)

    made = [inputs() for _ in range(4)]

    def check() -> None:
        q, weights = made[0]
        _check_selection(call(q, weights)[0], q[:1], weights[0], pages, context, scale)

    size = n * context * pages.view.shape[2] * pages.view.element_size()
    return Case(
        group="indexer",
        name=f"indexer and top-k, {form} keys, {context:,} entries",
        batch=n,
        calls=[partial(call, *one) for one in made],
        check=check,
        device_bytes=size,
        flops=2 * n * context * cfg.index_heads * cfg.index_dim,
    )


def _check_selection(
    chosen: Tensor, q: Tensor, weights: Tensor, pages: KeyPages, context: int, scale: float
) -> None:
    """That a row chose the highest scores, but for what rounding may exchange. chosen: int64 [k]."""
    dots = pages.queries(q)[0].double() @ pages.keys(0, context).double().T
    scores = (dots * scale).clamp_min(0.0).mul(weights[:, None].double()).sum(0)
    k = chosen.shape[0]
    if not bool((chosen[1:] > chosen[:-1]).all()):
        raise WrongResult("indexer: the selection is not ascending")
    missing = float(scores.topk(k).values[-1] - scores[chosen].min())
    if not missing < 1e-2 * float(scores.std()):
        raise WrongResult(f"indexer: a chosen entry scores {missing:.1e} below the top {k}")
