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
from kvpolicy.kernels.triton import copy, resolve
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


def resolves() -> None:
    types = dict.fromkeys(["maps", "meta", "capacity", "hand", "draws", "room"], INT32)
    types |= dict.fromkeys(["row_frames", "map_frames", "meta_frames"], INT64)
    types |= dict.fromkeys(["seats", "wanted", "location"], INT64)
    types |= {"full": BYTE, "admit": BYTE, "missed": "*i8"}
    types |= dict.fromkeys(["width", "row_seat", "map_seat", "meta_seat", "step"], "i32")
    per = {"PER_ROW": 12, "PER_MAP": 8192, "PER_META": 4096}
    for rule in (RULES["clock"], WIDE):
        constants = {"TOUCH": rule.touch, "EVICT": True, "KEY": device_key(rule), **per}
        constants |= {"MAP_FRAME": 8192, "META_FRAME": 8192, "BLOCK": resolve.BLOCK}
        ptx = compiled(resolve._resolve, types, constants, resolve.WARPS)
        report(f"resolve {rule.name}", ptx)


if __name__ == "__main__":
    copies()
    resolves()
