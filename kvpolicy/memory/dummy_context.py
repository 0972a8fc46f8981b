"""The history of a request that nobody computed: pseudo-random rows and keys, straight into the host pool.

To measure decoding at 100,000 tokens of context with weights that were never trained, the prompt need not
be read: any finite rows of the right size do. A block of BLOCK entries is drawn once per store and copied
over a request's region in large pieces by several threads (35 GB take a few seconds), request r beginning
at another entry of the block: its bits follow from the request's number and the entry alone, as bits of
rows that a model computes do.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import torch
from torch import Tensor

from kvpolicy.kernels.memory_ops import memory_ops
from kvpolicy.memory.host_pool import HostRegion
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.rows import stored_keys, stored_rows

BLOCK = 4096
"""Entries that are drawn; histories repeat them."""
# Requests begin this many entries of the block apart.
APART = 97
THREADS = 8


class DummyContexts:
    """Fills regions of the host pool for one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @cached_property
    def _blocks(self) -> list[tuple[Tensor, Tensor]]:
        """Per store records and keys of BLOCK entries, as bytes [BLOCK, bytes]."""
        ops, found = memory_ops("reference"), []
        for store in self._layout.stores:
            g = torch.Generator().manual_seed(store.index)
            values = torch.randn(BLOCK, store.store.n_layers, store.store.row_width, generator=g)
            keys = torch.randn(BLOCK, store.store.index_key_width, generator=g)
            rows = stored_rows(store, ops, values).to(store.record.dtype).contiguous()
            own = stored_keys(store, ops, keys).to(store.key.dtype).contiguous()
            pair = (rows.flatten(1).view(torch.uint8), own.view(torch.uint8))
            found.append(pair)
        return found

    def fill(self, region: HostRegion, tokens: int, request: int) -> None:
        """Write the records and keys of a request's first ``tokens`` tokens. Nothing on the device may still
        use the region."""
        copies: list[tuple[int, int, int]] = []
        for store, blocks in zip(self._layout.stores, self._blocks, strict=True):
            entries = store.store.entries(tokens)
            own = (region.rows[store.index], region.keys[store.index])
            for block, target in zip(blocks, own, strict=True):
                copies += _pieces(block, target.data_ptr(), entries, request * APART % BLOCK)
        count = max(1, min(THREADS, os.cpu_count() or 1))
        with ThreadPoolExecutor(count) as pool:  # ctypes lets go of the interpreter's lock
            list(pool.map(lambda piece: ctypes.memmove(*piece) and None, copies))


def _pieces(block: Tensor, target: int, entries: int, first: int) -> list[tuple[int, int, int]]:
    """(to, from, bytes) of copies that lay ``entries`` entries of a block out at an address, beginning with
    its entry ``first``."""
    size = block.shape[1]
    pieces, done = [], 0
    while done < entries:
        at = (first + done) % BLOCK
        count = min(BLOCK - at, entries - done)
        pieces.append((target + done * size, block.data_ptr() + at * size, count * size))
        done += count
    return pieces
