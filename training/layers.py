"""The model's pure functions over flattened tokens; N = batch x length, all shapes static.

Each is compiled once: every layer and every stage calls it with the same shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMS norm in fp32 over the last dimension; the result has the input's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * gain).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of x [N, ..., R]; cos, sin [N, ..., R/2]. Halves come out joined."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)


def project(
    x: Tensor, ln: Tensor, q_a: Tensor, q_norm: Tensor, q_b: Tensor, kv_a: Tensor,
    kv_norm: Tensor, cos: Tensor, sin: Tensor, heads: int, nope: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x [N, d] fp32 -> h [N, d], q_res, qn [N, H, nope], qr, latent c [N, L], kr [N, R]."""
    h = rms_norm(x, ln).to(q_a.dtype)
    q_res = rms_norm(F.linear(h, q_a), q_norm)
    q = F.linear(q_res, q_b).view(x.shape[0], heads, -1)
    width = kv_norm.shape[0]
    latent, rotary = F.linear(h, kv_a).split([width, kv_a.shape[0] - width], 1)
    qr = rope(q[..., nope:], cos[:, None], sin[:, None])
    c = rms_norm(latent, kv_norm)
    return h, q_res, q[..., :nope].contiguous(), qr, c, rope(rotary, cos, sin)


def project_index(
    h: Tensor, q_res: Tensor, wq: Tensor, wk: Tensor, gain: Tensor, bias: Tensor,
    weights: Tensor, cos: Tensor, sin: Tensor, heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Index queries [N, I, D], keys [N, D] and head weights [N, I], with both scales folded in."""
    rotary = 2 * cos.shape[1]
    q = F.linear(q_res, wq).view(h.shape[0], heads, -1)
    q = torch.cat([rope(q[..., :rotary], cos[:, None], sin[:, None]), q[..., rotary:]], -1)
    k = F.layer_norm(F.linear(h, wk).float(), gain.shape, gain, bias, EPS).to(h.dtype)
    k = torch.cat([rope(k[:, :rotary], cos, sin), k[:, rotary:]], -1)
    scale = (heads * q.shape[-1]) ** -0.5
    return q, k, F.linear(h.float(), weights.float()) * scale


def expand(c: Tensor, kr: Tensor, kv_b: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Per-head keys [N, H, nope + R] and values [N, H, V] of the dense path."""
    kv = F.linear(c, kv_b).view(c.shape[0], heads, -1)
    key = torch.cat([kv[..., :nope], kr[:, None].expand(-1, heads, -1)], -1)
    return key, kv[..., nope:]


def absorb(qn: Tensor, kv_b: Tensor, heads: int, nope: int) -> Tensor:
    """Queries against the latent rows: [N, H, nope] -> [N, H, L]."""
    up = kv_b.view(heads, -1, kv_b.shape[1])[:, :nope]
    return torch.bmm(qn.transpose(0, 1), up).transpose(0, 1).contiguous()


def unabsorb(out: Tensor, kv_b: Tensor, heads: int, nope: int) -> Tensor:
    """Latent output [N, H, L] -> values [N, H V]."""
    up = kv_b.view(heads, -1, kv_b.shape[1])[:, nope:]
    value = torch.bmm(out.transpose(0, 1), up.transpose(1, 2))
    return value.transpose(0, 1).reshape(out.shape[0], -1)


def finish(
    x: Tensor, value: Tensor, o: Tensor, ln: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """Add the attention output and the SwiGLU MLP to the residual x [N, d] fp32."""
    x = x + F.linear(value, o).float()
    h = rms_norm(x, ln).to(gate.dtype)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down).float()


def head_loss(x: Tensor, norm: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy in nats of x [N, d] against target [N]."""
    logits = F.linear(rms_norm(x, norm).to(head.dtype), head).float()
    return F.cross_entropy(logits, target)


def head_logits(x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
    """Logits [N, V] fp32."""
    return F.linear(rms_norm(x, norm).to(head.dtype), head).float()


class Embed(torch.autograd.Function):
    """Embedding rows whose gradient is one matrix product: no sort, so a CUDA graph can hold it."""

    @staticmethod
    def forward(ctx, table, ids):  # type: ignore[no-untyped-def]
        """Rows [N, d] of table [V, d]."""
        ctx.save_for_backward(ids)
        ctx.size = table.shape[0]
        return table[ids]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Sum the rows' gradients per id."""
        (ids,) = ctx.saved_tensors
        classes = torch.arange(ctx.size, device=ids.device)
        return (classes[:, None] == ids).to(grad.dtype) @ grad, None


COMPILED = ("project", "project_index", "expand", "absorb", "unabsorb", "finish", "head_loss")


def compile_all() -> None:
    """Replace the functions of this module by compiled ones."""
    for name in COMPILED:
        globals()[name] = torch.compile(globals()[name], dynamic=False)
