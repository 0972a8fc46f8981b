"""tiny-dsa in functional form: stacked parameters, dense or sparse forward, indexer losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import layers
import reference
import sparse_kernels
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TinyConfig:
    """Shape of the model; the names follow `GlmMoeDsaConfig` where one exists."""

    vocab_size: int = 264
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    kv_lora_rank: int = 64
    intermediate_size: int = 640
    index_n_heads: int = 8
    index_head_dim: int = 32
    index_topk: int = 128
    full_layers: tuple[int, ...] = (0, 1, 2, 6)
    rope_theta: float = 100_000.0
    max_position_embeddings: int = 32_768

    @property
    def scale(self) -> float:
        """Attention scale."""
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that share one selection, in order."""
        starts = (*self.full_layers, self.num_hidden_layers)
        return tuple(tuple(range(a, b)) for a, b in pairwise(starts))


# Stacked matrices [layers, out, in] that Muon updates; the rest is AdamW's.
MATRICES = ("q_a", "q_b", "kv_a", "kv_b", "o", "gate", "up", "down")
GAINS = ("ln1", "ln2", "q_norm", "kv_norm")
INDEXER = ("idx_q", "idx_k", "idx_gain", "idx_bias", "idx_w")

Params = dict[str, Tensor]
# Index queries [N, I, D], keys [N, D] and head weights [N, I].
Index = tuple[Tensor, Tensor, Tensor]


def shapes(cfg: TinyConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every stacked parameter."""
    d, heads, n = cfg.hidden_size, cfg.num_attention_heads, cfg.num_hidden_layers
    q_dim = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
    full, index = len(cfg.full_layers), cfg.index_n_heads * cfg.index_head_dim
    return {
        "embed": (cfg.vocab_size, d),
        "head": (cfg.vocab_size, d),
        "norm": (d,),
        "ln1": (n, d),
        "ln2": (n, d),
        "q_norm": (n, cfg.q_lora_rank),
        "kv_norm": (n, cfg.kv_lora_rank),
        "q_a": (n, cfg.q_lora_rank, d),
        "q_b": (n, heads * q_dim, cfg.q_lora_rank),
        "kv_a": (n, cfg.kv_lora_rank + cfg.qk_rope_head_dim, d),
        "kv_b": (n, heads * (cfg.qk_nope_head_dim + cfg.v_head_dim), cfg.kv_lora_rank),
        "o": (n, d, heads * cfg.v_head_dim),
        "gate": (n, cfg.intermediate_size, d),
        "up": (n, cfg.intermediate_size, d),
        "down": (n, d, cfg.intermediate_size),
        "idx_q": (full, index, cfg.q_lora_rank),
        "idx_k": (full, cfg.index_head_dim, d),
        "idx_gain": (full, cfg.index_head_dim),
        "idx_bias": (full, cfg.index_head_dim),
        "idx_w": (full, cfg.index_n_heads, d),
    }


def init_params(cfg: TinyConfig, seed: int, device: torch.device | str) -> Params:
    """Normal(0, fan_in^-0.5) matrices; the two that write the residual stream start at zero."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in shapes(cfg).items():
        if name in ("o", "down", "idx_bias"):
            value = torch.zeros(shape)
        elif name in ("norm", "idx_gain", *GAINS):
            value = torch.ones(shape)
        else:
            std = {"embed": 1.0, "head": 0.02}.get(name, shape[-1] ** -0.5)
            value = torch.randn(shape, generator=generator) * std
        params[name] = value.to(device)
    return params


@dataclass(frozen=True)
class Pass:
    """How one forward runs: length, dense or sparse, kernels or plain torch, matmul dtype, layers
    whose outputs are wanted."""

    seq_len: int
    dense: bool
    triton: bool = True
    dtype: torch.dtype = torch.bfloat16
    taps: tuple[int, ...] = ()


@dataclass
class Result:
    """Residual [N, d] fp32, the KL of each indexer [4], the selection [N, k] of each group, and the
    residual behind each tapped layer."""

    hidden: Tensor
    taps: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    selected: list[Tensor] = field(default_factory=list)


@lru_cache(maxsize=8)
def rope_tables(cfg: TinyConfig, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R/2] fp32, computed as transformers does: fp32 position x fp32 frequency."""
    exponent = torch.arange(0, cfg.qk_rope_head_dim, 2, dtype=torch.float) / cfg.qk_rope_head_dim
    inv_freq = (1.0 / cfg.rope_theta**exponent).to(device)
    angle = torch.arange(seq_len, device=device).float()[:, None] * inv_freq
    return angle.cos(), angle.sin()


def cast_layers(params: Params, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Per-layer weights, matrices in `dtype`; one cast and one unbind per stacked parameter."""
    stacked = {n: params[n].to(dtype).unbind(0) for n in (*MATRICES, "idx_q", "idx_k")}
    stacked |= {n: params[n].unbind(0) for n in (*GAINS, "idx_gain", "idx_bias", "idx_w")}
    count = params["q_a"].shape[0]
    out = [{n: stacked[n][i] for n in (*MATRICES, *GAINS)} for i in range(count)]
    indexers = [{n: stacked[n][i] for n in INDEXER} for i in range(params["idx_q"].shape[0])]
    return out + indexers


def dense_attention(
    qn: Tensor, qr: Tensor, c: Tensor, kr: Tensor, kv_b: Tensor, cfg: TinyConfig, seq_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention over everything: values [N, H V], queries and keys [N, H, nope + R]."""
    heads, nope = cfg.num_attention_heads, cfg.qk_nope_head_dim
    key, value = layers.expand(c, kr, kv_b, heads, nope)
    query = torch.cat([qn, qr], -1)
    # The fused kernels want one head size for keys and values.
    value = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
    q, k, v = (t.view(-1, seq_len, heads, t.shape[-1]).transpose(1, 2) for t in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=cfg.scale)
    out = out[..., : cfg.v_head_dim].transpose(1, 2).reshape(qn.shape[0], -1)
    return out, query, key


def dense_target(query: Tensor, key: Tensor, rows: Tensor, seq_len: int, scale: float) -> Tensor:
    """Head-mean attention [B, R, T] of the query rows `rows` [B, R] (positions)."""
    batch, count = rows.shape
    base = torch.arange(batch, device=rows.device)[:, None] * seq_len
    picked = query.index_select(0, (rows + base).view(-1)).view(batch, count, *query.shape[1:])
    keys = key.view(batch, seq_len, *key.shape[1:])
    s = picked.transpose(1, 2) @ keys.permute(0, 2, 3, 1)
    s = s.float() * scale + future_mask(rows, seq_len)[:, None]
    return s.softmax(-1).mean(1)


def future_mask(rows: Tensor, seq_len: int) -> Tensor:
    """0 up to the row's own position, -inf after it: [B, R, T]."""
    columns = torch.arange(seq_len, device=rows.device)
    return torch.zeros_like(rows[..., None] * columns, dtype=torch.float).masked_fill(
        columns > rows[..., None], float("-inf")
    )


def dense_index(index: Index, rows: Tensor, seq_len: int) -> Tensor:
    """Index scores [B, R, T] fp32 of the rows, -inf in the future, with gradients."""
    iq, ik, iw = index
    batch, count = rows.shape
    flat = (rows + torch.arange(batch, device=rows.device)[:, None] * seq_len).view(-1)
    query = iq.index_select(0, flat).view(batch, -1, iq.shape[2])
    weight = iw.index_select(0, flat).view(batch, count, -1, 1).float()
    dots = query @ ik.view(batch, seq_len, -1).transpose(1, 2)
    dots = dots.view(batch, count, iq.shape[1], seq_len)
    return (torch.relu(dots).float() * weight).sum(2) + future_mask(rows, seq_len)


def sparse_target(
    ql: Tensor, qr: Tensor, c: Tensor, kr: Tensor, idx: Tensor, flat: Tensor, base: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Head-mean attention [M, k] of the rows `flat` [M] over their selection idx [M, k]."""
    s = ql[flat] @ reference.gather_rows(c, idx, base).transpose(1, 2)
    s = s + qr[flat] @ reference.gather_rows(kr, idx, base).transpose(1, 2)
    s = (s.float() * scale).masked_fill((idx < 0)[:, None], float("-inf"))
    return s.softmax(-1).mean(1)


def sparse_index(index: Index, idx: Tensor, flat: Tensor, base: Tensor) -> Tensor:
    """Index scores [M, k] fp32 of the rows `flat` over their selected positions, with gradients."""
    iq, ik, iw = index
    keys = reference.gather_rows(ik, idx, base)
    dots = iq.index_select(0, flat) @ keys.transpose(1, 2)
    score = (torch.relu(dots).float() * iw.index_select(0, flat)[..., None]).sum(1)
    return score.masked_fill(idx < 0, float("-inf"))


def kl_divergence(target: Tensor, score: Tensor) -> Tensor:
    """Mean KL(target || softmax(score)) in nats over all leading dimensions."""
    logp = torch.log_softmax(score, -1)
    term = torch.where(target > 0, target * (target.clamp(min=1e-20).log() - logp), 0.0)
    return term.sum(-1).mean()


def select(index: Index, run: Pass, k: int) -> Tensor:
    """Selected positions [N, k] int32."""
    chooser = sparse_kernels.select if run.triton else reference.select
    queries, keys, weights = (t.detach() for t in index)
    return chooser(queries, keys, weights, run.seq_len, k)


class Forward:
    """One forward pass over flattened ids; holds what a group's layers share."""

    def __init__(self, params: Params, cfg: TinyConfig, run: Pass, rows: Tensor | None) -> None:
        """`rows` [B, R]: positions whose attention teaches the indexers; None for no loss."""
        self.params, self.cfg, self.run, self.rows = params, cfg, run, rows
        self.weights = cast_layers(params, run.dtype)

    def __call__(self, ids: Tensor) -> Result:
        """ids [N] int64, N a multiple of the run's length."""
        cos, sin = rope_tables(self.cfg, self.run.seq_len, ids.device)
        batch = ids.shape[0] // self.run.seq_len
        self.cos, self.sin = cos.repeat(batch, 1), sin.repeat(batch, 1)
        result = Result(layers.Embed.apply(self.params["embed"], ids))
        for number, group in enumerate(self.cfg.groups):
            self._group(number, group, result)
        return result

    def _group(self, number: int, group: tuple[int, ...], result: Result) -> None:
        """Run the layers that share one selection and add their indexer's KL."""
        target: Tensor | None = None
        index = idx = None
        for layer in group:
            w = self.weights[layer]
            h, q_res, *heads = self._project(result.hidden, w)
            if layer == group[0] and (self.rows is not None or not self.run.dense):
                index = self._index(h, q_res, self.weights[self.cfg.num_hidden_layers + number])
            if idx is None and index is not None and not self.run.dense:
                idx = select(index, self.run, self.cfg.index_topk)
                result.selected.append(idx)
            value, p = self._attend(heads, w["kv_b"], idx)
            result.hidden = layers.finish(
                result.hidden, value, w["o"], w["ln2"], w["gate"], w["up"], w["down"]
            )
            if layer in self.run.taps:
                result.taps.append(result.hidden)
            if p is not None:
                target = p if target is None else target + p
        if target is not None and index is not None:
            result.kl.append(kl_divergence(target / len(group), self._score(index, idx)))

    def _project(self, x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return layers.project(
            x, w["ln1"], w["q_a"], w["q_norm"], w["q_b"], w["kv_a"], w["kv_norm"],
            self.cos, self.sin, self.cfg.num_attention_heads, self.cfg.qk_nope_head_dim,
        )  # fmt: skip

    def _index(self, h: Tensor, q_res: Tensor, w: dict[str, Tensor]) -> Index:
        """The indexer's view of a layer's input; detached, so that only its KL trains it."""
        return layers.project_index(
            h.detach(), q_res.detach(), w["idx_q"], w["idx_k"], w["idx_gain"], w["idx_bias"],
            w["idx_w"], self.cos, self.sin, self.cfg.index_n_heads,
        )  # fmt: skip

    def _rows_flat(self) -> tuple[Tensor, Tensor]:
        """Flat row numbers [B R] of the taught rows and the first row of their sequences."""
        assert self.rows is not None
        base = torch.arange(self.rows.shape[0], device=self.rows.device) * self.run.seq_len
        base = base[:, None].expand_as(self.rows).reshape(-1)
        return self.rows.reshape(-1) + base, base

    def _attend(
        self, heads: list[Tensor], kv_b: Tensor, idx: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention values [N, H V] and, when indexers learn, their detached target."""
        cfg, (qn, qr, c, kr) = self.cfg, heads
        dims = cfg.num_attention_heads, cfg.qk_nope_head_dim
        if idx is None:
            value, query, key = dense_attention(qn, qr, c, kr, kv_b, cfg, self.run.seq_len)
            if self.rows is None:
                return value, None
            with torch.no_grad():
                p = dense_target(query, key, self.rows, self.run.seq_len, cfg.scale)
            return value, p
        ql = layers.absorb(qn, kv_b, *dims)
        attend = (
            sparse_kernels.SparseAttention.apply if self.run.triton else reference.sparse_attention
        )
        out = attend(ql, qr, c, kr, idx, self.run.seq_len, cfg.scale)
        value = layers.unabsorb(out, kv_b, *dims)
        if self.rows is None:
            return value, None
        flat, base = self._rows_flat()
        with torch.no_grad():
            p = sparse_target(ql, qr, c, kr, idx[flat], flat, base, cfg.scale)
        return value, p

    def _score(self, index: Index, idx: Tensor | None) -> Tensor:
        """The indexer's scores of the taught rows, over all positions or over its selection."""
        assert self.rows is not None
        if idx is None:
            return dense_index(index, self.rows, self.run.seq_len)
        flat, base = self._rows_flat()
        return sparse_index(index, idx[flat], flat, base)
