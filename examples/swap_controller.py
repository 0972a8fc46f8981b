"""Swap the controller of a running engine by editing its YAML config: same bits, other memory."""

import tarfile
import tempfile
from pathlib import Path

import kvpolicy

prompt = Path(tarfile.__file__).read_bytes()[4000:5000]
params = kvpolicy.SamplingParams(max_new_tokens=36)
settings = kvpolicy.EngineConfig(controller="resident", device="cpu")
swaps = {
    12: "controller: static:device_buffer_rows=160\neviction: lru\n",
    24: "controller: hisparse\neviction: null\ncontrol_interval: 4\n",
}

with kvpolicy.Engine(settings) as engine:
    undisturbed = engine.generate([prompt], params)[0]

with tempfile.TemporaryDirectory() as folder, kvpolicy.Engine(settings) as engine:
    path = Path(folder, "engine.yaml")
    handle = engine.submit(prompt, params)
    for number, _ in enumerate(handle, start=1):
        if number in (12, 24, 35):
            kept = engine.sample().optional_bytes / 2**20
            fetched = engine.metrics()["fetched_rows"]
            name = engine.config.controller
            print(f"token {number}: {name}: {kept:.2f} MiB kept, {fetched:,} rows fetched")
        if number in swaps:
            path.write_text(swaps[number])
            engine.reload(path)  # what the file does not name stays as it is
    swapped = handle.result()

print(f"logits {undisturbed.logits_sha256[:16]} without a swap, {swapped.logits_sha256[:16]} with")
assert swapped.logits_sha256 == undisturbed.logits_sha256, "a policy may not change one bit"
