"""Named geometries. MLA models are built by `kvpolicy.geometry.dsa`, which gives their row sizes.

A V4.1 row has 512 values, rope inside: bf16 1024 B; fp8 584 B (448 e4m3, 64 bf16, 7 ue8m0, 1 pad;
FlashMLA tests/quant.py, MODEL1); mxfp8 528 B (vLLM pull request 56893); fp4 288 B (256 + 32 e4m3
scales, one per 16 values, DeepSeek's reference code, whose window rows stay in the 528 B format).
Its fp4 index key has 68 B: 64 and four ue8m0 scales (SGLang, mem_cache/deepseek_v4_memory_pool.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvpolicy.errors import UserError, unknown_name
from kvpolicy.geometry.dsa import dsa_geometry, from_hf_config, index_formats
from kvpolicy.geometry.geometry import Geometry, Pinned, RowFormat, RowStore, Selector
from kvpolicy.geometry.hf_config import is_folder, read_json

__all__ = ["PRESETS", "TOY", "from_hf_config", "load_geometry", "preset", "preset_names"]


def _tiny_dsa() -> Geometry:
    return dsa_geometry(
        "tiny-dsa",
        num_layers=8,
        full_layers=(0, 1, 2, 6),
        latent=64,
        rope=16,
        topk=128,
        index_heads=8,
        index_head_dim=32,
        hidden_size=256,
        vocab_size=264,
        num_heads=8,
        max_context=32768,
        source="this project: GLM-5.3's shape in small, byte-level",
    )


def _glm_5_3() -> Geometry:
    return dsa_geometry(
        "glm-5.3",
        num_layers=78,
        full_layers=(0, 1, *range(2, 78, 4)),
        latent=512,
        rope=64,
        topk=2048,
        index_heads=32,
        index_head_dim=128,
        hidden_size=6144,
        vocab_size=154880,
        num_heads=64,
        max_context=1048576,
        source="Hugging Face config.json of GLM-5.3 (glm_moe_dsa, index_topk_freq 4, offset 3)",
        notes="MTP layer excluded; the first three layers are dense in their MLP only",
    )


def _micro_glm() -> Geometry:
    """GLM-5.3's groups in a size for tests: single layers, then fours. 8-bit rows take one scale."""
    return dsa_geometry(
        "micro-glm",
        num_layers=10,
        full_layers=(0, 1, 2, 6),
        latent=128,
        rope=16,
        topk=16,
        index_heads=8,
        index_head_dim=32,
        hidden_size=64,
        vocab_size=264,
        num_heads=4,
        max_context=512,
        source="this project, made by hand for tests",
    )


def _deepseek_v3_2() -> Geometry:
    return dsa_geometry(
        "deepseek-v3.2",
        num_layers=61,
        full_layers=range(61),
        latent=512,
        rope=64,
        topk=2048,
        index_heads=64,
        index_head_dim=128,
        hidden_size=7168,
        vocab_size=129280,
        num_heads=128,
        max_context=163840,
        source="Hugging Face deepseek-ai/DeepSeek-V3.2-Exp, inference/config_671B_v3.2.json",
        notes="MTP layer excluded",
    )


def _deepseek_v4_1_flash() -> Geometry:
    """Four layers own compressed rows and index keys; eight choose; all 38 from layer 2 on read."""
    owners, sources, last = (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36), 40
    rows = (
        RowFormat("float32", 2048),
        RowFormat("bf16", 1024),
        RowFormat("fp8", 584),
        RowFormat("mxfp8", 528),
        RowFormat("fp4", 288),
    )
    stores = tuple(
        RowStore(
            name=f"L{owner}",
            layers=(owner,),
            row_width=512,
            row_formats=rows,
            index_key_width=128,
            index_formats=(*index_formats(128), RowFormat("fp4", 68)),
            tokens_per_entry=2 if owner < 20 else 1,
        )
        for owner in owners
    )
    selectors = tuple(
        Selector(f"S{first}", f"L{min(first, 20)}", first, tuple(range(first, end)), 512, 32, 128)
        for first, end in zip(sources, (*sources[1:], last), strict=True)
    )
    window = Pinned(
        name="window",
        layers=tuple(range(last)),
        row_formats=(*rows[:-1], RowFormat("fp4", 528)),
        rows_per_request=128,
    )
    return Geometry(
        name="deepseek-v4.1-flash",
        num_layers=last,
        hidden_size=5120,
        vocab_size=129280,
        num_heads=64,
        max_context=1048576,
        stores=stores,
        selectors=selectors,
        pinned=(window,),
        source="DeepSeek-V4.1-Flash config.json and reference code at dba1be0a, as transcribed in "
        "atandra2000/deepseek-v41-flash-lite, docs/architecture-contract.md",
        notes="three DSpark draft layers excluded; layer 20's candidate pool bounds what layers "
        "24 to 36 may choose, not what is stored; context from rope scaling, 65536 x 16",
    )


def _toy_shared() -> Geometry:
    """Every feature in six layers: shared store, m = 2, two-row records, a pinned-only layer."""
    rows = (RowFormat("float32", 24), RowFormat("bf16", 12))
    keys = (RowFormat("float32", 16), RowFormat("bf16", 8))
    return Geometry(
        name="toy-shared",
        num_layers=6,
        hidden_size=16,
        vocab_size=264,
        num_heads=2,
        max_context=512,
        stores=(
            RowStore("A", (0,), 6, rows, 4, keys, tokens_per_entry=2),
            RowStore("B", (3, 4), 6, rows, 4, keys),
        ),
        selectors=(
            Selector("A0", "A", 0, (0, 1), topk=4, index_heads=2, index_head_dim=4),
            Selector("A2", "A", 2, (2,), topk=4, index_heads=2, index_head_dim=4),
            Selector("B3", "B", 3, (3, 4), topk=4, index_heads=2, index_head_dim=4),
        ),
        pinned=(Pinned("window", tuple(range(6)), rows, rows_per_request=8),),
        source="this project, made by hand for tests",
    )


TOY = _toy_shared()
PRESETS: Mapping[str, Geometry] = {
    g.name: g
    for g in (
        _tiny_dsa(),
        _glm_5_3(),
        _deepseek_v3_2(),
        _deepseek_v4_1_flash(),
        TOY,
        _micro_glm(),
    )
}
_HIDDEN = frozenset({TOY.name, "micro-glm"})


def preset_names() -> tuple[str, ...]:
    """The presets shown to users, the default first."""
    return tuple(name for name in PRESETS if name not in _HIDDEN)


def preset(name: str) -> Geometry:
    if name not in PRESETS:
        raise unknown_name("model", name, preset_names())
    return PRESETS[name]


def load_geometry(model: str) -> Geometry:
    """A preset by name, or the geometry of a checkpoint folder (or of its config.json)."""
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    if is_folder(path):
        path = path / "config.json"
        if not path.is_file():
            raise UserError(f"model folder {model!r} has no config.json")
    elif is_folder(path.parent) and path.suffix == ".json" and path.is_file():
        pass
    else:
        raise UserError(f"{unknown_name('model', model, preset_names())}, or a checkpoint folder")
    config = read_json(path)
    return from_hf_config(config, name=path.resolve().parent.name)
