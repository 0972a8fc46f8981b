"""Compiles the kernels of sampling and of speculative acceptance for sm_90; prints one JSON line each.
Run without TRITON_INTERPRET."""

from __future__ import annotations

import itertools
import json
import re

from compile_memory import compiled

from kvpolicy.kernels.triton import acceptance, sampling

FLOAT64, INT64 = "*fp64", "*i64"
LAW = {"target": FLOAT64, "tokens": INT64, "candidates": INT64, "proposed": "*fp32"}
CALL = LAW | {"scales": FLOAT64, "left": INT64, "V": "i32", "C": "i32"}
REQUESTS = dict.fromkeys(["lengths", "seeds", "anchors", "bonus", "accepted", "following"], INT64)
FIXED = {"K": 7, "BLOCK": acceptance.BLOCK}
ROLES = {"KB": 8, "ACCEPT": 2, "RESIDUAL": 3, "SHIFT": 8}


def report(name: str, ptx: str, **how: bool) -> None:
    print(json.dumps({"kernel": name, "spilled": bool(re.search(r"\.local\.", ptx))} | how))


def noise() -> None:
    types = {"seeds": INT64, "positions": INT64, "roles": INT64, "noise": FLOAT64, "width": "i32"}
    for each in (False, True):
        constants = {"ROLE": 0, "ROLES": each, "BLOCK": sampling.BLOCK}
        report("gumbel", compiled(sampling._gumbel_kernel, types, constants, 4), each=each)


def main() -> None:
    noise()
    for sparse, block in itertools.product((False, True), repeat=2):
        constants = FIXED | ROLES | {"SPARSE": sparse, "IN_BLOCK": block}
        codes = {"accept": compiled(acceptance._accept_kernel, CALL | REQUESTS, constants, 4)}
        if block:
            codes["scale"] = compiled(acceptance._scale_kernel, CALL, FIXED | {"SPARSE": sparse}, 4)
        for name, ptx in codes.items():
            report(name, ptx, sparse=sparse, block=block)


if __name__ == "__main__":
    main()
