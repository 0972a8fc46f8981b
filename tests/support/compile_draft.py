"""Compiles the drafter's attention for sm_90, in sizes of tiny-dsa and of large models; prints one JSON
line each. Run without TRITON_INTERPRET."""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpolicy.kernels.triton.draft_attention import KEYS, _draft_attention_kernel

# (heads, key heads, width, block)
SIZES = [(8, 2, 32, 8), (64, 16, 64, 8)]


def main() -> None:
    kernel = _draft_attention_kernel
    names = kernel.arg_names
    for heads, groups, dim, block in SIZES:
        constants = {
            "block": block, "heads": heads, "groups": groups, "dim": dim, "CAUSAL": False,
            "ROWS": heads // groups * block, "KEYS": KEYS, "OWN": 16, "DIM": dim,
        }  # fmt: skip
        types = dict.fromkeys(names, "*fp32") | {"visible": "*u8", "scale": "fp32"}
        types |= dict.fromkeys(("columns", "request_stride", "column_stride"), "i32")
        types |= dict.fromkeys(constants, "constexpr")
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature={n: types[n] for n in names}, constexprs=values)
        compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4})
        wrong = re.findall(r"\.local\.", str(compiled.asm["ptx"]))
        shared = compiled.metadata.shared
        print(json.dumps({"heads": heads, "wrong": wrong, "shared": shared}))


if __name__ == "__main__":
    main()
