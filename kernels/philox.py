"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., SC 2011, section 3.3).

A number is a function of (key, counter) alone: no state, so batching, order and preemption cannot
change it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
ROUNDS = 10

Words = NDArray[np.uint64]


def philox(key: int, counter: tuple[Words, Words, Words, Words]) -> tuple[Words, ...]:
    """Four 32-bit words per counter. key: 64 bits. counter: four arrays of 32-bit words, equal shape.

    Returns four uint64 arrays holding values below 2^32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ np.uint64(k0),
            second & _MASK,
            (first >> _SHIFT) ^ c3 ^ np.uint64(k1),
            first & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(seed: int, position: int, role: int, count: int) -> NDArray[np.float64]:
    """``count`` numbers in (0, 1), fixed by (seed, position, role): float64 [count]."""
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    zero = np.zeros_like(blocks)
    low = zero + np.uint64(position & 0xFFFFFFFF)
    high = zero + np.uint64((position >> 32) & 0xFFFFFFFF)
    words = philox(seed, (blocks, low, high, zero + np.uint64(role)))
    bits = np.stack(words, axis=-1).reshape(-1)[:count]
    return (bits.astype(np.float64) + 0.5) * 2.0**-32
