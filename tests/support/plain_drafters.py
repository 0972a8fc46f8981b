"""The three drafters once more, from their formulas alone: one request, one row, one head at a time.

Float64, everything recomputed from the taps of all earlier tokens, nothing cached, no code shared with
``kvpolicy.speculative.drafters``. config: the JSON object of a checkpoint. A past of s tokens means taps
[s, m, d] of positions 0..s-1; the anchor stands at position s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class PlainDrafter:
    def __init__(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], embed: Tensor, head: Tensor
    ) -> None:
        self.c, self.nested = config, config["dflash_config"]
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        self.embed, self.head = embed.double(), head.double()
        kinds = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}
        self.kind = kinds.get(config["architectures"][0], "dspark")
        self.shift = bool(config["sample_from_anchor"])
        self.rows = int(config["block_size"])
        self.tokens = self.rows if self.shift else self.rows - 1

    def rms(self, x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / math.sqrt(float((x * x).mean()) + self.c["rms_norm_eps"])

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half, out = len(x) // 2, x.clone()
        for i in range(half):
            angle = position * self.c["rope_theta"] ** (-i / half)
            a, b = float(x[i]), float(x[i + half])
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def head_of(self, x: Tensor, matrix: str, number: int, gain: str | None, at: int) -> Tensor:
        """One head of a projection, normed and rotated if it has a gain."""
        size = self.c["head_dim"]
        out = self.w[matrix][number * size : (number + 1) * size] @ x
        return out if gain is None else self.rotate(self.rms(out, self.w[gain]), at)

    def sees(self, row: int, key: int, anchor: int) -> bool:
        """Whether a row of the block sees a position; the block's own begin at the anchor."""
        if key < anchor:
            return anchor + row - key < self.c["sliding_window"]
        return not self.c["is_causal"] or key - anchor <= row

    def convolved(
        self, rows: list[Tensor], deltas: list[Tensor], base: Tensor, side: int
    ) -> list[Tensor]:
        if self.kind != "dflash2":
            return rows
        group, out = self.nested["conv_group_size"], []
        for i in range(len(rows)):
            total = torch.zeros_like(rows[i])
            for tap in range(self.nested["conv_kernel_size"]):
                if i - tap >= 0:
                    kernel = base[side, tap] + deltas[i][side, tap].repeat_interleave(group)
                    total = total + kernel * rows[i - tap]
            out.append(total)
        return out

    def deltas(self, prefix: str, rows: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        if self.kind != "dflash2":
            return [], torch.empty(0)
        base = self.w[f"{prefix}_conv.base_kernel"]
        matrix = self.w[f"{prefix}_conv.kernel_projection.weight"]
        return [(matrix @ z).view(2, base.shape[1], -1) for z in rows], base

    def attention(
        self, prefix: str, rows: list[Tensor], past: dict[int, Tensor], anchor: int
    ) -> list[Tensor]:
        own, shared = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        vectors = past | {anchor + i: row for i, row in enumerate(rows)}
        name, out = prefix + "self_attn.", []
        pairs: dict[int, list[tuple[Tensor, Tensor]]] = {
            at: [
                (
                    self.head_of(x, f"{name}k_proj.weight", g, f"{name}k_norm.weight", at),
                    self.head_of(x, f"{name}v_proj.weight", g, None, at),
                )
                for g in range(shared)
            ]
            for at, x in vectors.items()
        }
        for i, row in enumerate(rows):
            heads = []
            for h in range(own):
                q = self.head_of(row, f"{name}q_proj.weight", h, f"{name}q_norm.weight", anchor + i)
                seen = [pairs[at][h * shared // own] for at in pairs if self.sees(i, at, anchor)]
                score = torch.stack([q @ k for k, _ in seen]) / math.sqrt(len(q))
                share = torch.softmax(score, 0)
                heads.append(sum(p * v for p, (_, v) in zip(share, seen, strict=True)))
            out.append(self.w[f"{name}o_proj.weight"] @ torch.cat(heads))
        return out

    def mlp(self, prefix: str, rows: list[Tensor]) -> list[Tensor]:
        gate, up, down = (self.w[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return [down @ (torch.nn.functional.silu(gate @ z) * (up @ z)) for z in rows]

    def hidden(self, taps: Tensor, anchor_token: int) -> list[Tensor]:
        """Final-normed hidden states of the rows that predict."""
        anchor = len(taps)
        past = {
            at: self.rms(self.w["fc.weight"] @ tap.double().flatten(), self.w["hidden_norm.weight"])
            for at, tap in enumerate(taps)
        }
        x = [self.embed[anchor_token]] + [self.w["mask_embedding"]] * (self.rows - 1)
        for number in range(self.c["num_hidden_layers"]):
            prefix = f"layers.{number}."
            for place, norm in (("attention", "input"), ("mlp", "post_attention")):
                z = [self.rms(row, self.w[f"{prefix}{norm}_layernorm.weight"]) for row in x]
                deltas, base = self.deltas(prefix + place, z)
                y = self.convolved(z, deltas, base, 0)
                y = (
                    self.attention(prefix, y, past, anchor)
                    if place == "attention"
                    else self.mlp(prefix, y)
                )
                y = self.convolved(y, deltas, base, 1)
                x = [a + b for a, b in zip(x, y, strict=True)]
        x = [self.rms(row, self.w["norm.weight"]) for row in x]
        return x if self.shift else x[1:]

    def logits(self, hidden: Tensor, previous: int) -> tuple[list[int], Tensor, float | None]:
        """Of one token, behind ``previous``: candidates in ascending order, their scores, and the
        confidence before calibration."""
        u = self.head @ hidden
        everything = list(range(len(u)))
        if self.kind == "dflash":
            return everything, u, None
        if self.kind == "dspark":
            code = self.w["markov_head.markov_w1.weight"][previous]
            sure = self.w["confidence_head.proj.weight"][0] @ torch.cat([hidden, code])
            sure = sure + self.w["confidence_head.proj.bias"][0]
            return everything, u + self.w["markov_head.markov_w2.weight"] @ code, float(sure)
        s = "candidate_selector."
        best = sorted(everything, key=lambda v: -float(u[v]))[: self.nested["selector_top_k"]]
        best.sort()
        middle = self.w[s + "predecessor_codebook"][previous] * (
            self.w[s + "hidden_projection.weight"] @ hidden
        )
        scores = [u[v] + middle @ self.w[s + "successor_codebook"][v] for v in best]
        return best, torch.stack(scores), None

    def law(self, hidden: Tensor, previous: int, temperature: float) -> Tensor:
        """Over the vocabulary."""
        ids, scores, _ = self.logits(hidden, previous)
        law = torch.zeros(len(self.head), dtype=torch.float64)
        law[ids] = torch.softmax(scores / temperature, 0)
        return law

    def greedy(self, taps: Tensor, anchor_token: int) -> list[int]:
        """K tokens, each the likeliest behind the one before."""
        found = [anchor_token]
        for h in self.hidden(taps, anchor_token):
            ids, scores, _ = self.logits(h, found[-1])
            found.append(ids[int(scores.argmax())])
        return found[1:]
