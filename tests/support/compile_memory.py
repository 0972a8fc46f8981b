"""Compiles the memory kernels for sm_90; prints one JSON line per kernel. Run without TRITON_INTERPRET."""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from device_keys import WIDE
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpolicy.kernels.eviction import RULES
from kvpolicy.kernels.triton import copy, fused_retrieval, publish, resolve, retrieve, union
from kvpolicy.kernels.triton.eviction import device_key

INT32, INT64, BYTE = "*i32", "*i64", "*u8"


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> str:
    """PTX of a kernel whose pointers are 16-byte aligned, as those of torch's allocator are."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind[0] == "*"
        },
    )
    options = {"num_warps": warps}
    return str(triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["ptx"])


def report(name: str, ptx: str) -> None:
    wide = re.findall(r"(?:ld|st)\.global\.v4\.b32", ptx)
    wrong = re.findall(r"cp\.async|ld\.global\.nc|\.local\.", ptx)
    print(json.dumps({"kernel": name, "wide": len(wide), "wrong": sorted(set(wrong))}))


def copies() -> None:
    """From the host to the arena, for records of 4-byte words that are a multiple of 4 and others."""
    pointers = {"source": INT32, "source_at": INT64, "target": INT32, "target_at": INT64}
    for words in (1, 12, 123, 164, 656):
        constants = copy.plan(copy.host_side(words), (4, 16384, words), words)
        report(f"copy {words}", compiled(copy._copy, pointers | {"count": "i32"}, constants, 4))


TABLES = dict.fromkeys(["maps", "meta", "capacity", "used", "hand", "draws", "age"], INT32)
TABLES |= dict.fromkeys(["row_frames", "map_frames", "meta_frames"], INT64) | {"full": BYTE}
CALL = dict.fromkeys(["seats", "step_at", "committed", "accepted"], INT64)
CALL |= dict.fromkeys(["inflight", "staging", "row_base", "key_base", "key_frames"], INT64)
CALL |= dict.fromkeys(["source", "counts", "arrivals", "meeting"], INT64)
CALL |= dict.fromkeys(["target", "misses", "host", "records", "scratch", "keys", "room"], INT32)
CALL |= {"admit": BYTE, "missed": "*i8", "wanted": INT32, "location": INT32}
SIZES = ["pieces", "width", "row_seat", "map_seat", "meta_seat", "key_seat", "segment", "q"]
CALL |= dict.fromkeys(SIZES, "i32")
# Frames of 32 KiB that hold records of four rows of 656 bytes, and keys of 33 words.
PER = {"PER_ROW": 12, "PER_MAP": 8192, "MAP_FRAME": 8192, "PER_META": 4096, "META_FRAME": 8192}
RECORD = {"PER": 12, "FRAME": 8192, "RECORD": 656, "ALIGNED": 4}
RECORD |= {"WORDS": 656, "WIDTH": 1024, "SLICES": 1}
KEYS = {
    "PER": 248,
    "FRAME": 8192,
    "RECORD": 33,
    "ALIGNED": 1,
    "WORDS": 33,
    "WIDTH": 64,
    "SLICES": 1,
}


def steps(name: str, kernel: Any, constants: dict[str, Any], warps: int) -> None:
    """A kernel of the decode step."""
    wanted = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {key: kind for key, kind in (TABLES | CALL).items() if key in kernel.arg_names}
    report(name, compiled(kernel, types, wanted, warps))


def resolves() -> None:
    """All forms of resolve, fetch, both in one, and publish."""
    decode = {
        "EVICT": True,
        "FIRST": True,
        "RESIDENT": False,
        "TOKENS": 1,
        "LAYERS": 4,
        **PER,
        **RECORD,
    }
    decode |= {
        "PIECES": 128,
        "ROWS": 4,
        "COPIERS": 32,
        "WAIT": True,
        "MOST": 2,
        "EXTRA": 32,
        "NEAR": True,
    }
    decode |= {f"KEY_{name}": value for name, value in KEYS.items()}
    for rule in (RULES["clock"], RULES["fifo"], WIDE):
        each = decode | {"TOUCH": rule.touch, "KEY": device_key(rule), "LAZY": rule.lazy}
        for parts, block, warps in ((1, 1024, 8), (8, 256, 4)):
            cut = each | {"PARTS": parts, "BLOCK": block, "DECODE": True, "TILE": 1024}
            steps(f"resolve {rule.name} {parts}", resolve._resolve, cut, warps)
            steps(f"fused {rule.name} {parts}", fused_retrieval._fused, cut, warps)
            later = cut | {"FIRST": False}
            steps(f"resolve again {rule.name} {parts}", resolve._resolve, later, warps)
            steps(f"fused again {rule.name} {parts}", fused_retrieval._fused, later, warps)
        full = each | {"PARTS": 4, "BLOCK": 512, "DECODE": True, "TILE": 1024, "RESIDENT": True}
        steps(f"resident {rule.name}", resolve._resolve, full, 4)
        waves = each | {
            "PARTS": 1,
            "BLOCK": resolve.BLOCK,
            "DECODE": False,
            "TILE": resolve.TILE,
            "NEAR": False,
        }
        steps(f"resolve {rule.name}", resolve._resolve, waves, resolve.WARPS)
        steps(
            f"publish {rule.name}", publish._publish, each | {"BLOCK": publish.BLOCK}, publish.WARPS
        )
        several = each | {"Q": 4, "BLOCK": union.BLOCK}
        steps(f"union {rule.name}", union._resolve_union, several, union.WARPS)
        later = several | {"FIRST": False}
        steps(f"union again {rule.name}", union._resolve_union, later, union.WARPS)
    steps("fetch", retrieve._fetch, decode, 4)


if __name__ == "__main__":
    copies()
    resolves()
