"""Serve with the learned controller that comes with kvpolicy: numpy decides, and no output bit changes."""

import sys
import tarfile
from pathlib import Path

import kvpolicy
from kvpolicy.controllers import make

prompt = Path(tarfile.__file__).read_bytes()[4000:5000]
params = kvpolicy.SamplingParams(max_new_tokens=24)
spec = make("learned").artifact.spec
print(f"{spec.name}: {spec.algorithm}, trained for {spec.training['steps']:,} decisions")

hashes = {}
for controller in ("resident", "learned"):
    # A config file says `controller: learned`, or `controller: learned:path=FILE.npz` for your own.
    settings = kvpolicy.EngineConfig(controller=controller, device="cpu", decision_deadline_ms=0)
    with kvpolicy.Engine(settings) as engine:
        hashes[controller] = engine.generate([prompt], params)[0].logits_sha256
        counted = engine.metrics()
    print(
        f"{controller}: {counted['controller_decisions']} decisions, logits {hashes[controller][:16]}"
    )

assert counted["controller_fallbacks"] == 0
assert hashes["learned"] == hashes["resident"], "a policy may not change one bit"
assert not {"gymnasium", "stable_baselines3"} & set(sys.modules), "serving needs neither"
