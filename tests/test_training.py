"""The training kernels of the embedded model, in the interpreter, against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full
def test_drafters_train_on_what_serves() -> None:
    """training/check_drafters.py: one block among many equals the same block served alone."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "training" / "check_drafters.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("causal=") == 6


@pytest.mark.interpreter
def test_training_kernels_agree_with_torch() -> None:
    """training/check.py: scores, exact top-k, attention and its gradients, the cache simulator."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "training" / "check.py")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "clock" in done.stdout.lower()
