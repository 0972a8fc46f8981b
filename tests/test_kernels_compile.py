"""Kernels compile for sm_90, on a machine without a GPU, to the intended accesses and instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
SUPPORT = Path(__file__).parent / "support"


def lines_of(script: str, cache: Path) -> list[Any]:
    """What a script of ``support/`` prints. In a process of its own: here kernels may be
    interpreted."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / script)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_memory_kernels_compile(tmp_path: Path) -> None:
    """Records of a multiple of 16 B move 16 B at a time; nothing is staged, cached as read-only or
    spilled in PTX."""
    found = {line["kernel"]: line for line in lines_of("compile_memory.py", tmp_path)}
    assert not any(line["wrong"] for line in found.values()), found
    assert {"resolve clock", "resolve wide"} <= set(found)
    wide = {int(name.split()[1]): line["wide"] for name, line in found.items() if "copy" in name}
    assert {words for words, count in wide.items() if count >= 2} == {164, 656}
    assert {words for words, count in wide.items() if not count} == {1, 12, 123}


@pytest.mark.full  # some 25 programs of 3 s each
def test_layer_kernels_compile(tmp_path: Path) -> None:
    """Every tile of a bf16 product is computed by one kind of instruction, which adds 16 inner values at
    a time, and read by the copy engine; nothing spills in PTX. A row's bits rest on it."""
    lines = lines_of("compile_products.py", tmp_path)
    assert not any(line["wrong"] for line in lines), lines
    products = [line for line in lines if "tile" in line]
    assert len(products) > 12 and len(lines) == len(products) + 3
    for line in products:
        assert len(line["wgmma"]) == 1 and line["wgmma"][0].startswith("m64n"), line
        assert line["bulk"] >= 4, line


@pytest.mark.full  # 8 programs of 2 s each
def test_sampling_kernels_compile(tmp_path: Path) -> None:
    """Noise and acceptance, for dense and sparse proposals, standard and block; nothing spills."""
    lines = lines_of("compile_acceptance.py", tmp_path)
    assert [line["kernel"] for line in lines].count("accept") == 4
    assert len(lines) == 8 and not any(line["spilled"] for line in lines), lines


@pytest.mark.full
def test_hand_placed_attention_compiles(tmp_path: Path) -> None:
    """Two warp groups share the scores (tiles of 64 x 32), copies take 16 bytes, and all fits in a
    multiprocessor's shared memory."""
    lines = lines_of("compile_attention.py", tmp_path)
    assert len(lines) == 4
    for line in lines:
        assert line["wgmma"] == ["m64n256k16", "m64n32k16"] and line["products"] == 40, line
        assert line["copies"] == ["0x10"] and line["shared"] <= 232_448 and not line["wrong"], line
