"""Demote: rows that were fetched for rejected tokens alone are the first to go.

Whether a proposed token is accepted is known after its rows were fetched, and a fetched row needs a place
until attention has read it. So all of them may displace others, and once acceptance is known those that
only rejected rows wanted get the oldest stamp there is: the next misses take their slots, and what they
cost the cache is one step. One implementation for both backends: two scatters, no number of the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .eviction import stamp_of
from .paging import gather
from .retrieve import StoreMemory

OLDEST = stamp_of(0, hit=False)
_NOTHING = {"amin": 2**31 - 1, "amax": -(2**31)}


def demote(
    store: StoreMemory, seat: Tensor, committed: Tensor, kept: Tensor, chosen: Tensor, step: Tensor
) -> None:
    """Give the oldest stamp to records that this step has fetched and no kept row selected.

    n rows of verify steps, after :func:`kvpolicy.kernels.retrieve.retrieve` and before ``publish``. seat:
    int64 [n], -1 for padding. committed: int64 [n], tokens of the row's request before this step. kept:
    bool [n], whether its token is accepted. chosen: int64 [n, k], negative where there are fewer. step:
    int64 [1]. Full caches have no stamps.
    """
    cache = store.cache
    owner = seat.clamp_min(0)
    old = (chosen >= 0) & (chosen < (committed // store.tokens_per_entry)[:, None])
    old &= ((seat >= 0) & ~cache.full[owner] & (cache.capacity[owner] > 0))[:, None]
    per = cache.maps.shape[1]
    entry = torch.where(old, chosen, 0)
    where = cache.map_frames[owner[:, None], entry // per] * per + entry % per
    slot = torch.where(old, gather(cache.maps, torch.where(old, where, 0)).long(), -1)
    word = _stamp_words(store, owner, slot)
    stamps = cache.meta.as_strided((cache.meta.shape[0] * cache.meta.stride(0),), (1,))
    fresh = (slot >= 0) & (stamps[word] == 2 * step)
    _scatter(stamps, word, fresh & ~kept[:, None], torch.full_like(step, OLDEST), "amin")
    _scatter(stamps, word, fresh & kept[:, None], 2 * step, "amax")


def _stamp_words(store: StoreMemory, owner: Tensor, slot: Tensor) -> Tensor:
    """Where the stamps of slots lie, in words of the arena; of a negative slot 0. int64 [n, k]."""
    meta, frames = store.cache.meta, store.cache.meta_frames
    per, there = meta.shape[1], slot.clamp_min(0)
    frame = frames[owner[:, None], there // per]
    word = frame * meta.stride(0) + there % per * meta.stride(1) + meta.stride(2)
    return torch.where(slot >= 0, word, 0)


def _scatter(stamps: Tensor, word: Tensor, mask: Tensor, value: Tensor, how: str) -> None:
    """Lower or raise the masked stamps to ``value`` (int64 [1]); the others stay. A slot that comes twice is
    the same either way, in any order."""
    values = torch.where(mask, value, _NOTHING[how]).int()
    stamps.scatter_reduce_(0, word.flatten(), values.flatten(), how)
