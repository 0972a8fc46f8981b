"""Check the Triton kernels against plain torch, and the cache simulator against a plain list and
against kvpolicy's CLOCK (left out where kvpolicy is not installed).

TRITON_INTERPRET=1 python training/check.py     # on a CPU, micro size
python training/check.py                        # on a GPU
"""

from __future__ import annotations

import numpy as np
import reference
import sparse_kernels
import torch
from cachesim import POLICIES, simulate
from torch import Tensor

HEADS, LATENT, ROTARY, INDEX_DIM = 8, 64, 16, 32


def random(*shape: int, device: str) -> Tensor:
    """Normal fp32 values."""
    return torch.randn(*shape, device=device)


def check_select(batch: int, seq_len: int, k: int, device: str) -> None:
    """Selected sets equal those of a stable sort, also with many ties."""
    n = batch * seq_len
    iq = random(n, HEADS, INDEX_DIM, device=device)
    ik = random(n, INDEX_DIM, device=device)
    iw = random(n, HEADS, device=device) * (HEADS * INDEX_DIM) ** -0.5
    # Small integers make the sums exact, so both sides see the same scores and many ties.
    for scale in (0.0, 1.0):
        q, key = (iq, ik) if scale == 0.0 else (iq.round(), ik.round())
        w = iw if scale == 0.0 else (iw * 8).round()
        got = sparse_kernels.select(q, key, w, seq_len, k)
        want = reference.select(q, key, w, seq_len, k)
        differ = (got != want).any(1).sum().item()
        print(f"select T={seq_len} k={k} ties={scale > 0}: {differ} of {n} rows differ")
        # Without ties a row may differ where two scores are within fp32 rounding.
        assert differ <= (0 if scale else n // 200)


def attention_inputs(n: int, device: str) -> list[Tensor]:
    """ql, qr, lat and rope with gradients."""
    sizes = [(n, HEADS, LATENT), (n, HEADS, ROTARY), (n, LATENT), (n, ROTARY)]
    return [random(*s, device=device).requires_grad_() for s in sizes]


def check_attention(batch: int, seq_len: int, k: int, device: str) -> None:
    """Forward and all four gradients agree in fp32."""
    n = batch * seq_len
    inputs = attention_inputs(n, device)
    scores = random(batch, seq_len, seq_len, device=device)
    idx = torch.full((n, k), -1, dtype=torch.int32, device=device)
    sparse_kernels.topk_rows(scores, idx, 0, seq_len, k)
    args = (idx, seq_len, 48**-0.5)
    got = sparse_kernels.SparseAttention.apply(*inputs, *args)
    want = reference.sparse_attention(*inputs, *args)
    grad = random(*got.shape, device=device)
    pairs = [(got, want)]
    pairs += zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True
    )
    for name, (a, b) in zip(("out", "dql", "dqr", "dlat", "drope"), pairs, strict=True):
        error = ((a - b).norm() / b.norm()).item()
        print(f"attention T={seq_len} k={k} {name}: relative error {error:.1e}")
        assert error < 2e-5


def list_lru(trace: np.ndarray, first: int, capacity: int) -> int:
    """Misses of LRU kept as one list, stalest first: stale rows, then loaded ones, then hits."""
    order: list[int] = []
    misses = 0
    for step, row in enumerate(trace):
        wanted, new = set(row.tolist()), first + step
        hits = [r for r in order if r in wanted]
        loaded = [r for r in sorted(wanted) if r not in order]
        misses += sum(r != new for r in loaded)
        stale = [r for r in order if r not in wanted]
        stale = stale[max(0, len(order) + len(loaded) - capacity) :]
        if new not in wanted:
            full = len(stale) + len(loaded) + len(hits) >= capacity
            loaded += [new] if stale or not full else []
            stale = stale[1:] if full else stale
        order = stale + sorted(loaded) + sorted(hits)
    return misses


class ProductClock:
    """Slots filled by kvpolicy's own CLOCK rule, free ones first."""

    def __init__(self, capacity: int) -> None:
        """Empty slots; ImportError where kvpolicy is not installed."""
        from kvpolicy.kernels.eviction import RULES, SweepState, stamp_of

        self.rule, self.sweep, self.stamp_of = RULES["clock"], SweepState(), stamp_of
        self.row: list[int | None] = [None] * capacity
        self.stamp = torch.zeros(capacity, dtype=torch.int32)

    def load(self, rows: list[int], step: int, pinned: set[int], tune: bool) -> None:
        """Give rows slots, as far as there are any beside those of pinned rows."""
        room = [slot for slot, row in enumerate(self.row) if row is None][: len(rows)]
        if missing := len(rows) - len(room):
            free = [row is not None and row not in pinned for row in self.row]
            candidate = torch.tensor(free)
            found = self.rule.victims(self.stamp, candidate, missing, step, self.sweep, tune)
            room += found.tolist()
        for row, slot in zip(rows, room, strict=False):
            self.row[slot], self.stamp[slot] = row, self.stamp_of(step, hit=False)

    def misses(self, trace: np.ndarray, first: int) -> int:
        """Misses over the whole trace."""
        total = 0
        for step, chosen in enumerate(trace.tolist()):
            wanted, new = set(chosen), first + step
            hits = wanted.intersection(self.row)
            for row in hits:
                self.stamp[self.row.index(row)] = self.stamp_of(step, hit=True)
            total += len(wanted - hits - {new})
            self.load(sorted(wanted - hits), step, hits, tune=True)
            if new not in self.row:
                self.load([new], step, wanted, tune=False)
        return total


def check_simulator() -> None:
    """LRU equals the list, CLOCK kvpolicy's; Belady misses least; all agree at the set's size."""
    rng, first, k = np.random.default_rng(0), 200, 16
    ages = rng.exponential(30, size=(300, 200)).astype(int)
    rows = np.clip(first + np.arange(300)[:, None] - ages, 0, None)
    trace = np.stack([np.sort(rng.permutation(np.unique(r))[:k]) for r in rows])
    for capacity in (16, 24, 64, 128):
        misses = {p: simulate(trace, first, capacity, p, 0) for p in POLICIES}
        print(f"simulator capacity={capacity}: {misses}")
        assert misses["lru"] == list_lru(trace, first, capacity)
        try:
            assert misses["clock"] == ProductClock(capacity).misses(trace, first)
        except ImportError:
            print("kvpolicy is not installed: its CLOCK is not compared")
        assert misses["belady"] == min(misses.values())
        assert capacity > k or len(set(misses.values())) == 1


def main() -> None:
    """Run the checks on the machine's best device."""
    torch.manual_seed(0)
    check_simulator()
    if not torch.cuda.is_available():
        check_select(2, 80, 16, "cpu")
        check_attention(2, 24, 16, "cpu")
        return
    check_select(2, 4096, 128, "cuda")
    check_select(1, 8192, 128, "cuda")
    check_attention(2, 1024, 128, "cuda")
    print("all kernels agree with torch")


if __name__ == "__main__":
    main()
