"""Train a residency controller for a few seconds, export it, and let the artifact decide in an episode."""

import tempfile
from pathlib import Path

import kvpolicy.agents
from kvpolicy.agents.exporting import export
from kvpolicy.agents.judging import judge
from kvpolicy.agents.settings import override, read_settings
from kvpolicy.agents.training import train

CONFIG = Path(kvpolicy.agents.__file__).parent / "configs" / "quick.yaml"

# The quick recipe, cut down from a minute: more decisions make a better policy.
settings = override(
    read_settings(CONFIG, "ppo", "kvpolicy/ResidencyReplay-v0"),
    {"n_timesteps": 2048, "eval_every": 1024, "eval_episodes": 4, "env_kwargs.max_steps": 64},
)

with tempfile.TemporaryDirectory() as folder:
    trained = train(settings, Path(folder, "run"), seed=0, say=print)
    content, artifact = export(trained.best, "example")
    path = Path(folder, "policy.npz")
    path.write_bytes(content)
    row = judge([f"learned:path={path}"], ["tiny"], "test", seeds=[0])[0]

print(
    f"{len(content):,} bytes, {artifact.encoder.size} numbers in, {len(artifact.actions.knobs)} out"
)
print(f"an episode of {row.scenario} with it: goodput {row.episodes[0].goodput:,.0f} tokens/s")
assert row.episodes[0].fallbacks == 0 and row.mean > 0, "the artifact must have decided, every time"
