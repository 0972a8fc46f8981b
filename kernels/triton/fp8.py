"""8-bit records written on the device: the bytes of ``kernels/fp8.py``.

One program writes one group of one record (128 latent values and their scale, all rotary values, or a
whole key). Bytes to move: the values once, the record once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8 import GROUP, LARGEST, LEAST, key_bytes, row_bytes
from .launch import FUSION, aligned, power_of_two

_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(LEAST)


@triton.jit
def code_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 of magnitude up to 448 as codes of e4m3 (uint8), to the nearest, ties to even.

    In integers: the interpreter's own conversion loses carries (triton 3.9). Below 2^-6 codes are
    2^-9 apart, as float32 are near 1.5 * 2^14, and count those steps.
    """
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    steps = (tl.abs(x) + 24576.0).to(tl.int32, bitcast=True) & 0xF
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(tl.abs(x) < 0.015625, steps, normal) | sign).to(tl.uint8)


@triton.jit
def round_bf16(x: tl.tensor) -> tl.tensor:
    """float32 to bf16, to the nearest, ties to even; for finite values (see ``code_e4m3``)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def encode(values: tl.tensor, POWER_OF_TWO: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Codes and the scale of one vector of float32, by IEEE division."""
    largest = tl.maximum(tl.max(tl.abs(values), axis=0), _LEAST)
    scale = tl.div_rn(largest, largest * 0.0 + _LARGEST)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    codes = tl.div_rn(values, values * 0.0 + scale)
    codes = tl.minimum(tl.maximum(codes, -_LARGEST), _LARGEST)
    return code_e4m3(codes), scale


@triton.jit
def _write_rows(
    rows: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    rotary: tl.tensor,
    latent: tl.constexpr,
    rotary_width: tl.constexpr,
    GROUP: tl.constexpr,
    RECORD: tl.constexpr,
    ROTARY: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    rows += row * (latent + rotary_width)
    if group * GROUP < latent:
        column = group * GROUP + tl.arange(0, GROUP)
        code, scale = encode(tl.load(rows + column).to(tl.float32), POWER_OF_TWO)
        tl.store(codes + row * RECORD + column, code)
        tl.store(scales + row * (RECORD // 4) + latent // 4 + group, scale)
    else:
        turned = tl.arange(0, ROTARY)
        there = turned < rotary_width
        value = tl.load(rows + latent + turned, mask=there, other=0.0).to(tl.float32)
        first: tl.constexpr = (RECORD - 2 * rotary_width) // 2
        tl.store(rotary + row * (RECORD // 2) + first + turned, round_bf16(value), mask=there)


@triton.jit
def _write_vectors(
    values: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    width: tl.constexpr,
    CODES_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    value = tl.load(values + row * width + column, mask=there, other=0.0)
    code, scale = encode(value.to(tl.float32), POWER_OF_TWO)
    tl.store(codes + row * CODES_ROW + column, code, mask=there)
    tl.store(scales + row * SCALES_ROW, scale)


def quantize_rows(rows: Tensor, latent: int, power_of_two_scales: bool = False) -> Tensor:
    """Row records. rows: [n, L + R] float32 or bf16, latent: L -> uint8 [n, row_bytes(L, R)]."""
    n, width = rows.shape
    record = row_bytes(latent, width - latent)
    if record % 4:
        raise ValueError(f"rotary width = {width - latent}: must be even")
    out = torch.empty(n, record, dtype=torch.uint8, device=rows.device)
    if n:
        _write_rows[(n, latent // GROUP + (width > latent))](
            aligned(rows.contiguous()),
            out,
            out.view(torch.float32),
            out.view(torch.bfloat16),
            latent=latent,
            rotary_width=width - latent,
            GROUP=GROUP,
            RECORD=record,
            ROTARY=power_of_two(width - latent),
            POWER_OF_TWO=power_of_two_scales,
            num_warps=1,
            **FUSION,
        )
    return out


def quantize_keys(keys: Tensor, power_of_two_scales: bool = False) -> Tensor:
    """Key records. keys: [n, d] float32 or bf16 -> uint8 [n, d + 4]."""
    n, width = keys.shape
    record = key_bytes(width)
    out = torch.empty(n, record, dtype=torch.uint8, device=keys.device)
    scales = out.view(torch.float32)[:, width // 4 :]
    _vectors(keys, out, scales, power_of_two_scales)
    return out


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of vectors: [..., d] float32 or bf16 -> (e4m3 [..., d], float32 [...])."""
    flat = values.reshape(-1, values.shape[-1])
    codes = torch.empty(flat.shape, dtype=torch.float8_e4m3fn, device=values.device)
    scales = torch.empty(len(flat), 1, dtype=torch.float32, device=values.device)
    _vectors(flat, codes.view(torch.uint8), scales, False)
    return codes.view(values.shape), scales.view(values.shape[:-1])


def _vectors(values: Tensor, codes: Tensor, scales: Tensor, power_of_two_scales: bool) -> None:
    n, width = values.shape
    if n:
        _write_vectors[(n,)](
            aligned(values.contiguous()),
            codes,
            scales,
            width=width,
            CODES_ROW=codes.stride(0),
            SCALES_ROW=scales.stride(0),
            WIDTH=power_of_two(width),
            POWER_OF_TWO=power_of_two_scales,
            num_warps=1,
            **FUSION,
        )
