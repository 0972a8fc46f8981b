"""The server with OpenAI's own client: streams, cancels and swaps, bit for bit what the engine gives."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from micro import write_checkpoint
from served import Served, offline, serving
from typer.testing import CliRunner

import kvpolicy
from kvpolicy.cli.main import app
from kvpolicy.workloads import make

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
        limits = openai.DefaultAsyncHttpxClient(timeout=600)
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


def test_chat_with_the_client(client: openai.OpenAI, model: Path) -> None:
    """Streamed and whole, they are the same text; n answers have seeds of their own; usage adds up."""
    ask: dict[str, Any] = {
        "model": "micro",
        "messages": [{"role": "user", "content": "grüße"}],
        "max_completion_tokens": 12,
        "temperature": 1.5,
        "seed": 5,
        "n": 2,
    }
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    texts, reasons = ["", ""], ["", ""]
    usage = None
    stream = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    prompt = "user: grüße\n\nassistant:".encode()
    params = [kvpolicy.SamplingParams(max_new_tokens=12, temperature=1.5, seed=s) for s in (5, 6)]
    alone = offline(model, [prompt, prompt], params)
    assert [output.text for output in alone] == texts and texts[0] != texts[1]
    assert usage == whole.usage and usage is not None and usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens == sum(len(output.tokens) for output in alone)
    for choice, output in zip(whole.choices, alone, strict=True):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        bytes_of = [entry.bytes for entry in choice.logprobs.content]
        assert bytes_of == [[t] if t < 256 else [] for t in output.tokens]
        for entry in choice.logprobs.content:
            best = [one.logprob for one in entry.top_logprobs]
            assert best == sorted(best, reverse=True) and entry.logprob <= best[0] <= 0


def test_completions_with_the_client(client: openai.OpenAI, model: Path) -> None:
    """Lists of prompts, token ids, stop, echo, logprobs, fingerprints."""
    prompts = [list(b"one"), [*b"two", 256]]
    params = kvpolicy.SamplingParams(max_new_tokens=16)
    alone = offline(model, prompts, [params] * 2)
    stop = bytes(t for t in alone[0].tokens if 32 < t < 127).decode()[1]
    extra = {"return_token_ids": True, "fingerprint": True}
    answer = client.completions.create(
        model="micro",
        prompt=prompts,
        max_tokens=16,
        temperature=0,
        logprobs=3,
        extra_body=extra,
    )
    for choice, output in zip(answer.choices, alone, strict=True):
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"] == output.tokens
        assert choice.model_extra["logits_sha256"] == output.logits_sha256
        assert choice.text == output.text and choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.top_logprobs is not None
        for logprob, top in zip(
            choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
        ):
            assert logprob == max(top.values())  # greedy
    cut = client.completions.create(
        model="micro", prompt="one", max_tokens=16, temperature=0, stop=stop, echo=True
    )
    expected = offline(model, [b"one"], [params.model_copy(update={"stop": (stop,)})])[0]
    assert cut.choices[0].text == "one" + expected.text
    assert cut.choices[0].finish_reason == expected.finish_reason == "stop"


def test_errors_reach_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="micro", prompt="x", temperature=-1)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.NotFoundError):
        client.get("/nothing", cast_to=object)
    assert [model.id for model in client.models.list()] == ["micro"]
    assert client.models.retrieve("micro").owned_by == "kvpolicy"


def test_the_policy_is_shown_and_refused_by_name(served: Served) -> None:
    assert served.swap(controller="static:device_buffer_rows=40", eviction="lru").status_code == 200
    shown = served.policy()
    assert shown["name"] == "static" and shown["eviction"] == "lru"
    assert {"decisions", "projections", "fallbacks", "shadows"} <= set(shown)
    for body in ({"controller": "statik"}, {"controler": "static"}, {"controller": "x.py:Y"}):
        answer = served.http.put("/v1/policy", json=body)
        assert answer.status_code == 400 and "stays as it is" in answer.json()["error"]["message"]
    after = served.policy()
    assert (after["controller"], after["eviction"]) == ("static:device_buffer_rows=40", "lru")


def test_metrics_and_events(served: Served) -> None:
    """What Prometheus and TensorBoard are told agrees with what was done."""
    from prometheus_client.parser import text_string_to_metric_families
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    before = served.policy()["sample"]["generated_tokens"]
    made = len(served.tokens("metrics", max_tokens=20))
    answer = served.http.get("/metrics")
    families = {f.name: f for f in text_string_to_metric_families(answer.text)}
    value = {name: family.samples[0].value for name, family in families.items() if family.samples}
    assert value["kvpolicy_generated_tokens"] == before + made
    assert value["kvpolicy_device_free_bytes"] == served.start["free_bytes"]
    assert value["kvpolicy_engine_up"] == 1 and 0 < value["kvpolicy_miss_rate"] < 1
    swaps = {tuple(s.labels.values()): s.value for s in families["kvpolicy_policy_swaps"].samples}
    assert swaps["put", "done"] >= 21 and swaps["put", "refused"] >= 3
    assert families["kvpolicy_ttft_seconds"].samples
    logs = served.err.parent / "logs"
    served.swap(controller="adaptive")
    served.wait(lambda: "load/running" in _reloaded(EventAccumulator, logs).Tags()["scalars"], 20)
    found = _reloaded(EventAccumulator, logs)
    assert len(found.Tensors("policy/swaps/text_summary")) >= 5
    assert {"misses/of_unique_rows", "memory/free_mib"} <= set(found.Tags()["scalars"])


def _reloaded(kind: Any, folder: Path) -> Any:
    found = kind(str(folder))
    found.Reload()
    return found


def test_a_load_over_http_is_the_load_in_process(
    served: Served, model: Path, tmp_path: Path
) -> None:
    """The same requests, token for token and logit for logit, and a report in the same words."""
    uri = "synthetic:step?low=1&high=3&duration=1&prompt_bytes=20-40&output_tokens=8&text=heldout"
    output = tmp_path / "load.json"
    arguments = ["load", served.url, "--workload", uri, "--fingerprint", "--output", str(output)]
    result = CliRunner().invoke(app, [*arguments, "--slo", "tpot_ms=1000,ttft_ms=5000"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "goodput:" in result.stdout and "high: 3 requests at a time" in result.stdout
    found = json.loads(output.read_text())["results"][0]
    assert found["errors"] == {} and found["metrics"]["goodput_tokens_per_s"] > 0
    assert found["metrics"]["tpot_ms"]["p50"] > 0 and len(found["phases"]) == 4
    made = [request["logits_sha256"] for request in found["requests"]]
    arrivals = itertools.islice(make(uri).requests(), len(made))
    params = kvpolicy.SamplingParams(max_new_tokens=8)
    alone = offline(model, [a.prompt for a in arrivals], [params] * len(made))
    assert made == [one.logits_sha256 for one in alone]
    served.check_settled()


def test_a_load_against_nothing_is_one_line() -> None:
    for url, part in (
        ("http://127.0.0.1:9", "127.0.0.1:9"),
        ("ftp://x", "must be http://HOST:PORT"),
        ("http://x:y", "URL"),
    ):
        result = CliRunner().invoke(app, ["load", url, "--workload", "synthetic:poisson"])
        assert result.exit_code == 2 and part in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.full
@pytest.mark.timeout(900)
def test_64_streams_of_the_embedded_model(tmp_path: Path) -> None:
    settings = {"device_kv_mib": 24.0, "host_kv_mib": 256.0, "max_concurrency": 64}
    with serving("tiny-dsa", tmp_path, **settings) as served:
        drive(served, "tiny-dsa", count=64, length=24, swaps=20)
