"""A server of `kvpolicy serve` under load: what HTTP costs, and how it holds out.

    python -P benchmarks/serving.py overhead --output FILE             # about 150 s on a GPU
    python -P benchmarks/serving.py soak --seconds 480 --output FILE

`overhead` decodes one workload, 64 requests kept in flight, by turns with an engine in this process and
with `kvpolicy load` against a server, both as they ship, and compares tokens/s as the client sees them.
`soak` keeps 96 requests in flight on 64 seats, swaps the policy, lets clients leave, and watches memory. Exit
code 1 if an output differs, a request fails, an engine was replaced or a pool is not as at the start.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.telemetry.latency import Latencies, percentiles_ms
from kvpolicy.workloads import make
from kvpolicy.workloads.runner import Runner

KVPOLICY = [sys.executable, "-P", "-c", "from kvpolicy.cli.start import main; main()"]
WARM_SECONDS = 1.0  # of a turn of `overhead`, not counted
WARM_SHARE = 0.125  # of a soak, before slopes are fitted
SAMPLE_SECONDS = 2.0
LEAVE_SECONDS = 0.5  # between two clients that leave
POLICIES: tuple[dict[str, Any], ...] = (
    {"controller": "static:device_buffer_rows=192", "eviction": "lru"},
    {"controller": "hisparse:device_buffer_rows=256", "eviction": None},
    {"controller": "resident", "control_interval": 4},
    {"controller": "random:seed=1", "eviction": "clock", "control_interval": 16},
    {"controller": "hybrid"},
    {"controller": "adaptive", "eviction": None, "control_interval": 8},
)


def settings(options: argparse.Namespace, mib: float) -> dict[str, Any]:
    """Of the engine, here and in the server."""
    return {
        "model": "tiny-dsa",
        "device": options.device,
        "max_concurrency": options.seats,
        "device_kv_mib": mib,
        "host_kv_mib": 1024.0,
    }


def uri(level: int, seconds: float, options: argparse.Namespace) -> str:
    """``level`` requests in flight for so many seconds (the three phases are alike)."""
    lengths = f"prompt_bytes=64-256&output_tokens={options.tokens}&text=heldout"
    return f"synthetic:step?low={level}&high={level}&duration={seconds / 3:g}&{lengths}"


# --- a server -------------------------------------------------------------------------------------


class Server:
    """`kvpolicy serve` in a process of its own, on a free port."""

    def __init__(self, folder: Path, values: dict[str, Any], *options: str) -> None:
        arguments = ["serve", "--port", "0", *options]
        arguments += [a for key, value in values.items() for a in ("--set", f"{key}={value}")]
        self.err = folder / "serve.err"
        with self.err.open("wb") as stream:
            self.process = subprocess.Popen(
                [*KVPOLICY, *arguments], stdout=subprocess.PIPE, stderr=stream, text=True
            )
        self.port = 0

    def wait(self) -> None:
        """Until it takes requests."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r":(\d+)/v1", line)
        if found is None:
            sys.exit(f"no server: {line!r} {self.err.read_text()[-2000:]}")
        self.port = int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            raw = None if body is None else json.dumps(body)
            connection.request(method, path, raw, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def policy(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call("GET", "/v1/policy")[1])
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return -9


@contextlib.contextmanager
def load(server: Server, folder: Path, workload: str) -> Iterator[subprocess.Popen[bytes]]:
    """`kvpolicy load`, which writes load.json; ended with the block."""
    output = folder / "load.json"
    output.unlink(missing_ok=True)
    arguments = [*KVPOLICY, "load", server.url, "--workload", workload, "--fingerprint"]
    with (folder / "load.err").open("wb") as stream:
        process = subprocess.Popen(
            [*arguments, "--output", str(output)], stdout=stream, stderr=stream
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def loaded(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> dict[str, Any]:
    """What a load measured, once it has ended."""
    process.wait(seconds)
    output = folder / "load.json"
    if not output.exists():
        sys.exit(f"no result of the load: {(folder / 'load.err').read_text()[-2000:]}")
    found: dict[str, Any] = json.loads(output.read_text())["results"][0]
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


# --- overhead -------------------------------------------------------------------------------------


def rate(moments: Sequence[Latencies], seconds: float) -> float:
    """Tokens/s that the client saw while the level was kept, without the first moment."""
    start = min(one.arrived for one in moments)
    begin, end = start + min(WARM_SECONDS, seconds / 4), start + seconds
    return sum(one.tokens_between(begin, end) for one in moments) / (end - begin)


def in_process(engine: Engine, workload: str, seconds: float) -> dict[str, Any]:
    """One turn of the engine in this process."""
    steps, busy, cpu = engine.totals.decode_steps, engine.totals.busy_seconds, time.process_time()
    made = engine.totals.generated_tokens
    result = Runner(engine, make(workload, "wall"), SamplingParams()).run()
    made = engine.totals.generated_tokens - made
    steps = engine.totals.decode_steps - steps
    moments = [output.latencies for output in result.outputs]
    return {
        "tokens_per_s": rate(moments, seconds),
        "tokens_per_step": made / steps,
        "busy_ms_per_step": (engine.totals.busy_seconds - busy) / steps * 1e3,
        "cpu_us_per_token": {"engine": (time.process_time() - cpu) / made * 1e6},
        "ttft_ms": percentiles_ms([one.ttft for one in moments if one.ttft is not None]),
        "tpot_ms": percentiles_ms([one.tpot for one in moments if one.tpot is not None]),
        "digests": [output.logits_sha256 for output in result.outputs],
    }


def over_http(server: Server, folder: Path, workload: str, seconds: float) -> dict[str, Any]:
    """One turn of `kvpolicy load` against the server."""
    before = server.policy()
    pids = {"server": server.process.pid, "engine": int(before["engine_pid"])}
    cpu = {name: cpu_seconds(pid) for name, pid in pids.items()}
    with load(server, folder, workload) as process:
        found = loaded(process, folder, seconds * 3 + 60)
    after = server.policy()
    gained = {
        name: after["sample"][name] - before["sample"][name]
        for name in ("generated_tokens", "decode_steps", "busy_seconds")
    }
    made, steps = gained["generated_tokens"], gained["decode_steps"]
    if not made:
        sys.exit(f"nothing was answered: {found['errors']} {server.err.read_text()[-2000:]}")
    moments = moments_of(found)
    return {
        "tokens_per_s": rate(moments, seconds),
        "tokens_per_step": made / steps,
        "busy_ms_per_step": gained["busy_seconds"] / steps * 1e3,
        "cpu_us_per_token": {n: (cpu_seconds(p) - cpu[n]) / made * 1e6 for n, p in pids.items()},
        "ttft_ms": found["metrics"]["ttft_ms"],
        "tpot_ms": found["metrics"]["tpot_ms"],
        "errors": found["errors"],
        "digests": [request["logits_sha256"] for request in found["requests"]],
    }


def moments_of(found: dict[str, Any]) -> list[Latencies]:
    """When things happened to the requests of a load."""
    columns = [found["latencies"][name] for name in ("arrived", "first_token", "last_token")]
    tokens = [len(request["tokens"]) for request in found["requests"]]
    each = zip(*columns, tokens, strict=True)
    return [Latencies(came, None, first, last, None, count) for came, first, last, count in each]


def differing(turns: Sequence[dict[str, Any]]) -> int:
    """Requests whose logits were not the same in all turns (a turn has as many as fit in its time)."""
    groups = itertools.zip_longest(*(turn.pop("digests") for turn in turns))
    return sum(len({digest for digest in group if digest}) > 1 for group in groups)


def overhead(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    began = time.monotonic()
    values = settings(options, options.device_kv_mib or 256.0)
    server = Server(folder, values)
    try:
        with Engine(EngineConfig(**values)) as engine:
            in_process(engine, uri(options.seats, 1.5, options), 1.5)  # captures, warms up
            server.wait()
            over_http(server, folder, uri(options.seats, 1.5, options), 1.5)
            started = time.monotonic() - began
            print(f"ready after {started:.0f} s", flush=True)
            turns = take_turns(options, engine, server, folder, began)
            record = engine.record()
    finally:
        code = server.stop()
    result = {
        **compared(turns),
        "started_seconds": started,
        "turns": turns,
        "requests_that_differ": differing([turn for turn in turns if "digests" in turn]),
        "exit_code": code,
        "server_log": server.err.read_text()[-2000:],
        "record": record,
    }
    errors = any(turn.get("errors") for turn in turns)
    return result, not (errors or code or result["requests_that_differ"])


def take_turns(
    options: argparse.Namespace, engine: Engine, server: Server, folder: Path, began: float
) -> list[dict[str, Any]]:
    """Both ways by turns, the order reversed each time; after these, once with 9 requests for 8 seats."""
    turns: list[dict[str, Any]] = []
    more = options.seats * 9 // 8
    levels = [options.seats] * options.rounds + [more] * max(1, options.rounds // 3)
    for number, level in enumerate(levels):
        if time.monotonic() - began > options.limit - 3 * options.seconds:
            print("no time for more", flush=True)
            break
        workload = uri(level, options.seconds, options)
        for way in ("in_process", "http")[:: 1 if number % 2 else -1]:
            if way == "http":
                found = over_http(server, folder, workload, options.seconds)
            else:
                found = in_process(engine, workload, options.seconds)
            turns.append({"way": way, "in_flight": level, **found})
            shown = {k: v for k, v in turns[-1].items() if k != "digests"}
            print(f"{time.monotonic() - began:6.1f} s {json.dumps(shown)}", flush=True)
    return turns


def compared(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians by level and way, and what HTTP costs."""
    found: dict[str, Any] = {}
    for level in sorted({turn["in_flight"] for turn in turns}):
        rates = {
            way: [t["tokens_per_s"] for t in turns if (t["way"], t["in_flight"]) == (way, level)]
            for way in ("in_process", "http")
        }
        medians = {way: statistics.median(values) for way, values in rates.items() if values}
        found[f"{level}_in_flight"] = {"tokens_per_s": rates, "median": medians}
        if len(medians) == 2:
            percent = 100 * (1 - medians["http"] / medians["in_process"])
            found[f"{level}_in_flight"]["overhead_percent"] = percent
    return found


# --- soak -----------------------------------------------------------------------------------------


def expected_digests(values: dict[str, Any], workload: str, count: int) -> list[str]:
    """What the first requests of a workload give in an engine of this process, all resident."""
    arrivals = list(itertools.islice(make(workload, "wall").requests(), count))
    config = EngineConfig(**{**values, "controller": "resident", "device_kv_mib": 512.0})
    with Engine(config) as engine:
        outputs = engine.generate(
            [one.prompt for one in arrivals],
            [SamplingParams(max_new_tokens=one.max_new_tokens, seed=one.seed) for one in arrivals],
        )
    return [output.logits_sha256 for output in outputs]


class Leavers(threading.Thread):
    """Clients that begin a stream and leave in the middle of it, one after the other. count: how many."""

    def __init__(self, server: Server) -> None:
        super().__init__(name="leavers", daemon=True)
        self.count = 0
        self.errors: Counter[str] = Counter()
        self._server = server
        self.over = threading.Event()

    def run(self) -> None:
        body = {"prompt": "def leave(", "max_tokens": 400, "stream": True, "temperature": 1}
        while not self.over.wait(LEAVE_SECONDS):
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
            with contextlib.closing(connection):
                try:
                    kind = {"Content-Type": "application/json"}
                    connection.request("POST", "/v1/completions", json.dumps(body), kind)
                    answer = connection.getresponse()
                    if answer.status != 200:
                        self.errors[str(answer.status)] += 1
                    answer.read(200 * (1 + self.count % 20))
                    self.count += 1
                except OSError as error:
                    self.errors[type(error).__name__] += 1


def sample(server: Server, began: float) -> dict[str, float]:
    """Memory of everything at this moment."""
    policy = server.policy()
    own = policy["sample"]
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    engine = int(policy["engine_pid"])
    return {
        "seconds": time.monotonic() - began,
        "server_rss_mib": resident_mib(server.process.pid),
        "engine_rss_mib": resident_mib(engine),
        "gpu_used_mib": (total - free) / 2**20,
        "server_files": len(os.listdir(f"/proc/{server.process.pid}/fd")),
        "engine_files": len(os.listdir(f"/proc/{engine}/fd")),
        **{name: own[name] for name in ("running", "waiting", "generated_tokens", "preemptions")},
        **{f"pool_{n}_mib": own[f"{n}_bytes"] / 2**20 for n in ("required", "optional", "free")},
        "host_used_mib": own["memory_host_used_bytes"] / 2**20,
        "fallbacks": own["fallbacks"],
        "pending": policy["pending"],
        "restarts": policy["restarts"],
    }


def watch(
    options: argparse.Namespace, server: Server, process: subprocess.Popen[bytes]
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Sample and swap until the load ends."""
    began = time.monotonic()
    samples: list[dict[str, float]] = []
    swaps: list[dict[str, Any]] = []
    policies = itertools.cycle(POLICIES)
    while process.poll() is None:
        now = time.monotonic() - began
        if now > options.seconds * 1.5 + 60:
            break
        samples.append(sample(server, began))
        due = options.seconds / (options.swaps + 1) * (len(swaps) + 1)
        if len(swaps) < options.swaps and now >= due:
            policy = next(policies)
            asked = time.monotonic()
            status, _ = server.call("PUT", "/v1/policy", policy)
            took = (time.monotonic() - asked) * 1e3
            swaps.append({"seconds": now, "policy": policy, "status": status, "took_ms": took})
        if len(samples) % 15 == 1:
            print(json.dumps(samples[-1]), flush=True)
        time.sleep(max(0.05, SAMPLE_SECONDS - (time.monotonic() - began - now)))
    return samples, swaps


def flat(samples: Sequence[dict[str, float]], seconds: float) -> dict[str, Any]:
    """By column: slope after the warm-up, by least squares, and medians of the first and last quarter."""
    kept = [s for s in samples if seconds * WARM_SHARE <= s["seconds"] <= seconds]
    if len(kept) < 8:
        return {}
    found: dict[str, Any] = {}
    minutes = np.array([s["seconds"] for s in kept]) / 60
    quarter = len(kept) // 4
    for name in (
        "server_rss_mib",
        "engine_rss_mib",
        "gpu_used_mib",
        "server_files",
        "engine_files",
    ):
        values = np.array([s[name] for s in kept])
        found[name] = {
            "slope_per_minute": float(np.polyfit(minutes, values, 1)[0]),
            "first_quarter": float(np.median(values[:quarter])),
            "last_quarter": float(np.median(values[-quarter:])),
            "most": float(values.max()),
        }
    pool = [s["pool_required_mib"] + s["pool_optional_mib"] + s["pool_free_mib"] for s in kept]
    found["pool_total_mib"] = {"least": min(pool), "most": max(pool)}
    return found


def by_thirds(moments: Sequence[Latencies]) -> list[dict[str, Any]]:
    """Latencies of the requests that came in each third of the run."""
    start, end = min(one.arrived for one in moments), max(one.arrived for one in moments)
    found = []
    for third in range(3):
        low, high = (start + (end - start) * edge / 3 for edge in (third, third + 1))
        own = [one for one in moments if low <= one.arrived <= high]
        found.append(
            {
                "requests": len(own),
                "ttft_ms": percentiles_ms([one.ttft for one in own if one.ttft is not None]),
                "tpot_ms": percentiles_ms([one.tpot for one in own if one.tpot is not None]),
            }
        )
    return found


def pool(server: Server) -> dict[str, Any]:
    """All that must be at the end as it was at the start."""
    policy = server.policy()
    names = ("running", "waiting", "required_bytes", "optional_bytes", "free_bytes")
    own = {name: policy["sample"][name] for name in (*names, "memory_host_used_bytes")}
    return {**own, "pending": policy["pending"]}


def soak(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    began = time.monotonic()
    values = settings(options, options.device_kv_mib or 48.0)
    workload = uri(options.seats * 3 // 2, options.seconds, options)
    server = Server(folder, values, "--logdir", str(folder / "logs"))
    try:
        expected = expected_digests(values, workload, options.compare)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        server.wait()
        print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
        start, leavers = pool(server), Leavers(server)
        leavers.start()
        with load(server, folder, workload) as process:
            samples, swaps = watch(options, server, process)
            leavers.over.set()
            leavers.join(70)
            found = loaded(process, folder, 60)
        until = time.monotonic() + 20
        while (end := pool(server)) != start and time.monotonic() < until:
            time.sleep(0.2)
        metrics = server.call("GET", "/metrics")[1].decode()
        record = server.policy()["record"]
    finally:
        code = server.stop()
    moments = moments_of(found)
    made = [request["logits_sha256"] for request in found["requests"]]
    differ = sum(a != b for a, b in zip(made, expected, strict=False))
    first, last = min(one.arrived for one in moments), max(one.last_token or 0 for one in moments)
    result = {
        "workload": workload,
        "seconds": last - first,
        "requests": len(made),
        "tokens": sum(one.tokens for one in moments),
        "tokens_per_s": rate(moments, options.seconds),
        "ttft_ms": found["metrics"]["ttft_ms"],
        "tpot_ms": found["metrics"]["tpot_ms"],
        "thirds": by_thirds(moments),
        "miss_rate": found["metrics"]["miss_rate"],
        "errors": {**found["errors"], **leavers.errors},
        "clients_that_left": leavers.count,
        "swaps": len(swaps),
        "swaps_done": sum(swap["status"] == 200 for swap in swaps),
        "swap_ms": percentiles_ms([swap["took_ms"] / 1e3 for swap in swaps]),
        "compared_with_the_offline_engine": min(len(made), len(expected)),
        "requests_that_differ": differ,
        "pool_as_at_the_start": end == start,
        "restarts": samples[-1]["restarts"],
        "memory": flat(samples, options.seconds),
        "exit_code": code,
        "server_metrics": [
            line
            for line in metrics.splitlines()
            if line.startswith("kvpolicy_") and "_bucket" not in line
        ],
        "server_log": server.err.read_text()[-3000:],
        "swaps_made": swaps,
        "samples": {name: [round(s[name], 3) for s in samples] for name in samples[0]},
        "record": record,
    }
    right = end == start and not (differ or result["errors"] or result["restarts"] or code)
    return result, right and result["swaps_done"] == options.swaps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["overhead", "soak"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--tokens", default="128-384", help="output tokens per request")
    parser.add_argument("--seconds", type=float, help="of a turn (6), of the soak (480)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--limit", type=float, default=150, help="seconds for all turns")
    parser.add_argument("--swaps", type=int, default=24)
    parser.add_argument("--compare", type=int, default=256, help="requests of the soak to compare")
    parser.add_argument("--device-kv-mib", type=float)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.seconds = options.seconds or {"overhead": 6.0, "soak": 480.0}[options.part]
    with tempfile.TemporaryDirectory() as folder:
        run = overhead if options.part == "overhead" else soak
        result, right = run(options, Path(folder))
    result["command"] = ["python", "-P", *sys.argv]
    result["python"] = platform.python_version()
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    left_out = ("turns", "samples", "record", "server_log", "server_metrics", "swaps_made")
    print(json.dumps({k: v for k, v in result.items() if k not in left_out}, indent=1))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
