"""A server of `kvpolicy serve` in a process of its own, and what tests ask of it. Every wait is bounded."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

import kvpolicy

START_SECONDS = 90.0
SECONDS = 60.0
_MAIN = "from kvpolicy.cli.start import main; main()"
POOL = ("running", "waiting", "required_bytes", "optional_bytes", "free_bytes")
USED = ("memory_host_used_bytes", "memory_host_free_bytes", "memory_index_keys_bytes")


class Served:
    """One running server. start: its pool before anything was asked of it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, err: Path) -> None:
        self.process = process
        self.url = url
        self.err = err
        self.http = httpx.Client(base_url=url, timeout=SECONDS)
        self.start = self.pool()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def policy(self) -> dict[str, Any]:
        answer = self.http.get("/v1/policy")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def pool(self) -> dict[str, Any]:
        """The pool split, and how many requests there are."""
        policy = self.policy()
        sample = policy["sample"]
        return {name: sample[name] for name in (*POOL, *USED)} | {"pending": policy["pending"]}

    def swap(self, **policy: Any) -> httpx.Response:
        return self.http.put("/v1/policy", json=policy)

    def complete(self, prompt: Any, **values: Any) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **values}
        return self.http.post("/v1/completions", json=body)

    def tokens(self, prompt: Any, **values: Any) -> list[int]:
        answer = self.complete(prompt, **values)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def wait(self, what: Callable[[], bool], seconds: float = SECONDS) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                if what():
                    return
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds:g} s; {self.err.read_text()[-2000:]}")

    def wait_ready(self) -> None:
        self.wait(lambda: self.http.get("/ready").status_code == 200)

    def check_settled(self, restarts: int = 0) -> None:
        """The server answers, nothing of what was asked is left, and no engine broke (each one checks
        its bookkeeping after every step)."""
        self.wait_ready()
        self.wait(lambda: self.pool() == self.start, 20)
        assert self.policy()["restarts"] == restarts, self.err.read_text()[-2000:]

    def close(self) -> int:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextlib.contextmanager
def serving(model: Path | str, folder: Path, *options: str, **settings: Any) -> Iterator[Served]:
    """`kvpolicy serve` on a free port. settings: --set KEY=VALUE."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["serve", "--port", "0", "--device", "cpu", "--model", str(model), *options]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    err = folder / "stderr"
    with err.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stream,
        )
    try:
        url = _url(process, err)
        served = Served(process, url, err)
        yield served
        served.close()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def _url(process: subprocess.Popen[bytes], err: Path) -> str:
    import select

    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    line = process.stdout.readline().decode() if ready else ""
    found = re.search(r"http://\S+:\d+", line)
    assert found, f"no address: {line!r}; {err.read_text()[-3000:]}"
    return found[0]


def offline(
    model: Path | str, prompts: Sequence[Any], params: Sequence[kvpolicy.SamplingParams]
) -> list[Any]:
    """What an engine in this process makes of the same prompts, everything resident."""
    config = kvpolicy.EngineConfig(
        model=str(model), device="cpu", controller="resident", device_kv_mib=128
    )
    with kvpolicy.Engine(config) as engine:
        return list(engine.generate(prompts, params))
