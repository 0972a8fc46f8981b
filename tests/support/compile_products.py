"""Compiles the kernels of a bf16 layer for sm_90; prints one JSON line each. Run without
TRITON_INTERPRET."""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpolicy.kernels.triton.latents import _latents_kernel, _turn_kernel
from kvpolicy.kernels.triton.tensor_core import TILES, Tile, _product_kernel

POINTERS = {"residual": "*fp32", "out": "*bf16", "partial": "*fp32", "arrived": "*i32"}


def ptx(tile: Tile, **form: object) -> str:
    """PTX of one form; sizes and strides are multiples of 16, as a model's are."""
    names = _product_kernel.arg_names
    constants = {
        "COLUMNS": tile.columns,
        "ROWS": tile.rows,
        "INNER": tile.inner,
        "EVEN": True,
        **form,
    }
    types = dict.fromkeys(names, "i32") | POINTERS | dict.fromkeys(constants, "constexpr")
    types["x"] = f"tensordesc<bf16[{tile.rows}, {tile.inner}]>"
    types["out_tile"] = f"tensordesc<bf16[{tile.rows}, {tile.columns}]>"
    types["weight"] = f"tensordesc<bf16[{tile.columns}, {tile.inner}]>"
    source = ASTSource(
        fn=_product_kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in ("x", "weight", "out_tile", "n", *constants)
        },
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return str(triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["ptx"])


def between(kernel: Any, narrow: tuple[str, ...], constants: dict[str, int]) -> None:
    """A kernel between products, in GLM-5.3's sizes. narrow: its pointers to bf16."""
    names = kernel.arg_names
    types = dict.fromkeys(names, "*fp32") | dict.fromkeys(narrow, "*bf16") | {"positions": "*i64"}
    types |= {name: "i32" for name in names if name.endswith("_row")}
    types |= {"eps": "fp32", "head_scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values)
    text = str(triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4}).asm["ptx"])
    print(json.dumps({"kernel": kernel.__name__, "wrong": re.findall(r"\.local\.", text)}))


def fused() -> None:
    """Norms and rotary embedding."""
    for dim, heads in ((128, 32), (1, 1)):  # with an indexer and without
        sizes = {"q_rank": 2048, "rank": 512, "half": 32, "dim": dim, "heads": heads}
        between(_latents_kernel, ("query_out",), sizes | {k.upper(): v for k, v in sizes.items()})
    sizes = {"heads": 64, "half": 32, "index_heads": 32}
    sizes |= {k.upper(): v for k, v in sizes.items()} | {"nope": 192, "rank": 512, "dim": 128}
    between(_turn_kernel, ("q", "index_q", "query", "index_out"), sizes | {"REST": 64})


def products() -> None:
    """Every tile once; ranges in programs of their own for few rows, in one program for many."""
    done = set()
    for kind, tiles in TILES.items():
        for _, tile in tiles:
            gated, ranges = kind == "gated", kind == "ranges"
            if (tile, gated) in done:
                continue
            done.add((tile, gated))
            form = (
                {"RANGES": 3, "SPREAD": tile.spread} if ranges else {"RANGES": 1, "SPREAD": False}
            )
            whole = tile.whole and not form["SPREAD"]
            text = ptx(tile, GATED=gated, ADD=kind == "few", WHOLE=whole, **form)
            found = {
                "tile": f"{kind} {tile}",
                "wgmma": sorted(set(re.findall(r"wgmma\.mma_async\S*?\.(m64n\d+k16)", text))),
                "wrong": sorted(set(re.findall(r"mma\.sync|\.local\.", text))),
                "bulk": len(re.findall(r"cp\.async\.bulk\.tensor", text)),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    fused()
    products()
