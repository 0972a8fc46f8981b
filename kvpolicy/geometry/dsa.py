"""DeepSeek Sparse Attention over MLA rows (DeepSeek-V3.2, GLM-5.x), and its Hugging Face config.

Bytes follow the formats in use:

* MLA row (DeepSeek-V3.2, GLM-5.x): latent and rope values, 4 B each in float32 and 2 B in bf16. fp8
  keeps the latent in e4m3 with one float32 scale per 128 values and the rope part in bf16:
  512 + 4*4 + 64*2 = 656 B (FlashMLA, README and tests/quant.py, V32).
* Index key: 4 or 2 B per value; fp8 adds one float32 scale per 128 values:
  128 + 4 = 132 B (DeepSeek-V3.2-Exp inference/model.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvpolicy.errors import UserError, unknown_name
from kvpolicy.geometry.geometry import Geometry, RowFormat, RowStore, Selector
from kvpolicy.geometry.hf_config import whole


def mla_formats(latent: int, rope: int) -> tuple[RowFormat, ...]:
    scales = 4 * -(-latent // 128)
    return (
        RowFormat("float32", 4 * (latent + rope)),
        RowFormat("bf16", 2 * (latent + rope)),
        RowFormat("fp8", latent + scales + 2 * rope),
    )


def index_formats(width: int) -> tuple[RowFormat, ...]:
    return (
        RowFormat("float32", 4 * width),
        RowFormat("bf16", 2 * width),
        RowFormat("fp8", width + 4 * -(-width // 128)),
    )


def _span(layers: Sequence[int]) -> str:
    return f"L{layers[0]}" if len(layers) == 1 else f"L{layers[0]}-{layers[-1]}"


def dsa_geometry(
    name: str,
    *,
    num_layers: int,
    full_layers: Sequence[int],
    latent: int,
    rope: int,
    topk: int,
    index_heads: int,
    index_head_dim: int,
    **shape: Any,
) -> Geometry:
    """DeepSeek Sparse Attention over MLA rows: a layer runs its own indexer ("full") or reuses the
    last full layer's choice. Layers with one choice fetch together, hence one store per group."""
    stores, selectors = [], []
    for first, end in zip(full_layers, (*full_layers[1:], num_layers), strict=True):
        layers = tuple(range(first, end))
        stores.append(
            RowStore(
                name=_span(layers),
                layers=layers,
                row_width=latent + rope,
                row_formats=mla_formats(latent, rope),
                index_key_width=index_head_dim,
                index_formats=index_formats(index_head_dim),
                latent_width=latent,
            )
        )
        selectors.append(
            Selector(f"S{first}", stores[-1].name, first, layers, topk, index_heads, index_head_dim)
        )
    return Geometry(
        name=name, num_layers=num_layers, stores=tuple(stores), selectors=tuple(selectors), **shape
    )


def whole_groups(geometry: Geometry, layers: int) -> Geometry:
    """A slice of whole groups of layers that share a selection, numbered from 0.

    Taken are groups of the size that covers most layers, which is how the model repeats itself: of
    GLM-5.3 4, 8, ... 76 layers, or all 78. UserError naming what is allowed.
    """
    if layers == geometry.num_layers:
        return geometry
    sizes = [store.n_layers for store in geometry.stores]
    size = max(set(sizes), key=lambda n: n * sizes.count(n))
    most = size * sizes.count(size)
    if layers % size or not size <= layers <= most:
        raise UserError(
            f"layers = {layers}: {geometry.name} repeats a group of {size} layers that share a "
            f"selection: allowed are multiples of {size} up to {most}, and all {geometry.num_layers}"
        )
    kept = [store for store in geometry.stores if store.n_layers == size][: layers // size]
    stores, selectors = [], []
    for i, store in enumerate(kept):
        own = tuple(range(i * size, (i + 1) * size))
        stores.append(replace(store, name=_span(own), layers=own))
        (selector,) = geometry.selectors_of(store.name)
        selectors.append(
            replace(
                selector,
                name=f"S{own[0]}",
                store=stores[-1].name,
                source_layer=own[0],
                reader_layers=own,
            )
        )
    return replace(
        geometry,
        name=f"{geometry.name}[{layers} layers]",
        num_layers=layers,
        stores=tuple(stores),
        selectors=tuple(selectors),
    )


def from_hf_config(config: Mapping[str, Any], name: str = "checkpoint") -> Geometry:
    """The geometry of a Hugging Face `glm_moe_dsa` config (GLM-5, 5.1, 5.2, 5.3, tiny-dsa).

    Fields and the default indexer schedule are those of transformers' `GlmMoeDsaConfig`.
    """
    model_type = config.get("model_type")
    if model_type != "glm_moe_dsa":
        raise unknown_name("model_type", str(model_type), ["glm_moe_dsa"])
    layers = whole(config, "num_hidden_layers")
    types = _indexer_types(config, layers)
    return dsa_geometry(
        name,
        num_layers=layers,
        full_layers=[layer for layer, kind in enumerate(types) if kind == "full"],
        latent=whole(config, "kv_lora_rank"),
        rope=whole(config, "qk_rope_head_dim"),
        topk=whole(config, "index_topk"),
        index_heads=whole(config, "index_n_heads"),
        index_head_dim=whole(config, "index_head_dim"),
        hidden_size=whole(config, "hidden_size"),
        vocab_size=whole(config, "vocab_size"),
        num_heads=whole(config, "num_attention_heads"),
        max_context=whole(config, "max_position_embeddings"),
        source="Hugging Face config.json, model_type glm_moe_dsa",
    )


def _indexer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    field, types = "indexer_types", config.get("indexer_types")
    if types is None:
        field, types = "index_topk_pattern", config.get("index_topk_pattern")
        if isinstance(types, str):
            types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in types]
    if types is None:
        freq = max(whole(config, "index_topk_freq", 1, least=0), 1)
        offset = whole(config, "index_skip_topk_offset", 2, least=0)
        field = "index_skip_topk_offset"
        types = ["shared" if max(i - offset + 1, 0) % freq else "full" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise UserError(
            f"config field {field} needs a list of num_hidden_layers = {layers} entries"
        )
    for layer, kind in enumerate(types):
        if kind not in ("full", "shared"):
            raise UserError(f"config field {field}[{layer}] is {kind!r}: allowed full, shared")
    if types[0] != "full":
        raise UserError(f"config field {field}[0] is 'shared': the first layer must be full")
    return types
