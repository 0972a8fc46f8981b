"""Compiles every form of the bf16 product for sm_90; prints one JSON line each. Run without
TRITON_INTERPRET."""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpolicy.kernels.triton.tensor_core import SPREAD_ROWS, TILES, Tile, _product_kernel

POINTERS = {"residual": "*fp32", "out": "*bf16", "partial": "*fp32", "arrived": "*i32"}


def ptx(tile: Tile, **form: object) -> str:
    """PTX of one form; sizes and strides are multiples of 16, as a model's are."""
    names = _product_kernel.arg_names
    constants = {"COLUMNS": tile.columns, "ROWS": tile.rows, "INNER": tile.inner, "EVEN": True, **form}
    types = dict.fromkeys(names, "i32") | POINTERS | dict.fromkeys(constants, "constexpr")
    types["x"] = f"tensordesc<bf16[{tile.rows}, {tile.inner}]>"
    types["weight"] = f"tensordesc<bf16[{tile.columns}, {tile.inner}]>"
    source = ASTSource(
        fn=_product_kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in ("x", "weight", "n", *constants)
        },
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return str(triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["ptx"])


def main() -> None:
    """Every tile once; ranges in programs of their own for few rows, in one program for many."""
    done = set()
    for kind, tiles in TILES.items():
        for tile in tiles:
            gated, few = kind == "gated", kind == "few"
            if (tile, gated) in done:
                continue
            done.add((tile, gated))
            ranges = {"RANGES": 3 if few else 1, "SPREAD": few and tile.rows <= SPREAD_ROWS}
            text = ptx(tile, GATED=gated, ADD=few, **ranges)
            found = {
                "tile": f"{kind} {tile}",
                "wgmma": sorted(set(re.findall(r"wgmma\.mma_async\S*?\.(m64n\d+k16)", text))),
                "wrong": sorted(set(re.findall(r"mma\.sync|\.local\.", text))),
                "bulk": len(re.findall(r"cp\.async\.bulk\.tensor", text)),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
