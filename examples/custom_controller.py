"""A residency controller in 20 lines: a request that misses more than a tenth gets twice the rows."""

import kvpolicy


class Greedy:
    def decide(self, observation: kvpolicy.Observation) -> kvpolicy.Plan:
        targets = {}
        for request in observation.requests:
            rows = max(request.budget[0], 64)
            targets[request.request_id] = rows * 2 if request.miss_rate > 0.1 else rows
        return kvpolicy.Plan(targets=targets)


if __name__ == "__main__":  # or: --controller examples/custom_controller.py:Greedy
    prompt = b"import os\nimport sys\n\n\ndef main():\n    return os.path.join(" * 12
    outputs = []
    for controller in ("resident", Greedy()):
        with kvpolicy.Engine(kvpolicy.EngineConfig(controller=controller, device="cpu")) as engine:
            outputs += engine.generate([prompt], kvpolicy.SamplingParams(max_new_tokens=40))
            miss = engine.metrics()["miss_rate"]
        print(f"miss rate {miss:6.1%}  logits {outputs[-1].logits_sha256[:16]}")
    assert outputs[0] == outputs[1], "a policy may not change one bit"
