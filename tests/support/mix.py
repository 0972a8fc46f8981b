"""Four requests that differ in length and in how they sample, for tests of bitwise independence."""

from __future__ import annotations

from kvpolicy import SamplingParams

PROMPTS = [b"def f(x):\n    return x + 1\n" * 3, b"z", bytes(range(60)), b"import os, sys\n" * 6]
PARAMS = [
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=9, temperature=0.7, seed=5),
    SamplingParams(max_new_tokens=12, temperature=1.2, top_k=20, top_p=0.9, seed=5),
    SamplingParams(max_new_tokens=7, temperature=1.0, seed=9),
]
