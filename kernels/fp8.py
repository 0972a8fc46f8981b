"""8-bit rows and keys: the plain-torch truth of their records.

A **row** of L + R values (L latent, R rotary) is L codes (float8 e4m3), one float32 scale for each 128
of them, and the R rotary values as bf16: 656 bytes for 512 + 64 (the layout that FlashMLA publishes
for DeepSeek-V3.2). A **key** of d values is d codes and one float32 scale: 132 bytes for 128. The
value of a code is code * scale; scale = amax / 448, so that the largest magnitude takes the largest
code (DeepSeek-V3 technical report, section 3.3). Optionally scales are rounded up to a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
LARGEST = 448.0  # of e4m3
LEAST = 1e-4  # amax of a group counts as at least this: an all-zero group has a scale too


def row_bytes(latent: int, rotary: int) -> int:
    """Bytes of one row record. latent: values, a multiple of 128; rotary: values."""
    if latent <= 0 or latent % GROUP:
        raise ValueError(f"latent = {latent}: must be a positive multiple of {GROUP}")
    return latent + 4 * (latent // GROUP) + 2 * rotary


def key_bytes(width: int) -> int:
    """Bytes of one key record. width: values, a multiple of 4."""
    if width <= 0 or width % 4:
        raise ValueError(f"width = {width}: must be a positive multiple of 4")
    return width + 4


def quantize(values: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of vectors. values: [..., d] floating -> (e4m3 [..., d], float32 [...])."""
    values = values.float()
    largest = values.abs().amax(dim=-1).clamp_min(LEAST)
    # By a tensor: CUDA divides by a number by multiplying with its inverse, which is off by a bit.
    scale = largest / torch.full_like(largest, LARGEST)
    if power_of_two:  # the exponent of a float32 is rounded up where its fraction is not zero
        bits = scale.view(torch.int32)
        scale = ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    codes = (values / scale[..., None]).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), scale


def quantize_rows(rows: Tensor, latent: int, power_of_two: bool = False) -> Tensor:
    """Row records. rows: [..., L + R] floating, latent: L -> uint8 [..., row_bytes(L, R)]."""
    row_bytes(latent, rows.shape[-1] - latent)
    codes, scales = quantize(rows[..., :latent].unflatten(-1, (-1, GROUP)), power_of_two)
    rotary = rows[..., latent:].to(torch.bfloat16).contiguous()
    parts = [codes.flatten(-2), scales, rotary]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def dequantize_rows(records: Tensor, latent: int) -> Tensor:
    """Values of row records. records: uint8 [..., bytes], latent: L -> float32 [..., L + R]."""
    codes = records[..., :latent].contiguous().view(torch.float8_e4m3fn).float()
    tail = latent + 4 * (latent // GROUP)
    scales = records[..., latent:tail].contiguous().view(torch.float32)
    rotary = records[..., tail:].contiguous().view(torch.bfloat16).float()
    values = codes.unflatten(-1, (-1, GROUP)) * scales[..., None]
    return torch.cat([values.flatten(-2), rotary], dim=-1)


def quantize_keys(keys: Tensor, power_of_two: bool = False) -> Tensor:
    """Key records. keys: [..., d] floating -> uint8 [..., d + 4]."""
    key_bytes(keys.shape[-1])
    codes, scale = quantize(keys, power_of_two)
    return torch.cat([codes.view(torch.uint8), scale[..., None].view(torch.uint8)], dim=-1)


def dequantize_keys(records: Tensor) -> Tensor:
    """Values of key records. uint8 [..., d + 4] -> float32 [..., d]."""
    codes = records[..., :-4].contiguous().view(torch.float8_e4m3fn).float()
    return codes * records[..., -4:].contiguous().view(torch.float32)


def rounded_queries(q: Tensor) -> Tensor:
    """Index queries as scoring against 8-bit keys sees them: each head's codes times its scale.

    q: [n, H, d] floating -> float32 [n, H, d].
    """
    codes, scale = quantize(q)
    return codes.float() * scale[..., None]


__all__ = [
    "GROUP",
    "dequantize_keys",
    "dequantize_rows",
    "key_bytes",
    "quantize",
    "quantize_keys",
    "quantize_rows",
    "rounded_queries",
    "row_bytes",
]
