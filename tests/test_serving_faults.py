"""What goes wrong around a server: after each of it the server answers, its pool is as at the start, and what
others asked for came out as ever. Engines check their bookkeeping after every step (--validate)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from micro import write_checkpoint
from served import Served, offline, serving

import kvpolicy

CONFIG = """\
device_kv_mib: 1
host_kv_mib: 4
max_concurrency: 4
validate: true
policy:
  controller: adaptive
server:
  max_waiting: 8
  stall_seconds: 1
  max_body_kib: 64
  body_seconds: 1
"""
CONTROLLERS = """\
import time

def raises(observation):
    raise ValueError("no idea")

def sleeps(observation):
    time.sleep(0.2)
"""
PROMPT, LENGTH = "def main(x):\n    ", 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "micro")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    params = kvpolicy.SamplingParams(max_new_tokens=LENGTH)
    tokens: list[int] = offline(model, [PROMPT], [params])[0].tokens
    return tokens


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(CONFIG)
    (path.parent / "mine.py").write_text(CONTROLLERS)
    return path


@pytest.fixture(scope="module")
def running(
    model: Path, config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    options = ("--config", str(config), "--allow-controller-files")
    with serving(model, tmp_path_factory.mktemp("served"), *options) as found:
        yield found


@pytest.fixture
def served(running: Served, expected: list[int]) -> Iterator[Served]:
    """The common server. After each test it answers as ever, and nothing is left."""
    yield running
    running.wait_ready()
    assert running.tokens(PROMPT, max_tokens=LENGTH) == expected
    running.check_settled(restarts=running.policy()["restarts"])


def counter(served: Served, name: str) -> float:
    """The sum of a counter over its labels (as much of them as ``name`` gives)."""
    text = served.http.get("/metrics").text
    lines = re.findall(rf"^kvpolicy_{re.escape(name)}[^ ]* ([0-9.e+]+)$", text, re.MULTILINE)
    return sum(map(float, lines))


async def posted(client: httpx.AsyncClient, **values: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH, "return_token_ids": True}
    return await client.post("/v1/completions", json={**body, **values})


async def streamed(client: httpx.AsyncClient, begun: asyncio.Event, **values: Any) -> list[Any]:
    """The events of a stream, as JSON, without the last line. begun: set at the first of them."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH, "return_token_ids": True}
    events: list[Any] = []
    async with client.stream(
        "POST", "/v1/completions", json={**body, "stream": True, **values}
    ) as answer:
        async for line in answer.aiter_lines():
            begun.set()
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    return events


def tokens_of(events: list[Any]) -> list[int]:
    return [t for e in events for c in e.get("choices", ()) for t in c.get("token_ids", ())]


def test_a_killed_engine_answers_503_and_comes_back_clean(served: Served) -> None:
    restarts = served.policy()["restarts"]

    async def kill() -> tuple[httpx.Response, list[Any]]:
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
            begun = asyncio.Event()
            stream = asyncio.create_task(streamed(client, begun, max_tokens=400))
            whole = asyncio.create_task(posted(client, max_tokens=400))
            await begun.wait()
            pid = (await client.get("/v1/policy")).json()["engine_pid"]
            os.kill(pid, signal.SIGKILL)
            return await whole, await stream

    whole, events = asyncio.run(kill())
    assert whole.status_code == 503 and whole.json()["error"]["code"] == "engine_restarting"
    assert events[-1]["error"]["code"] == "engine_restarting" and len(events) > 1
    served.wait_ready()
    assert served.policy()["restarts"] == restarts + 1
    assert counter(served, "engine_restarts_total") == restarts + 1


def test_a_client_that_never_reads_is_cut_off(served: Served, expected: list[int]) -> None:
    stalled = counter(served, 'clients_lost_total{how="stalled"}')
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 450, "logprobs": 20, "n": 2}
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", served.port))
        raw = json.dumps({**body, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
        assert served.tokens(PROMPT, max_tokens=LENGTH) == expected  # others are served
        served.wait(lambda: counter(served, 'clients_lost_total{how="stalled"}') > stalled, 30)


def test_a_client_that_leaves_frees_its_request(served: Served) -> None:
    cancelled = counter(served, 'requests_total{reason="cancelled"}')
    body = {"prompt": PROMPT, "max_tokens": 450}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.05))
    served.wait(lambda: counter(served, 'requests_total{reason="cancelled"}') > cancelled, 10)
    assert served.pool() == served.start


def flood(served: Served, expected: list[int], count: int, length: int = LENGTH) -> int:
    """``count`` requests at once; how many were refused, each with its tier."""
    rejections = counter(served, "rejections_total")

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=600, limits=limits) as client:
            calls = (posted(client, max_tokens=length) for _ in range(count))
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    refused = [a for a in answers if a.status_code == 429]
    for answer in answers:
        if answer.status_code != 429:
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == expected[:length]
    for answer in refused:
        assert answer.json()["error"]["code"] in ("seats_exhausted", "device_exhausted")
        assert int(answer.headers["retry-after"]) >= 1
    assert counter(served, "rejections_total") == rejections + len(refused)
    return len(refused)


def test_more_than_may_wait_are_refused(served: Served, expected: list[int]) -> None:
    refused = flood(served, expected, 60)
    assert 0 < refused <= 60 - (4 + 8)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_2000_queued_requests(model: Path, expected: list[int], tmp_path: Path) -> None:
    memory = {"device_kv_mib": 2, "host_kv_mib": 8, "max_concurrency": 32}
    config = tmp_path / "serve.yaml"
    config.write_text("server:\n  max_waiting: 2000\n")
    with serving(model, tmp_path, "--config", str(config), **memory) as served:
        assert flood(served, expected, 2000, length=2) == 0
        served.check_settled()


def test_an_exhausted_host_is_named(model: Path, expected: list[int], tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("server:\n  max_waiting: 2\n")
    memory = {"device_kv_mib": 1, "host_kv_mib": 0.03, "max_concurrency": 8}
    with serving(model, tmp_path, "--config", str(config), **memory) as served:
        never = served.complete(PROMPT, max_tokens=490)
        assert never.status_code == 400 and never.json()["error"]["code"] == "host_capacity"

        async def fill() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
                first = [asyncio.create_task(posted(client, max_tokens=40)) for _ in range(4)]
                await asyncio.sleep(0.3)
                late = [await posted(client) for _ in range(3)]
                return [*await asyncio.gather(*first), *late]

        answers = asyncio.run(fill())
        codes = [answer.status_code for answer in answers]
        assert codes[0] == 200 and set(codes) == {200, 429}, codes
        errors = [a.json()["error"]["code"] for a in answers if a.status_code == 429]
        assert set(errors) == {"host_exhausted"}
        assert served.tokens(PROMPT, max_tokens=LENGTH) == expected
        served.check_settled()


def bodies(count: int) -> Iterator[bytes]:
    """Bodies that are almost right: values of other types, fields that are not, bytes cut and changed."""
    draw = random.Random(8)
    odd = [
        None,
        True,
        -1,
        0,
        1.5,
        1e308,
        10**30,
        "",
        "x",
        "\ud800",
        [],
        [[]],
        {},
        [None],
        [300],
        [[1]],
    ]
    fields = ["prompt", "n", "max_tokens", "temperature", "top_p", "stop", "seed", "logprobs"]
    fields += ["stream", "stream_options", "echo", "model", "suffix", "logit_bias", "__class__"]
    for i in range(count):
        body = {"prompt": "x", "max_tokens": 2, "temperature": 0}
        for _ in range(draw.randint(1, 3)):
            body[draw.choice(fields)] = draw.choice(odd)
        raw = bytearray(json.dumps(body).encode())
        match i % 6:
            case 1:
                del raw[draw.randrange(len(raw)) :]
            case 2:
                raw[draw.randrange(len(raw))] = draw.randrange(256)
            case 3:
                raw = bytearray(draw.randbytes(draw.randrange(200)))
            case 4 if i % 12 == 4:
                raw = bytearray(b"[" * 5000 + b"]" * draw.randrange(5000))
            case 5 if i % 18 == 5:
                raw = bytearray(b'{"prompt": "x", "n": ' + b"9" * 6000 + b"}")
        yield bytes(raw)


def test_300_malformed_bodies(served: Served) -> None:
    refused = 0
    kinds = {"content-type": "application/json"}
    for raw in bodies(300):
        for path in ("/v1/completions",) if refused % 3 else ("/v1/chat/completions", "/v1/policy"):
            method = "PUT" if path == "/v1/policy" else "POST"
            answer = served.http.request(method, path, content=raw, headers=kinds)
            if method == "PUT" and answer.status_code == 200:
                assert raw.strip() == b"{}"
                continue
            assert answer.status_code in (200, 400, 404), (raw, answer.text)
            if answer.status_code != 200:
                refused += 1
                error = answer.json()["error"]
                assert {"message", "type", "param", "code"} == set(error), error
                assert len(error["message"]) < 500
    assert refused > 200


def test_what_is_no_http_or_too_long_or_too_slow_is_refused(served: Served) -> None:
    long = served.complete("x" * (65 << 10))
    assert long.status_code == 413 and long.json()["error"]["code"] == "body_too_large"
    plain = served.http.post(
        "/v1/completions", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert plain.status_code == 415
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for raw, status in (
        (b"\x16\x03\x01\x02\x00\x01\x00 no TLS here\r\n\r\n", b"400"),
        (head + b"Content-Length: 100\r\n\r\n{", b"408"),
        (head, None),  # no end of the head: cut off
        (head + b"Transfer-Encoding: chunked\r\n\r\n" + b"8000\r\n" + b"x" * 0x8000 + b"\r\n", b""),
    ):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
            client.sendall(raw)
            if status is None:
                assert client.recv(1000) == b""
                continue
            if not status:
                client.sendall((b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 2)
                status = b"413"
            assert client.recv(1000).split()[1:2] == [status]


@pytest.mark.parametrize("name", ["raises", "sleeps"])
def test_a_controller_that_fails_changes_no_token(
    served: Served, config: Path, expected: list[int], name: str
) -> None:
    before = served.policy()
    answer = served.swap(controller=f"{config.parent / 'mine.py'}:{name}", control_interval=1)
    assert answer.status_code == 200, answer.text
    assert served.tokens(PROMPT, max_tokens=LENGTH) == expected
    assert served.policy()["fallbacks"] > before["fallbacks"]
    back = served.swap(controller="adaptive", control_interval=before["control_interval"])
    assert back.json()["changed"] == ["controller", "control_interval"]


@pytest.mark.parametrize(
    "broken", ["policy: [", "policy: {controller: adaptiv}", "max_concurrency: 5", "polcy: {}"]
)
def test_a_broken_config_on_reload_changes_nothing(
    served: Served, config: Path, broken: str
) -> None:
    before = {k: v for k, v in served.policy().items() if k in ("controller", "eviction")}
    refused = counter(served, 'policy_swaps_total{origin="reload",outcome="refused"}')
    config.write_text(broken if "policy" in broken else f"{CONFIG}\n{broken}\n")
    try:
        os.kill(served.process.pid, signal.SIGHUP)
        name = 'policy_swaps_total{origin="reload",outcome="refused"}'
        served.wait(lambda: counter(served, name) == refused + 1, 20)
        assert before.items() <= served.policy().items()
        assert "SIGHUP: the policy stays as it is: " in served.err.read_text()
    finally:
        config.write_text(CONFIG)


def test_a_good_config_on_reload_swaps(served: Served, config: Path) -> None:
    try:
        config.write_text(
            CONFIG.replace("adaptive", "static\n  parameters: {device_buffer_rows: 30}")
        )
        os.kill(served.process.pid, signal.SIGHUP)
        wanted = "static:device_buffer_rows=30"
        served.wait(lambda: served.policy()["controller"] == wanted, 20)
    finally:
        config.write_text(CONFIG)


def test_a_deadline_ends_a_request(served: Served) -> None:
    answer = served.complete(PROMPT, max_tokens=450, deadline_ms=50)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"


def test_sigterm_under_load_ends_what_runs(
    model: Path, config: Path, expected: list[int], tmp_path: Path
) -> None:
    with serving(model, tmp_path, "--config", str(config)) as served:
        pid = served.policy()["engine_pid"]

        async def drain() -> tuple[list[list[Any]], httpx.Response | None]:
            async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
                begun = [asyncio.Event() for _ in range(5)]
                streams = [asyncio.create_task(streamed(client, event)) for event in begun]
                await begun[0].wait()
                os.kill(served.process.pid, signal.SIGTERM)
                await asyncio.sleep(0.3)
                late = None
                with contextlib.suppress(httpx.TransportError):
                    late = await client.get("/ready")
                return await asyncio.gather(*streams), late

        found, late = asyncio.run(drain())
        assert [tokens_of(events) for events in found] == [expected] * 5
        assert late is None or late.status_code == 503
        assert served.process.wait(20) == 0
        until = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()


def test_what_is_not_done_by_the_end_of_the_drain_is_told(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("device_kv_mib: 1\nhost_kv_mib: 4\nserver:\n  drain_seconds: 0.2\n")
    with serving(model, tmp_path, "--config", str(config)) as served:

        async def drain() -> tuple[httpx.Response, list[Any]]:
            async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
                begun = asyncio.Event()
                stream = asyncio.create_task(streamed(client, begun, max_tokens=450))
                whole = asyncio.create_task(posted(client, max_tokens=450))
                await begun.wait()
                os.kill(served.process.pid, signal.SIGINT)
                return await whole, await stream

        whole, events = asyncio.run(drain())
        assert whole.status_code == 503 and whole.json()["error"]["code"] == "draining"
        assert events[-1]["error"]["code"] == "draining"
        assert served.process.wait(20) == 130
        assert "Traceback" not in served.err.read_text()
