"""Given prompts as a workload: all of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kvpolicy.config import SamplingParams
from kvpolicy.workloads.workload import Arrival, Phase, Workload


def from_prompts(prompts: Sequence[bytes], sampling: SamplingParams) -> Workload:
    """Every prompt arrives at the start, in order; the run ends with the last of them."""

    def requests() -> Iterator[Arrival]:
        for prompt in prompts:
            yield Arrival(0.0, prompt, sampling.max_new_tokens, sampling.seed)

    return Workload("prompts", (Phase("prompts", 0.0, math.inf),), requests, closed=False)
