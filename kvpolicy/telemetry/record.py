"""The run record: what has to stand beside a result so that it can be reproduced."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "numpy")


def package_version(name: str) -> str | None:
    """Installed version of a distribution, None if absent."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Commit of the source checkout this package runs from, None outside one. ``+`` marks changes."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=5, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: str) -> str:
    """The accelerator's or processor's own name."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def run_record(config: dict[str, Any], device: str, backend: str) -> dict[str, Any]:
    """Config, versions, commit, machine and command of this process, ready for JSON.

    backend: the kernels that ran, ``reference`` or ``triton``.
    """
    versions = {name: package_version(name) for name in PACKAGES}
    return {
        "config": config,
        "backend": backend,
        "versions": {"kvpolicy": package_version("kvpolicy"), **versions},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": device,
        "device_name": device_name(device),
        "commit": commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
