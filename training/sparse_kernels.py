"""Triton kernels of the training run: index scores, exact top-k, sparse latent attention.

Every kernel follows its inputs' dtype (bf16 in training, fp32 in checks and evaluation) and
accumulates in fp32. `reference.py` holds the same functions in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of one score chunk: 2 sequences x 2048 rows x 32,768 columns of fp32 are 0.5 GB.
ROW_CHUNK = 2048


@triton.jit
def _score_kernel(
    iq_ptr, ik_ptr, iw_ptr, out_ptr, seq_len, row_start, rows, cols,
    HEADS: tl.constexpr, DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One [BM, BN] tile of sum_h w_h relu(q_h . k) for rows row_start.. of one sequence."""
    col_block, row_block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_block * BM + tl.arange(0, BM)
    col = col_block * BN + tl.arange(0, BN)
    # Tiles wholly in the future are never read by the top-k kernel.
    if col_block * BN > row_start + row_block * BM + BM - 1:
        return
    dim = tl.arange(0, DIM)
    row_ok, col_ok = row < rows, col < cols
    token = batch * seq_len + row_start + row
    key = tl.load(
        ik_ptr + (batch * seq_len + col)[None, :] * DIM + dim[:, None],
        mask=col_ok[None, :], other=0.0,
    )  # fmt: skip
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for head in tl.static_range(HEADS):
        query = tl.load(
            iq_ptr + (token * HEADS + head)[:, None] * DIM + dim[None, :],
            mask=row_ok[:, None], other=0.0,
        )  # fmt: skip
        weight = tl.load(iw_ptr + token * HEADS + head, mask=row_ok, other=0.0).to(tl.float32)
        dots = tl.dot(query, key, input_precision="ieee")
        acc += weight[:, None] * tl.maximum(dots, 0.0)
    out = out_ptr + (batch * rows + row).to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(out, acc, mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def _topk_kernel(
    score_ptr, out_ptr, seq_len, row_start, rows, cols, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Exact top-K of one row's causal prefix, ties to the lowest position, ascending positions.

    Bisection on the sortable int32 image of the scores; it stops early once exactly K keys pass.
    """
    row, batch = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, BLOCK)
    valid = row_start + row + 1
    score = tl.load(
        score_ptr + (batch * rows + row).to(tl.int64) * cols + col, mask=col < valid, other=0.0
    )
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(col < valid, key, -2147483648)
    want = tl.minimum(valid, K)
    low = tl.min(tl.where(col < valid, key, 2147483647), 0)
    high = tl.max(key, 0)
    count = valid
    # Invariant: count(key >= low) = count >= want, and count(key > high) = 0.
    while (low < high) & (count > want):
        mid = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        above = tl.sum((key >= mid).to(tl.int32), 0)
        enough = above >= want
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
        count = tl.where(enough, above, count)
    exact = count == want
    over = tl.where(exact, key >= low, key > low) & (col < valid)
    tie = (key == low) & (col < valid) & (over == 0)
    # One scan for both ranks: at most K-1 keys are over, at most 32,768 tie.
    rank = tl.cumsum((over.to(tl.int32) << 16) | tie.to(tl.int32), 0)
    room = want - tl.sum(over.to(tl.int32), 0)
    tie_rank = rank & 0xFFFF
    chosen = over | (tie & (tie_rank <= room))
    slot = (rank >> 16) + tl.minimum(tie_rank, room) - 1
    out = out_ptr + (batch * seq_len + row_start + row).to(tl.int64) * K
    tl.store(out + slot, col, mask=chosen)


@triton.jit
def _load_rows(ptr, rows, ok, DIM: tl.constexpr):
    """[len(rows), DIM] gathered rows; zero where not ok."""
    dim = tl.arange(0, DIM)
    return tl.load(ptr + rows[:, None] * DIM + dim[None, :], mask=ok[:, None], other=0.0)


@triton.jit
def _load_query(
    ql_ptr, qr_ptr, lat_ptr, rope_ptr, idx_ptr, token, seq_len, heads,
    K: tl.constexpr, H: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One query's heads, its K rows and their unscaled scores: row, ok, lat, rope, ql, qr, s.

    row [K] int64 counts over all sequences; ok [K] is false where fewer than K rows are selected.
    """
    position = tl.load(idx_ptr + token * K + tl.arange(0, K))
    ok = position >= 0
    row = (token // seq_len) * seq_len + tl.maximum(position, 0)
    lat = _load_rows(lat_ptr, row, ok, L)
    rope = _load_rows(rope_ptr, row, ok, R)
    ql = _load_rows(ql_ptr, token * H + heads, heads < H, L)
    qr = _load_rows(qr_ptr, token * H + heads, heads < H, R)
    s = tl.dot(ql, tl.trans(lat), input_precision="ieee")
    s += tl.dot(qr, tl.trans(rope), input_precision="ieee")
    return row, ok, lat, rope, ql, qr, s


@triton.jit
def _attend_forward_kernel(
    ql_ptr, qr_ptr, lat_ptr, rope_ptr, idx_ptr, out_ptr, lse_ptr, seq_len, scale,
    K: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Absorbed attention of one query over its K gathered latent rows."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HP)
    head_ok = head < H
    _, ok, lat, _, _, _, s = _load_query(
        ql_ptr, qr_ptr, lat_ptr, rope_ptr, idx_ptr, token, seq_len, head, K, H, L, R
    )
    s = tl.where(ok[None, :], s * scale, -float("inf"))
    top = tl.max(s, 1)
    p = tl.exp(s - top[:, None])
    total = tl.sum(p, 1)
    o = tl.dot((p / total[:, None]).to(lat.dtype), lat, input_precision="ieee")
    dim = tl.arange(0, L)
    out = out_ptr + (token * H + head)[:, None] * L + dim[None, :]
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=head_ok[:, None])
    tl.store(lse_ptr + token * H + head, top + tl.log(total), mask=head_ok)


@triton.jit
def _attend_backward_kernel(
    ql_ptr, qr_ptr, lat_ptr, rope_ptr, idx_ptr, out_ptr, lse_ptr, do_ptr,
    dql_ptr, dqr_ptr, dlat_ptr, drope_ptr, seq_len, scale,
    K: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Gradients of one query; those of the shared rows are added atomically in fp32."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HP)
    head_ok = head < H
    row, ok, lat, rope, ql, qr, s = _load_query(
        ql_ptr, qr_ptr, lat_ptr, rope_ptr, idx_ptr, token, seq_len, head, K, H, L, R
    )
    do = _load_rows(do_ptr, token * H + head, head_ok, L)
    o = _load_rows(out_ptr, token * H + head, head_ok, L)
    lse = tl.load(lse_ptr + token * H + head, mask=head_ok, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    live = ok[None, :] & head_ok[:, None]
    p = tl.where(live, tl.exp(s * scale - lse[:, None]), 0.0)
    dp = tl.dot(do, tl.trans(lat), input_precision="ieee")
    ds = (p * (dp - delta[:, None]) * scale).to(lat.dtype)
    p = p.to(lat.dtype)
    dim, rdim = tl.arange(0, L), tl.arange(0, R)
    at = (token * H + head)[:, None]
    dql = tl.dot(ds, lat, input_precision="ieee").to(dql_ptr.dtype.element_ty)
    dqr = tl.dot(ds, rope, input_precision="ieee").to(dqr_ptr.dtype.element_ty)
    tl.store(dql_ptr + at * L + dim[None, :], dql, mask=head_ok[:, None])
    tl.store(dqr_ptr + at * R + rdim[None, :], dqr, mask=head_ok[:, None])
    ds_t = tl.trans(ds)
    dlat = tl.dot(ds_t, ql, input_precision="ieee")
    dlat += tl.dot(tl.trans(p), do, input_precision="ieee")
    drope = tl.dot(ds_t, qr, input_precision="ieee")
    ok2 = ok[:, None]
    tl.atomic_add(dlat_ptr + row[:, None] * L + dim[None, :], dlat, mask=ok2, sem="relaxed")
    tl.atomic_add(drope_ptr + row[:, None] * R + rdim[None, :], drope, mask=ok2, sem="relaxed")


def index_scores(
    iq: Tensor, ik: Tensor, iw: Tensor, row_start: int, rows: int, seq_len: int
) -> Tensor:
    """Scores [B, rows, row_start + rows] fp32; iq [N, H, D], ik [N, D], iw [N, H], N = B T.

    Entries of later positions are left unwritten: `topk_rows` never reads them.
    """
    batch, (_, heads, dim) = iq.shape[0] // seq_len, iq.shape
    cols = row_start + rows
    out = torch.empty(batch, rows, cols, dtype=torch.float32, device=iq.device)
    block_m, block_n = 64, 128
    grid = (triton.cdiv(cols, block_n), triton.cdiv(rows, block_m), batch)
    _score_kernel[grid](
        iq, ik, iw, out, seq_len, row_start, rows, cols,
        HEADS=heads, DIM=dim, BM=block_m, BN=block_n, num_warps=4,
    )  # fmt: skip
    return out


def topk_rows(scores: Tensor, out: Tensor, row_start: int, seq_len: int, k: int) -> None:
    """Write the top-k positions of `scores` [B, rows, cols] into `out` [N, k] int32."""
    batch, rows, cols = scores.shape
    block = triton.next_power_of_2(max(cols, k))
    # 64 keys a thread at most: 32,768 columns need 16 warps.
    warps = min(max(block // 1024, 4), 16)
    _topk_kernel[(rows, batch)](
        scores, out, seq_len, row_start, rows, cols, K=k, BLOCK=block, num_warps=warps
    )


@torch.no_grad()
def select(iq: Tensor, ik: Tensor, iw: Tensor, seq_len: int, k: int) -> Tensor:
    """Positions [N, k] int32 selected for every token, ascending, -1 where fewer than k exist."""
    out = torch.full((iq.shape[0], k), -1, dtype=torch.int32, device=iq.device)
    for start in range(0, seq_len, ROW_CHUNK):
        rows = min(ROW_CHUNK, seq_len - start)
        scores = index_scores(iq, ik, iw, start, rows, seq_len)
        topk_rows(scores, out, start, seq_len, k)
    return out


class SparseAttention(torch.autograd.Function):
    """Latent attention over selected rows: ql [N,H,L], qr [N,H,R], lat [N,L], rope [N,R]."""

    @staticmethod
    def forward(ctx, ql, qr, lat, rope, idx, seq_len, scale):  # type: ignore[no-untyped-def]
        """Return the latent output [N, H, L] in ql's dtype."""
        tokens, heads, latent = ql.shape
        out = torch.empty_like(ql)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=ql.device)
        _attend_forward_kernel[(tokens,)](
            ql, qr, lat, rope, idx, out, lse, seq_len, scale,
            K=idx.shape[1], H=heads, HP=max(16, heads), L=latent, R=qr.shape[2], num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(ql, qr, lat, rope, idx, out, lse)
        ctx.seq_len, ctx.scale = seq_len, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Return gradients for ql, qr, lat and rope."""
        ql, qr, lat, rope, idx, out, lse = ctx.saved_tensors
        tokens, heads, latent = ql.shape
        dql, dqr = torch.empty_like(ql), torch.empty_like(qr)
        dlat = torch.zeros_like(lat, dtype=torch.float32)
        drope = torch.zeros_like(rope, dtype=torch.float32)
        _attend_backward_kernel[(tokens,)](
            ql, qr, lat, rope, idx, out, lse, grad.contiguous(), dql, dqr, dlat, drope,
            ctx.seq_len, ctx.scale,
            K=idx.shape[1], H=heads, HP=max(16, heads), L=latent, R=qr.shape[2], num_warps=4,
        )  # fmt: skip
        return dql, dqr, dlat.to(lat.dtype), drope.to(rope.dtype), None, None, None
