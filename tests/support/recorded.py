"""Small recorded runs: the quick and the toy model under load, written and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.engine.engine import Engine
from kvpolicy.models.loader import DecodeModel
from kvpolicy.recording import Recording
from kvpolicy.recording.recorder import Recorder


def recorded(
    model: DecodeModel,
    path: Path,
    prompts: list[bytes],
    tokens: int = 24,
    chunk: int = 1000,
    preempt_every: int = 0,
    **settings: Any,
) -> Recording:
    """Decode prompts, a new one every third step, and read the recording of it. Settings of the
    engine; chunk: of the recorder; preempt_every: steps, then the youngest request is put back."""
    defaults = {"device": "cpu", "clock": "steps", "device_kv_mib": 1.0, "prefill_chunk": 16}
    config = EngineConfig(**{**defaults, **settings})
    with Engine(config, model) as engine, Recorder(engine, path, chunk) as recorder:
        handles = []
        params = SamplingParams(max_new_tokens=tokens)
        for prompt in prompts:
            handles.append(engine.submit(prompt, params))
            for _ in range(3):
                engine.step()
        while not all(handle.done for handle in handles):
            engine.step()
            running = engine.scheduler.running
            if preempt_every and engine.steps % preempt_every == 0 and len(running) > 1:
                engine.residents.preempt(running[-1], engine.steps)
        record = {**engine.record(), "metrics": engine.metrics()}
        recorder.finish([handle.result() for handle in handles], record)
    return Recording(path)


def prompts(count: int, length: int = 60) -> list[bytes]:
    """Prompts of different texts and lengths."""
    return [bytes((i * 37 + j * j) % 251 for j in range(length + 7 * i)) for i in range(count)]
