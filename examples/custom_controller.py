"""A residency controller in 20 lines: a request that misses more than a tenth gets twice the rows."""

import kvpolicy


class Greedy:
    def decide(self, observation: kvpolicy.Observation) -> kvpolicy.Plan:
        targets = {}
        for request in observation.requests:
            rows = max(request.budget[0], 64)
            targets[request.request_id] = rows * 2 if request.miss_rate > 0.1 else rows
        return kvpolicy.Plan(targets=targets)


kvpolicy.controllers.register("greedy", Greedy)
prompt = b"import os\nimport sys\n\n\ndef main():\n    return os.path.join(" * 12
params = kvpolicy.SamplingParams(max_new_tokens=40)

outputs = []
for name in ("resident", "greedy"):
    with kvpolicy.Engine(kvpolicy.EngineConfig(controller=name, device="cpu")) as engine:
        output = engine.generate([prompt], params)[0]
        outputs.append(output.logits_sha256)
        miss = engine.metrics()["miss_rate"]
    print(f"{name:9} miss rate {miss:6.1%}  logits {output.logits_sha256[:16]}")
assert outputs[0] == outputs[1], "a policy may not change one bit"
