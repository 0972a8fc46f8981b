"""The three drafters as functions of parameters, for many anchors of a sequence at once.

Anchors stand at every STRIDE-th position; SPAN positions share one window of keys, so that attention is
a plain masked product and nothing is gathered per anchor. The same equations as
``kvpolicy/speculative/drafters``, which is what serves (``check_drafters.py`` compares the two).
Shapes: B sequences, T tokens each, A anchors a sequence, R rows a block, d hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from layers import Embed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvpolicy.speculative.drafters.checkpoint import KINDS
from kvpolicy.speculative.drafters.config import DrafterConfig

STRIDE, SPAN = 4, 128
EPS = 1e-6
Params = dict[str, Tensor]


def tiny_config(method: str) -> DrafterConfig:
    """The drafters of tiny-dsa: one body, K = 7. Weights of at most 3.9 MiB in bf16."""
    shift = method == "dspark"
    return DrafterConfig(
        method=method, hidden=256, vocab=264, layers=2, heads=8, kv_heads=2, head_dim=32, mlp=832,
        taps=(1, 3, 5, 6), block=7 if shift else 8, window=512, max_positions=32_768,
        mask_token=259, shift=shift, eps=EPS, rank=0 if method == "dflash" else 64, confidence=shift,
    )  # fmt: skip


def init_params(cfg: DrafterConfig, seed: int, device: torch.device | str) -> Params:
    """Normal(0, fan_in^-0.5) matrices. What writes the residual stream starts at zero; convolution,
    selector, Markov head and confidence head start as if they were not there."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in KINDS[cfg.method].shapes(cfg).items():
        value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if "norm" in name:
            value = torch.ones(shape)
        elif name == "mask_embedding":
            value = torch.randn(shape, generator=generator)
        elif name.endswith("base_kernel"):
            value = torch.zeros(shape)
            value[:, 0] = 1.0
        elif name.endswith(("predecessor_codebook", "markov_w1.weight")):
            value = torch.randn(shape, generator=generator) * 0.2
        elif name.endswith(
            ("o_proj.weight", "down_proj.weight", "kernel_projection.weight", "proj.bias",
             "successor_codebook", "markov_w2.weight", "confidence_head.proj.weight")
        ):  # fmt: skip
            value = torch.zeros(shape)
        params[name] = value.to(device)
    return params


# --- pure functions, compiled where there is a GPU ----------------------------------------------------


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMS norm in fp32; the result is bf16 where the input is, or where ``gain`` says so."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * gain


def turn(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [N, h, e] normed and rotated; cos, sin [N, e/2]."""
    first, second = norm(x, gain).chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)


def keys_values(
    x: Tensor, k: Tensor, v: Tensor, gain: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, e] of vectors [N, d]."""
    width = gain.shape[0]
    key = F.linear(x, k).view(x.shape[0], -1, width)
    return turn(key, gain, cos, sin), F.linear(x, v).view(x.shape[0], -1, width)


def queries(x: Tensor, q: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries [N, H, e]."""
    return turn(F.linear(x, q).view(x.shape[0], -1, gain.shape[0]), gain, cos, sin)


def prepare(x: Tensor, gain: Tensor, like: Tensor) -> Tensor:
    """The normed input of a sublayer, in the dtype of ``like``."""
    return norm(x, gain).to(like.dtype)


def kernels_of(z: Tensor, base: Tensor, projection: Tensor) -> Tensor:
    """Convolution kernels [N, 2, taps, groups, d/groups] of rows [N, d]."""
    sides, taps, _ = base.shape
    delta = F.linear(z, projection).view(z.shape[0], sides, taps, -1, 1)
    return base.view(sides, taps, delta.shape[3], -1) + delta


def convolve(y: Tensor, kernels: Tensor, side: int, rows: int) -> Tensor:
    """The convolution of rows [N, d] within their blocks of ``rows``."""
    blocks = y.view(-1, rows, y.shape[-1])
    own = kernels[:, side].reshape(blocks.shape[0], rows, kernels.shape[2], -1)
    out = own[:, :, 0] * blocks
    for tap in range(1, kernels.shape[2]):
        out = out + own[:, :, tap] * F.pad(blocks, (0, 0, tap, 0))[:, :rows]
    return out.view(y.shape).to(y.dtype)


def feed(z: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU."""
    return F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)


# Each costs seconds to compile, once a shape; the rest gains too little.
COMPILED = ("keys_values", "queries", "prepare", "kernels_of", "convolve")


def compile_all() -> None:
    """Replace the functions of this module by compiled ones."""
    for name in COMPILED:
        globals()[name] = torch.compile(globals()[name], dynamic=False)


# --- attention over shared windows --------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Where anchors stand: phase + STRIDE i, SPAN positions a group. rows: of a block."""

    length: int
    rows: int
    window: int

    @property
    def groups(self) -> int:
        return self.length // SPAN

    @property
    def per_group(self) -> int:
        return SPAN // STRIDE

    @property
    def back(self) -> int:
        """Spans of keys before a group's own one."""
        return -(-self.window // SPAN)

    def anchors(self, phase: Tensor) -> Tensor:
        """Positions int64 [A]. phase: int64 scalar tensor, 0..STRIDE-1."""
        return torch.arange(0, self.length, STRIDE, device=phase.device) + phase

    def mask(self, phase: Tensor, causal: bool, repeat: int) -> Tensor:
        """What the rows of a group see: bool [groups, 1, repeat * per_group * R, keys + own rows]."""
        device = phase.device
        anchor = self.anchors(phase).view(self.groups, -1, 1, 1)
        row = torch.arange(self.rows, device=device)[:, None]
        start = (torch.arange(self.groups, device=device) - self.back) * SPAN
        key = start[:, None] + torch.arange((self.back + 1) * SPAN, device=device)
        key = key[:, None, None]
        past = (key >= 0) & (key < anchor) & (anchor + row - key < self.window)
        place = torch.arange(self.per_group * self.rows, device=device)
        own = place[:, None] // self.rows == place // self.rows
        own = own & (place[:, None] >= place) if causal else own
        both = torch.cat([past.flatten(1, 2), own.expand(self.groups, -1, -1)], -1)
        return both.repeat(1, repeat, 1)[:, None]


def windows(x: Tensor, grid: Grid, batch: int) -> Tensor:
    """Every group's keys: [B T, G, e] -> [groups, B G, keys, e]."""
    spans = x.view(batch, grid.groups, SPAN, *x.shape[1:])
    padded = F.pad(spans, (0, 0, 0, 0, 0, 0, grid.back, 0))
    parts = [padded[:, i : i + grid.groups] for i in range(grid.back + 1)]
    return torch.cat(parts, 2).permute(1, 0, 3, 2, 4).flatten(1, 2)


def attend(
    q: Tensor, past: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], mask: Tensor, grid: Grid,
    batch: int,
) -> Tensor:  # fmt: skip
    """Attended values [B A R, H e]. q: [B A R, H, e]; past: windows; own: keys and values of the rows."""
    shared = own[0].shape[1]

    def by_group(x: Tensor) -> Tensor:
        x = x.view(batch, grid.groups, -1, shared, x.shape[1] // shared, x.shape[2])
        return x.permute(1, 0, 3, 4, 2, 5).flatten(3, 4).flatten(1, 2)

    keys, values = (torch.cat([a, by_group(b)], 2) for a, b in zip(past, own, strict=True))
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends):
        out = F.scaled_dot_product_attention(by_group(q), keys, values, attn_mask=mask)
    per_head = out.view(grid.groups, batch, shared, q.shape[1] // shared, -1, q.shape[2])
    return per_head.permute(1, 0, 4, 2, 3, 5).reshape(q.shape[0], -1)


@lru_cache(maxsize=8)
def rope(dim: int, theta: float, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, dim/2] fp32."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    angle = torch.arange(length, dtype=torch.float32)[:, None] / theta**exponent
    return angle.cos().to(device), angle.sin().to(device)


# --- the forward pass ---------------------------------------------------------------------------------


def hidden_states(
    params: Params, cfg: DrafterConfig, taps: Tensor, first: Tensor, phase: Tensor, batch: int
) -> Tensor:
    """Final-normed hidden states of the rows that predict: [B, A, K, d].

    taps: [B T, m d], first: the anchors' frozen embeddings [B A, d] fp32. params: matrices in the
    dtype of ``taps``, vectors and convolution bases in fp32.
    """
    grid = Grid(taps.shape[0] // batch, cfg.block, cfg.window)
    cos, sin = rope(cfg.head_dim, cfg.theta, grid.length + STRIDE + cfg.block, taps.device)
    at = (grid.anchors(phase)[:, None] + torch.arange(cfg.block, device=taps.device)).flatten()
    here = cos[at].repeat(batch, 1), sin[at].repeat(batch, 1)
    there = cos[: grid.length].repeat(batch, 1), sin[: grid.length].repeat(batch, 1)
    mask = grid.mask(phase, cfg.causal, cfg.heads // cfg.kv_heads)
    fused = prepare(F.linear(taps, params["fc.weight"]), params["hidden_norm.weight"], taps)
    rest = params["mask_embedding"].expand(first.shape[0], cfg.block - 1, -1)
    x = torch.cat([first[:, None], rest], 1).flatten(0, 1)
    for number in range(cfg.layers):
        w = {n.removeprefix(f"layers.{number}."): p for n, p in params.items()}
        kv = (
            w["self_attn.k_proj.weight"],
            w["self_attn.v_proj.weight"],
            w["self_attn.k_norm.weight"],
        )
        past = tuple(windows(t, grid, batch) for t in keys_values(fused, *kv, *there))

        def attention(z: Tensor, w: Params = w, kv: tuple = kv, past: tuple = past) -> Tensor:
            q = queries(z, w["self_attn.q_proj.weight"], w["self_attn.q_norm.weight"], *here)
            own = keys_values(z, *kv, *here)
            out = attend(q, past, own, mask, grid, batch)
            return F.linear(out, w["self_attn.o_proj.weight"])

        def mlp(z: Tensor, w: Params = w) -> Tensor:
            names = ("gate", "up", "down")
            return feed(z, *(w[f"mlp.{n}_proj.weight"] for n in names))

        for place, before, sublayer in (
            ("attention", "input_layernorm", attention), ("mlp", "post_attention_layernorm", mlp)
        ):  # fmt: skip
            z = prepare(x, w[f"{before}.weight"], taps)
            if cfg.method == "dflash2":
                base, projection = (w[f"{place}_conv.{n}"] for n in (
                    "base_kernel", "kernel_projection.weight"))  # fmt: skip
                kernels = kernels_of(z, base, projection)
                y = sublayer(convolve(z, kernels, 0, cfg.block))
                x = x + convolve(y, kernels, 1, cfg.block).float()
            else:
                x = x + sublayer(z).float()
    h = prepare(x, params["norm.weight"], taps).view(batch, -1, cfg.block, x.shape[-1])
    return h if cfg.shift else h[:, :, 1:]


def previous_scores(params: Params, cfg: DrafterConfig, h: Tensor, previous: Tensor) -> Tensor:
    """What the token before adds to the logits: fp32 [N, V]. h: [N, d]; previous: int64 [N]."""
    if cfg.method == "dspark":
        embedded = Embed.apply(params["markov_head.markov_w1.weight"], previous)
        return F.linear(embedded, params["markov_head.markov_w2.weight"]).float()
    own = "candidate_selector."
    code = Embed.apply(params[own + "predecessor_codebook"], previous)
    weighted = code * F.linear(h, params[own + "hidden_projection.weight"])
    return F.linear(weighted, params[own + "successor_codebook"]).float()


def confidence_logits(params: Params, h: Tensor, previous: Tensor) -> Tensor:
    """Confidence before the sigmoid: fp32 [N]."""
    embedded = Embed.apply(params["markov_head.markov_w1.weight"], previous)
    joined = torch.cat([h.float(), embedded.float()], 1)
    weight = params["confidence_head.proj.weight"].float()
    return F.linear(joined, weight)[:, 0] + params["confidence_head.proj.bias"]
