"""Random weights in the true dimensions of a preset: what to measure speed on where weights are not at hand.

Attention and indexer are the model's own. The MLP is a stand-in of what one GPU computes of a
mixture of experts under expert parallelism, without the all-to-all. With E routed experts of which a
token takes k, and E / k GPUs (GLM-5.3: 256 / 8 = 32), each GPU holds k routed experts and the shared
ones. Every GPU decodes n rows; balanced routing sends the E / k * n rows of all of them to k experts
each, so one expert gets E / k * n * k / E = n rows, and the GPU computes k * n expert rows: those of
a dense SwiGLU of width k * expert width over its own n rows. The shared experts add theirs. So the
stand-in has width (k + shared) * expert width (GLM-5.3: 9 * 2048 = 18,432) and, at any batch, the
share's FLOPs and weight bytes per step (GLM-5.3: 3 * 6144 * 18,432 values, 679 MB in bf16, a layer).
The first layers' dense MLPs count as mixtures too.

A slice has whole groups of layers that share a selection, as they repeat in the model (GLM-5.3: one
that chooses and three that reuse). Its vocabulary is by default cut in the same proportion, so that the
head takes the share of a step that it takes in the whole model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpolicy.errors import UserError, unknown_name
from kvpolicy.geometry.dsa import whole_groups
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.geometry.presets import PRESETS
from kvpolicy.models.glm_config import GlmDsaConfig
from kvpolicy.models.glm_weights import dtype_of

# Prompts are bytes.
LEAST_VOCAB = 256


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What a KV geometry does not say. value: of a head. experts: routed ones, of which a token takes
    ``chosen``."""

    q_rank: int
    kv_rank: int
    nope: int
    value: int
    experts: int
    chosen: int
    shared: int
    expert_width: int

    @property
    def parallel(self) -> int:
        """GPUs of the expert-parallel group."""
        return self.experts // self.chosen

    @property
    def mlp(self) -> int:
        """Width of the stand-in."""
        return (self.chosen + self.shared) * self.expert_width


DIMENSIONS: Mapping[str, Dimensions] = {
    # Hugging Face config.json of GLM-5.3 (glm_moe_dsa).
    "glm-5.3": Dimensions(2048, 512, 192, 256, experts=256, chosen=8, shared=1, expert_width=2048),
    "micro-glm": Dimensions(32, 128, 16, 16, experts=8, chosen=2, shared=1, expert_width=16),
}
"""By preset. Its rotary base and epsilon do not matter for speed: GLM-5's are used."""
_HIDDEN = frozenset({"micro-glm"})


class DummyWeights:
    """Seeded random weights, see ``glm_weights.Weights``, made on the device when they are taken.

    model: a preset's name. layers: None for all. vocab: None for the model's share. A tensor's values
    depend on seed, device and name, not on the layers asked for. UserError where there is no such slice.
    """

    dummy = True

    def __init__(
        self,
        model: str,
        device: torch.device,
        dtype: torch.dtype,
        layers: int | None = None,
        vocab: int | None = None,
        seed: int = 0,
    ) -> None:
        if model not in DIMENSIONS:
            known = [name for name in DIMENSIONS if name not in _HIDDEN]
            raise UserError(f"dummy_weights: {unknown_name('model', model, known)}")
        whole = PRESETS[model]
        part = whole_groups(whole, whole.num_layers if layers is None else layers)
        self.geometry: Geometry = replace(part, vocab_size=_vocab(whole, part.num_layers, vocab))
        self.config = _config(self.geometry, DIMENSIONS[model])
        self._shapes = self.config.shapes()
        self._device, self._dtype, self._seed = device, dtype, seed
        self._check_room()

    def _check_room(self) -> None:
        size = sum(torch.Size(s).numel() for s in self._shapes.values()) * self._dtype.itemsize
        if self._device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        if size > free:
            raise UserError(
                f"layers = {self.config.layers}: the weights take {size / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB of the device are free"
            )

    def take(self, name: str) -> Tensor:
        shape = self._shapes[name]
        dtype = dtype_of(shape, self._dtype)
        if len(shape) == 1:
            fill = torch.zeros if name.endswith("bias") else torch.ones
            return fill(shape, dtype=dtype, device=self._device)
        g = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) + self._seed)
        noise = torch.empty(shape, dtype=dtype, device=self._device)
        return noise.normal_(0.0, float(shape[1] ** -0.5), generator=g)


def _vocab(whole: Geometry, layers: int, vocab: int | None) -> int:
    if vocab is None:
        share = -(-whole.vocab_size * layers // whole.num_layers)
        return min(max(LEAST_VOCAB, -(-share // 64) * 64), whole.vocab_size)
    if not LEAST_VOCAB <= vocab <= whole.vocab_size:
        raise UserError(
            f"vocab = {vocab}: {whole.name} allows {LEAST_VOCAB} (prompts are bytes) to "
            f"{whole.vocab_size}"
        )
    return vocab


def _config(geometry: Geometry, dims: Dimensions) -> GlmDsaConfig:
    selector, store = geometry.selectors[0], geometry.stores[0]
    return GlmDsaConfig(
        layers=geometry.num_layers,
        hidden=geometry.hidden_size,
        vocab=geometry.vocab_size,
        heads=geometry.num_heads,
        q_rank=dims.q_rank,
        kv_rank=dims.kv_rank,
        nope=dims.nope,
        rope=store.row_width - dims.kv_rank,
        value=dims.value,
        mlp=dims.mlp,
        index_heads=selector.index_heads,
        index_dim=selector.index_head_dim,
        eps=1e-5,
        theta=1e6,
        max_positions=geometry.max_context,
        tied=False,
        bos=None,
        eos=(),
        full_layers=frozenset(s.source_layer for s in geometry.selectors),
    )
