"""Presets against published arithmetic, and geometries read from Hugging Face configs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.errors import UserError
from kvpolicy.geometry.dsa import index_formats
from kvpolicy.geometry.geometry import Geometry, Pinned, RowFormat, RowStore, Selector
from kvpolicy.geometry.presets import (
    PRESETS,
    TOY,
    from_hf_config,
    load_geometry,
    preset,
    preset_names,
)

GLM_5_3: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "vocab_size": 154880,
    "num_attention_heads": 64,
    "max_position_embeddings": 1048576,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
}
GLM_5 = GLM_5_3 | {"index_topk_freq": 1, "max_position_embeddings": 202752}
GLM_5_3_FULL = {0, 1, *range(2, 78, 4)}


def deepseek_v4_flash() -> Geometry:
    """A model with all three words at once: two window layers, 21 stores with m = 4, and 20 layers
    of rows compressed 128-fold, always resident (config compress_ratios [0, 0, 4, 128, ..., 4])."""
    rows = (RowFormat("bf16", 1024), RowFormat("fp8", 584))
    keys = (*index_formats(128), RowFormat("fp4", 68))
    even, odd = range(2, 43, 2), tuple(range(3, 43, 2))
    return Geometry(
        name="deepseek-v4-flash",
        num_layers=43,
        hidden_size=4096,
        vocab_size=129280,
        num_heads=64,
        max_context=1048576,
        stores=tuple(RowStore(f"L{n}", (n,), 512, rows, 128, keys, 4) for n in even),
        selectors=tuple(Selector(f"S{n}", f"L{n}", n, (n,), 512, 64, 128) for n in even),
        pinned=(
            Pinned("window", tuple(range(43)), rows, rows_per_request=128),
            Pinned("heavy", odd, rows, tokens_per_row=128),
        ),
    )


GEOMETRIES = {
    "deepseek-v3.2": preset("deepseek-v3.2"),
    "glm-5": from_hf_config(GLM_5, "glm-5"),
    "glm-5.3": preset("glm-5.3"),
    "deepseek-v4-flash": deepseek_v4_flash(),
    "deepseek-v4.1-flash": preset("deepseek-v4.1-flash"),
}

# model, row format, index format, B/token, index part, fixed B, GB at 100K and 500K (1 GB = 1e9 B).
# Cross-checks: 2.5 * (288 + 68) = 890 B/token is DeepSeek's own figure for V4.1 with fp4.
ARITHMETIC = [
    ("deepseek-v3.2", "bf16", "bf16", 85888, 15616, 0, 8.589, 42.944),
    ("deepseek-v3.2", "fp8", "fp8", 48068, 8052, 0, 4.807, 24.034),
    ("glm-5", "bf16", "bf16", 109824, 19968, 0, 10.982, 54.912),
    ("glm-5", "fp8", "fp8", 61464, 10296, 0, 6.146, 30.732),
    ("glm-5.3", "bf16", "bf16", 95232, 5376, 0, 9.523, 47.616),
    ("glm-5.3", "fp8", "fp8", 53940, 2772, 0, 5.394, 26.970),
    ("deepseek-v4-flash", "bf16", "bf16", 6880, 1344, 5_636_096, 0.694, 3.446),
    ("deepseek-v4-flash", "fp8", "fp8", 3850.25, 693, 3_214_336, 0.388, 1.928),
    ("deepseek-v4-flash", "fp8", "fp4", 3514.25, 357, 3_214_336, 0.355, 1.760),
    ("deepseek-v4.1-flash", "bf16", "bf16", 3200, 640, 5_242_880, 0.325, 1.605),
    ("deepseek-v4.1-flash", "fp8", "fp8", 1790, 330, 2_990_080, 0.182, 0.898),
    ("deepseek-v4.1-flash", "mxfp8", "fp4", 1490, 170, 2_703_360, 0.152, 0.748),
    ("deepseek-v4.1-flash", "fp4", "fp4", 890, 170, 2_703_360, 0.092, 0.448),
]


@pytest.mark.parametrize("row", ARITHMETIC, ids=lambda r: "-".join(r[:3]))
def test_kv_bytes_match_published_arithmetic(row: tuple[Any, ...]) -> None:
    model, kv_dtype, index_dtype, per_token, index, fixed, gb_100k, gb_500k = row
    geometry = GEOMETRIES[model]
    rate = geometry.kv_bytes_per_token(kv_dtype, index_dtype)
    assert rate.total == per_token
    assert rate.index == index
    assert geometry.fixed_bytes(kv_dtype) == fixed
    whole = [geometry.kv_bytes(n, kv_dtype, index_dtype).total for n in (100_000, 500_000)]
    assert [round(n / 1e9, 3) for n in whole] == [gb_100k, gb_500k]


def test_flashmla_figure_for_v3_2_with_its_mtp_layer() -> None:
    """FlashMLA: 576 values * 2 B * 62 layers * 128 Ki tokens = 8.72 GiB (the 62nd is the MTP's)."""
    rows = preset("deepseek-v3.2").kv_bytes_per_token("bf16").rows
    assert round(float(rows / 61 * 62 * 128 * 1024 / 2**30), 2) == 8.72


@pytest.mark.parametrize(
    ("model", "kv_dtype", "layers_read", "topk", "row_bytes", "megabytes"),
    [
        ("deepseek-v3.2", "fp8", 61, 2048, 656, 82.0),
        ("glm-5", "fp8", 78, 2048, 656, 104.8),
        ("glm-5.3", "fp8", 78, 2048, 656, 104.8),
        ("deepseek-v4-flash", "fp8", 21, 512, 584, 6.3),
        ("deepseek-v4.1-flash", "mxfp8", 8, 512, 528, 2.2),
    ],
)
def test_fetch_volume(
    model: str, kv_dtype: str, layers_read: int, topk: int, row_bytes: int, megabytes: float
) -> None:
    volume = GEOMETRIES[model].selected_bytes_per_token(kv_dtype)
    assert volume == layers_read * topk * row_bytes
    assert round(volume / 1e6, 1) == megabytes


def test_tiny_dsa() -> None:
    tiny = preset("tiny-dsa")
    assert [s.layers for s in tiny.stores] == [(0,), (1,), (2, 3, 4, 5), (6, 7)]
    assert [(s.source_layer, s.topk) for s in tiny.selectors] == [
        (0, 128),
        (1, 128),
        (2, 128),
        (6, 128),
    ]
    assert tiny.stores[0].row_bytes("float32") == (64 + 16) * 4
    assert tiny.stores[0].index_key_bytes("float32") == 32 * 4
    assert tiny.stores[0].index_key_bytes("bf16") == 32 * 2
    assert tiny.stores[0].row_bytes("fp8") == 64 + 4 + 16 * 2
    assert (tiny.hidden_size, tiny.vocab_size, tiny.num_heads, tiny.max_context) == (
        256,
        264,
        8,
        32768,
    )


def test_glm_5_3_has_one_store_per_index_sharing_group() -> None:
    glm = preset("glm-5.3")
    assert {s.source_layer for s in glm.selectors} == GLM_5_3_FULL
    assert [s.n_layers for s in glm.stores] == [1, 1] + [4] * 19
    assert glm.store("L74-77").layers == (74, 75, 76, 77)
    assert all(s.reader_layers == glm.store(s.store).layers for s in glm.selectors)


def test_deepseek_v3_2_chooses_in_every_layer() -> None:
    v32 = preset("deepseek-v3.2")
    assert [s.layers for s in v32.stores] == [(n,) for n in range(61)]
    assert [s.reader_layers for s in v32.selectors] == [(n,) for n in range(61)]


def test_deepseek_v4_1_flash_keeps_the_three_words_apart() -> None:
    v41 = preset("deepseek-v4.1-flash")
    assert [(s.layers, s.tokens_per_entry) for s in v41.stores] == [
        ((2,), 2),
        ((8,), 2),
        ((14,), 2),
        ((20,), 1),
    ]
    assert [s.source_layer for s in v41.selectors] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [s.source_layer for s in v41.selectors_of("L20")] == [20, 24, 28, 32, 36]
    owners = [s and s.layers[0] for s in map(v41.store_of_layer, range(40))]
    assert owners == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert v41.pinned[0].layers == tuple(range(40))
    assert v41.pinned[0].rows_per_request == 128
    assert {v41.row_of_layer(n) for n in range(2, 40)} == {0}


def test_toy_is_hidden_but_found() -> None:
    assert preset_names() == ("tiny-dsa", "glm-5.3", "deepseek-v3.2", "deepseek-v4.1-flash")
    assert preset("toy-shared") is TOY is PRESETS["toy-shared"]
    assert all(PRESETS[name].name == name for name in PRESETS)
    assert all(geometry.source for geometry in PRESETS.values())


# --- Hugging Face configs -------------------------------------------------------------------------


def same_model(a: Geometry, b: Geometry) -> bool:
    return dataclasses.replace(a, name=b.name, source=b.source, notes=b.notes) == b


def test_hf_config_gives_the_preset() -> None:
    assert same_model(from_hf_config(GLM_5_3), preset("glm-5.3"))


def test_hf_config_spelled_three_ways_is_one_model() -> None:
    types = ["full" if n in GLM_5_3_FULL else "shared" for n in range(78)]
    explicit = GLM_5_3 | {"indexer_types": types, "index_topk_freq": 1}
    pattern = GLM_5_3 | {"index_topk_pattern": "".join(t[0].upper() for t in types)}
    assert from_hf_config(explicit) == from_hf_config(pattern) == from_hf_config(GLM_5_3)


def test_hf_config_of_glm_5_has_no_sharing() -> None:
    config = {k: v for k, v in GLM_5.items() if not k.startswith(("index_topk_", "index_skip"))}
    assert [s.n_layers for s in from_hf_config(config).stores] == [1] * 78


@pytest.mark.oracle
@settings(deadline=None)  # the first example imports transformers
@given(st.integers(1, 40), st.integers(0, 6), st.integers(0, 9))
def test_schedule_agrees_with_transformers(layers: int, freq: int, offset: int) -> None:
    config_class = pytest.importorskip("transformers").GlmMoeDsaConfig
    schedule = {
        "num_hidden_layers": layers,
        "index_topk_freq": freq,
        "index_skip_topk_offset": offset,
    }
    expected = config_class(**schedule).indexer_types
    if expected[0] == "full":
        full = [n for n, kind in enumerate(expected) if kind == "full"]
        geometry = from_hf_config(GLM_5_3 | schedule)
        assert [s.source_layer for s in geometry.selectors] == full


REQUIRED = [k for k in GLM_5_3 if k not in ("model_type", "index_topk_freq")][:-1]


@pytest.mark.parametrize("field", REQUIRED)
@pytest.mark.parametrize("value", [None, 0, -1, "8", 2.5, True])
def test_hf_field_is_checked(field: str, value: object) -> None:
    problem = "missing" if value is None else f"{value!r}"
    with pytest.raises(UserError, match=rf"config field {field} is {problem}: needs an integer"):
        from_hf_config(GLM_5_3 | {field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "glm_moe"}, r"unknown model_type 'glm_moe' \(did you mean 'glm_moe_dsa'"),
        ({"model_type": None}, "unknown model_type 'None'"),
        ({"indexer_types": ["full"]}, "needs a list of num_hidden_layers = 78 entries"),
        ({"indexer_types": "full"}, "needs a list of num_hidden_layers = 78 entries"),
        ({"indexer_types": ["full"] * 77 + ["none"]}, r"\[77\] is 'none': allowed full, shared"),
        ({"indexer_types": ["full"] * 77 + [[]]}, r"\[77\] is \[\]: allowed full, shared"),
        ({"indexer_types": ["shared"] * 78}, "first layer must be full"),
        ({"index_topk_pattern": "F" * 77 + "X"}, r"index_topk_pattern\[77\] is 'X'"),
        ({"index_topk_freq": "4"}, "index_topk_freq is '4'"),
    ],
)
def test_hf_config_errors_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        from_hf_config(GLM_5_3 | change)
    assert "\n" not in str(error.value)


def test_load_geometry_from_name_folder_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "my-glm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GLM_5_3))
    assert load_geometry("tiny-dsa") is preset("tiny-dsa")
    loaded = load_geometry(str(folder))
    assert loaded.name == "my-glm"
    assert same_model(loaded, preset("glm-5.3"))
    assert load_geometry(str(folder / "config.json")) == loaded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("{", "not readable JSON"),
        ("[]", "holds no JSON object"),
        ('{"model_type": "llama"}', "unknown model_type 'llama'"),
    ],
)
def test_load_geometry_refuses_a_bad_folder(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_geometry(str(tmp_path))


def test_unknown_model_is_one_line_with_a_suggestion() -> None:
    with pytest.raises(UserError) as error:
        load_geometry("glm5.3")
    assert str(error.value) == (
        "unknown model 'glm5.3' (did you mean 'glm-5.3'?); allowed: tiny-dsa, glm-5.3, "
        "deepseek-v3.2, deepseek-v4.1-flash, or a checkpoint folder"
    )
    with pytest.raises(UserError, match="did you mean 'tiny-dsa'"):
        preset("tiny-das")
