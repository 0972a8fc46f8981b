"""Continue a piece of Python's own source while its history lives in host memory."""

import tarfile
from pathlib import Path

import kvpolicy

prompt = Path(tarfile.__file__).read_bytes()[4000:6500]
config = kvpolicy.EngineConfig(model="tiny-dsa", controller="hisparse", device="cpu")
params = kvpolicy.SamplingParams(max_new_tokens=64, temperature=0.6, seed=1)

with kvpolicy.Engine(config) as engine:
    handle = engine.submit(prompt, params)
    for token in handle:
        print(chr(token) if token < 256 else "", end="", flush=True)
    print()
    metrics = engine.metrics()

print(f"fetched {metrics['fetched_rows']:,} of {metrics['unique_rows']:,} rows that were selected")
assert metrics["fetched_rows"] > 0
