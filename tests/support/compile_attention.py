"""Compiles attention with hand-placed copies for sm_90; prints one JSON line each. Run without
TRITON_INTERPRET."""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kvpolicy.kernels.triton import sparse_mla_placed as placed

TYPES = {"query": "*bf16", "view": "*bf16", "narrow": "*fp16", "factors": "*fp32", "scale": "fp32"}
TYPES |= {"codes": "*fp8e4nv", "scales": "*fp32", "turned": "*bf16", "offsets": "*i64"}


def report(name: str, kernel: Any, parts: int, unit: int) -> None:
    """2,048 rows in parts; results in bf16, those of several parts in float32."""
    names, part = kernel.arg_names, 2048 // parts
    constants = {"heads": 64, "UNIT": unit, "PARTS": parts, "PART": part, "PART_BLOCK": part}
    constants["ROWS"] = 64
    types = TYPES | dict.fromkeys(["out", "stats"], "*bf16" if parts == 1 else "*fp32")
    source = GluonASTSource(
        fn=kernel,
        signature={each: types.get(each, "constexpr") for each in names},
        constexprs={(names.index(each),): value for each, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, each in enumerate(names)
            if types.get(each, "")[:1] == "*"
        },
    )
    done = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 8})
    ptx = str(done.asm["ptx"])
    copies = re.findall(r"cp\.async\.c\w\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    found = {
        "kernel": f"{name} {parts}",
        "wgmma": sorted(set(re.findall(r"wgmma\.mma_async\S*?\.(m64n\d+k16)", ptx))),
        "products": len(re.findall(r"wgmma\.mma_async", ptx)),
        "copies": sorted(set(copies)),
        "shared": done.metadata.shared,
        "wrong": sorted(set(re.findall(r"mma\.sync|\.local\.", ptx))),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    for count in (1, 2):
        report("bf16", placed._attend_bf16, count, 8)
        report("fp8", placed._attend_fp8, count, 16)
