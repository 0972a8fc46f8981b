"""Installed distributions without an installer: a folder on the search path with their metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def install(folder: Path, name: str, modules: dict[str, str], entry_points: str) -> None:
    """Write ``NAME-1.0.dist-info`` and top-level modules (name -> source) into ``folder``."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds what is installed in ``folder``, and runs in it."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def kvpolicy(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, with what is installed in ``folder``."""
    return python(folder, "-m", "kvpolicy.cli.main", *arguments)
