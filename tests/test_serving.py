"""The server with OpenAI's own client: streams, cancels and swaps, bit for bit what the engine gives."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from micro import write_checkpoint
from served import Served, offline, serving

import kvpolicy

MEMORY = {"device_kv_mib": 1.0, "host_kv_mib": 4.0, "max_concurrency": 8}
POLICIES: tuple[dict[str, Any], ...] = (
    {"controller": "static", "parameters": {"device_buffer_rows": 24}},
    {"controller": "resident"},
    {"controller": "adaptive", "eviction": "lru", "control_interval": 2},
    {"controller": "hisparse", "eviction": None},
    {"controller": "random:seed=3", "control_interval": 1},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "micro")


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    logs = ("--logdir", str(folder / "logs"), "--validate")
    with serving(model, folder, *logs, **MEMORY) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def cases(count: int, length: int) -> tuple[list[bytes], list[kvpolicy.SamplingParams]]:
    """Prompts of different lengths; every second one is sampled."""
    prompts = [f"request {i}: {'x' * (i * 7 % 60)}".encode() for i in range(count)]
    params = [
        kvpolicy.SamplingParams(max_new_tokens=length, temperature=float(i % 2), top_p=0.9, seed=i)
        for i in range(count)
    ]
    return prompts, params


async def stream(
    client: openai.AsyncOpenAI,
    model: str,
    prompt: bytes,
    params: kvpolicy.SamplingParams,
    most: int,
) -> tuple[list[int], str, str | None]:
    """Tokens, text and finish reason; the client leaves after ``most`` tokens."""
    tokens: list[int] = []
    text, reason = "", None
    events = await client.completions.create(
        model=model,
        prompt=prompt.decode(),
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        seed=params.seed,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    async with events:
        async for event in events:
            choice = event.choices[0]
            tokens += getattr(choice, "token_ids", None) or []
            text += choice.text
            reason = choice.finish_reason or reason
            if len(tokens) >= most:
                break
    return tokens, text, reason


async def swap_on(client: openai.AsyncOpenAI, count: int, until: asyncio.Event) -> int:
    """Swap the policy over and over, ``count`` times at least, as long as requests run."""
    for done, policy in enumerate(itertools.cycle(POLICIES)):
        answer = await client.put("/policy", cast_to=dict[str, Any], body=policy)
        assert answer["controller"].startswith(policy["controller"])
        if done >= count and until.is_set():
            return done
        await asyncio.sleep(0.02)
    raise AssertionError


def drive(served: Served, model: Path | str, count: int, length: int, swaps: int) -> None:
    """``count`` streams at once, every fourth cancelled on the way, under swaps of the policy."""
    prompts, params = cases(count, length)
    names = [Path(model).name] * count
    leaves = [length // 3 if i % 4 == 3 else length + 1 for i in range(count)]

    async def all_of_it() -> tuple[list[Any], int]:
        limits = openai.DefaultAsyncHttpxClient(timeout=240)
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="any", max_retries=0, http_client=limits
        ) as client:
            over = asyncio.Event()
            swapping = asyncio.create_task(swap_on(client, swaps, over))
            found = await asyncio.gather(
                *map(stream, [client] * count, names, prompts, params, leaves)
            )
            over.set()
            return found, await swapping

    found, done = asyncio.run(all_of_it())
    assert done >= swaps
    expected = offline(model, prompts, params)
    for i, ((tokens, text, reason), alone) in enumerate(zip(found, expected, strict=True)):
        if leaves[i] > length:
            assert (tokens, text, reason) == (alone.tokens, alone.text, alone.finish_reason), i
        else:
            assert tokens == alone.tokens[: len(tokens)] and len(tokens) >= min(
                leaves[i], len(alone.tokens)
            ), i
    served.check_settled()


def test_streams_with_cancels_and_swaps_are_the_offline_engine_bit_for_bit(
    served: Served, model: Path
) -> None:
    drive(served, model, count=12, length=24, swaps=20)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_64_streams_of_the_embedded_model(tmp_path: Path) -> None:
    settings = {"device_kv_mib": 24.0, "host_kv_mib": 256.0, "max_concurrency": 64}
    with serving("tiny-dsa", tmp_path, **settings) as served:
        drive(served, "tiny-dsa", count=64, length=48, swaps=20)
