"""The memory kernels compile for sm_90, on a machine that needs no GPU, and to the intended accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SUPPORT = Path(__file__).parent / "support"


def test_memory_kernels_compile(tmp_path: Path) -> None:
    """Records of a multiple of 16 B move 16 B at a time; nothing is staged, cached as read-only or
    spilled in PTX. In a process of its own: here kernels may be interpreted."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "compile_memory.py")],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {line["kernel"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert not any(line["wrong"] for line in found.values()), found
    assert {"resolve clock", "resolve wide"} <= set(found)
    wide = {int(name.split()[1]): line["wide"] for name, line in found.items() if "copy" in name}
    assert {words for words, count in wide.items() if count >= 2} == {164, 656}
    assert {words for words, count in wide.items() if not count} == {1, 12, 123}
