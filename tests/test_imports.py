"""What an import loads, seen from a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = [
    *("gymnasium", "stable_baselines3", "tensorboard", "matplotlib"),
    *("triton", "transformers"),
]

# As on a machine where triton was never installed: every search for it finds nothing.
HIDE_TRITON = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find(name, path=None, target=None):
    return None if name.partition(".")[0] == "triton" else find_spec(name, path, target)
PathFinder.find_spec = find
"""


def python(code: str, folder: Path) -> str:
    """Standard output of a fresh interpreter; -P keeps the folder off sys.path."""
    ours = {"PYTHONPATH", "TRITON_INTERPRET"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["kvpolicy", "kvpolicy.cli.main"])
def test_import_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}\nprint(*sorted(set({HEAVY}) & set(sys.modules)))"
    assert python(code, tmp_path) == ""


@pytest.mark.parametrize("module", ["kvpolicy.kernels", "kvpolicy.env", "kvpolicy.agents"])
def test_every_part_is_installed_under_one_name(module: str, tmp_path: Path) -> None:
    assert python(f"import {module}; print({module}.__name__)", tmp_path) == module


def test_reference_backend_runs_without_triton(tmp_path: Path) -> None:
    code = f"""{HIDE_TRITON}
import importlib.util, sys
assert importlib.util.find_spec("triton") is None
import kvpolicy
config = kvpolicy.EngineConfig(model="tiny-dsa", controller="hisparse", device="cpu")
engine = kvpolicy.Engine(config)
outputs = engine.generate([b"def main():\\n"], kvpolicy.SamplingParams(max_new_tokens=4))
engine.close()
assert "triton" not in sys.modules
print(len(outputs[0].tokens))
"""
    assert python(code, tmp_path) == "4"


def test_generate_loads_no_learning_stack(tmp_path: Path) -> None:
    code = f"""
import sys, kvpolicy
config = kvpolicy.EngineConfig(model="tiny-dsa", controller="hisparse", device="cpu")
engine = kvpolicy.Engine(config)
engine.generate([b"def main():\\n"], kvpolicy.SamplingParams(max_new_tokens=1))
engine.close()
print(*sorted((set({HEAVY}) - {{"triton"}}) & set(sys.modules)))
"""
    assert python(code, tmp_path) == ""
