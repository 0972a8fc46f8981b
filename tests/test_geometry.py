"""Geometry: what is refused, who reads what, and that bytes and slices add up on any model."""

from __future__ import annotations

import dataclasses
import json
import pickle
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import (
    INDEX_DTYPES,
    KV_DTYPES,
    Geometry,
    KvBytes,
    Pinned,
    RowFormat,
    RowStore,
    Selector,
    paired_index_dtype,
)
from kvpolicy.geometry.presets import PRESETS, TOY

ROWS = (RowFormat("bf16", 12),)
KEYS = (RowFormat("bf16", 8),)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Any mix of pinned-only layers, own-row groups and shared owners with several selectors."""
    rows = (RowFormat("bf16", draw(st.integers(1, 99))), RowFormat("fp8", draw(st.integers(1, 99))))
    keys = (RowFormat("bf16", draw(st.integers(1, 99))), RowFormat("fp8", draw(st.integers(1, 99))))
    stores: list[RowStore] = []
    selectors: list[Selector] = []
    layer = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        end = layer + sum(sizes)
        owns = len(sizes) == 1 and draw(st.booleans())
        name = f"L{layer}"
        layers = tuple(range(layer, end)) if owns else (layer,)
        stores.append(RowStore(name, layers, 6, rows, 4, keys, draw(st.integers(1, 4))))
        for size in sizes:
            readers = tuple(range(layer, layer + size))
            selectors.append(Selector(f"S{layer}", name, layer, readers, 4, 2, 4))
            layer += size
        layer += draw(st.integers(0, 1))
    window = Pinned("window", tuple(range(layer)), rows, draw(st.none() | st.integers(1, 8)), 3)
    return Geometry("any", layer, 16, 264, 2, 512, tuple(stores), tuple(selectors), (window,))


def small(**changes: Any) -> Geometry:
    """Two layers, one store, one selector: valid until a change breaks it."""
    base = Geometry(
        name="small",
        num_layers=2,
        hidden_size=16,
        vocab_size=264,
        num_heads=2,
        max_context=64,
        stores=(RowStore("A", (0, 1), 6, ROWS, 4, KEYS),),
        selectors=(Selector("S0", "A", 0, (0, 1), 4, 2, 4),),
    )
    return dataclasses.replace(base, **changes)


# --- lookups --------------------------------------------------------------------------------------


def test_toy_says_who_owns_chooses_and_reads() -> None:
    stores = [TOY.store_of_layer(n) for n in range(6)]
    selectors = [TOY.selector_of_layer(n) for n in range(6)]
    assert [s and s.name for s in stores] == ["A", "A", "A", "B", "B", None]
    assert [s and s.name for s in selectors] == ["A0", "A0", "A2", "B3", "B3", None]
    assert [TOY.row_of_layer(n) for n in range(6)] == [0, 0, 0, 0, 1, None]
    assert [s.name for s in TOY.selectors_of("A")] == ["A0", "A2"]
    assert TOY.store("A").entries(7) == 3, "the fourth entry lacks its second token"
    assert TOY.store("B").entries(7) == 7


def test_toy_bytes_by_hand() -> None:
    assert TOY.record_bytes("A", "float32") == 24
    assert TOY.record_bytes("B", "float32") == 48
    rate = TOY.kv_bytes_per_token("float32")
    assert rate == KvBytes(Fraction(24, 2) + 48, Fraction(16, 2) + 16, Fraction(0))
    whole = TOY.kv_bytes(7, "float32")
    assert whole == KvBytes(3 * 24 + 7 * 48, 3 * 16 + 7 * 16, 8 * 6 * 24)
    assert TOY.fixed_bytes("float32") == 8 * 6 * 24
    assert TOY.selected_bytes_per_token("float32") == 4 * 24 + 4 * 24 + 4 * 48


def test_rate_is_exact_when_entries_do_not_divide_bytes() -> None:
    store = RowStore("A", (0, 1), 6, ROWS, 4, KEYS, tokens_per_entry=7)
    assert small(stores=(store,)).kv_bytes_per_token("bf16").total == Fraction(32, 7)


def test_heavily_compressed_pinned_rows_grow_with_the_context() -> None:
    heavy = Pinned("heavy", (0, 1), ROWS, tokens_per_row=16)
    geometry = small(pinned=(heavy,))
    assert geometry.kv_bytes_per_token("bf16").pinned == Fraction(24, 16)
    assert [geometry.kv_bytes(n, "bf16").pinned for n in (0, 15, 16, 64)] == [0, 0, 24, 96]
    assert geometry.fixed_bytes("bf16") == 0


@pytest.mark.parametrize("layer", [-1, 6])
def test_layer_out_of_range_is_named(layer: int) -> None:
    for lookup in (TOY.selector_of_layer, TOY.store_of_layer, TOY.row_of_layer):
        with pytest.raises(UserError, match=rf"layer is {layer}: allowed 0 to 5"):
            lookup(layer)


def test_unknown_names_come_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="unknown store 'C'; allowed: A, B"):
        TOY.store("C")
    with pytest.raises(UserError, match=r"unknown kv_dtype 'bf61' \(did you mean 'bf16'\?\)"):
        TOY.kv_bytes_per_token("bf61")
    with pytest.raises(UserError, match="unknown kv_dtype 'fp8'; allowed: float32, bf16"):
        TOY.kv_bytes(10, "fp8")
    with pytest.raises(UserError, match="unknown index_dtype 'fp4'"):
        TOY.kv_bytes(10, "bf16", "fp4")


def test_every_row_format_has_a_paired_index_format() -> None:
    assert [paired_index_dtype(d) for d in KV_DTYPES] == [*INDEX_DTYPES, "fp4"]


# --- what is refused ------------------------------------------------------------------------------

STORE = RowStore("A", (0, 1), 6, ROWS, 4, KEYS)
SELECTOR = Selector("S0", "A", 0, (0, 1), 4, 2, 4)
OTHER_ROWS = (RowFormat("fp8", 6),)
BAD_GEOMETRIES: dict[str, tuple[dict[str, Any], str]] = {
    "no store": (dict(stores=()), "no row store"),
    "no layers": (dict(num_layers=0), r"num_layers is 0: needs an integer >= 1"),
    "bool for int": (dict(vocab_size=True), r"vocab_size is True"),
    "same store name": (dict(stores=(STORE, STORE)), "store name A is used twice"),
    "same selector name": (dict(selectors=(SELECTOR, SELECTOR)), "selector name S0 is used twice"),
    "layer outside": (dict(num_layers=1), "store 'A' names layer 1: layers are 0 to 0"),
    "uncovered layer": (dict(num_layers=3), r"layers \[2\] read nothing"),
    "unknown store": (
        dict(selectors=(dataclasses.replace(SELECTOR, store="B"),)),
        "unknown store 'B'",
    ),
    "index width": (
        dict(selectors=(dataclasses.replace(SELECTOR, index_head_dim=8),)),
        "index_head_dim is 8: the index keys of store 'A' have 4 values",
    ),
    "keys not there yet": (
        dict(stores=(dataclasses.replace(STORE, layers=(1,)),)),
        "chooses at layer 0: the index keys of store 'A' exist from layer 1",
    ),
    "reader without a row": (
        dict(num_layers=3, selectors=(dataclasses.replace(SELECTOR, reader_layers=(0, 1, 2)),)),
        r"read by layers \[2\] without a row in store 'A'",
    ),
    "unread rows": (
        dict(selectors=(dataclasses.replace(SELECTOR, reader_layers=(0,)),)),
        r"keeps rows of layers \[1\] that no selector reads",
    ),
    "two choices in a layer": (
        dict(selectors=(SELECTOR, dataclasses.replace(SELECTOR, name="S1"))),
        r"layers \[0, 1\] read two selectors",
    ),
    "two stores in a layer": (
        dict(
            stores=(STORE, dataclasses.replace(STORE, name="B", layers=(1,))),
            selectors=(SELECTOR, Selector("S1", "B", 1, (1,), 4, 2, 4)),
        ),
        r"layers \[1\] have rows in two stores",
    ),
    "formats differ": (
        dict(pinned=(Pinned("w", (0,), OTHER_ROWS, 8),)),
        "'w' has formats fp8: all parts share those of the first store, bf16",
    ),
}


@pytest.mark.parametrize("case", BAD_GEOMETRIES)
def test_bad_geometry_is_refused_in_one_line(case: str) -> None:
    changes, message = BAD_GEOMETRIES[case]
    with pytest.raises(UserError, match=message) as error:
        small(**changes)
    assert "\n" not in str(error.value)


def test_bad_parts_are_refused() -> None:
    with pytest.raises(UserError, match="row_bytes is 0"):
        RowFormat("bf16", 0)
    with pytest.raises(UserError, match=r"unknown format in store 'A'\.row_formats 'int9'"):
        RowStore("A", (0,), 6, (RowFormat("int9", 1),), 4, KEYS)
    with pytest.raises(UserError, match="lists a format twice: bf16, bf16"):
        RowStore("A", (0,), 6, ROWS * 2, 4, KEYS)
    with pytest.raises(UserError, match="index_formats lists no format"):
        RowStore("A", (0,), 6, ROWS, 4, ())
    with pytest.raises(UserError, match="tokens_per_entry is 0"):
        RowStore("A", (0,), 6, ROWS, 4, KEYS, tokens_per_entry=0)
    for layers in ((), (1, 0), (0, 0), (-1,)):
        with pytest.raises(UserError, match="layers is"):
            RowStore("A", layers, 6, ROWS, 4, KEYS)
    with pytest.raises(UserError, match="source_layer is 1: must be the first"):
        Selector("S", "A", 1, (0, 1), 4, 2, 4)
    with pytest.raises(UserError, match="topk is 0"):
        Selector("S", "A", 0, (0,), 0, 2, 4)
    with pytest.raises(UserError, match="rows_per_request is 0"):
        Pinned("w", (0,), ROWS, rows_per_request=0)


# --- properties -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(geometries(), st.integers(0, 5000), st.sampled_from(["bf16", "fp8"]))
def test_total_is_the_sum_over_stores_and_pinned(g: Geometry, tokens: int, dtype: str) -> None:
    parts = sum(
        s.entries(tokens) * (s.record_bytes(dtype) + s.index_key_bytes(dtype)) for s in g.stores
    )
    parts += sum(p.bytes(tokens, dtype) for p in g.pinned)
    assert g.kv_bytes(tokens, dtype).total == parts


@settings(deadline=None)
@given(geometries(), st.integers(0, 100), st.sampled_from(["bf16", "fp8"]))
def test_rate_is_exact_at_whole_entries(g: Geometry, k: int, dtype: str) -> None:
    tokens = k * 12  # a multiple of every tokens_per_entry (1 to 4) and tokens_per_row (3)
    rate = g.kv_bytes_per_token(dtype).total
    assert g.kv_bytes(tokens, dtype).total == rate * tokens + g.fixed_bytes(dtype)
    assert g.kv_bytes(tokens + 1, dtype).total <= rate * (tokens + 1) + g.fixed_bytes(dtype)


@settings(deadline=None)
@given(geometries())
def test_every_layer_has_one_store_or_pinned_rows_only(g: Geometry) -> None:
    for layer in range(g.num_layers):
        readers = [s for s in g.selectors if layer in s.reader_layers]
        assert len(readers) <= 1
        assert g.selector_of_layer(layer) == (readers[0] if readers else None)
        if not readers:
            assert any(layer in pinned.layers for pinned in g.pinned)
            assert g.store_of_layer(layer) is None
            assert g.row_of_layer(layer) is None
            continue
        store, row = g.store_of_layer(layer), g.row_of_layer(layer)
        assert store is not None
        assert row is not None
        assert store.layers[row] == (layer if layer in store.layers else store.layers[0])
        assert readers[0] in g.selectors_of(store.name)


@settings(deadline=None)
@given(geometries(), st.data())
def test_slices_are_valid_and_compose(g: Geometry, data: st.DataObject) -> None:
    least = g.stores[0].layers[0] + 1
    n = data.draw(st.integers(least, g.num_layers))
    cut = g.slice(n)  # construction validates
    assert cut.num_layers == n
    for layer in range(n):
        whole, part = g.selector_of_layer(layer), cut.selector_of_layer(layer)
        assert (whole and whole.name) == (part and part.name)
        assert g.row_of_layer(layer) == cut.row_of_layer(layer)
    assert cut.kv_bytes(100, "bf16").total <= g.kv_bytes(100, "bf16").total
    m = data.draw(st.integers(least, n))
    assert cut.slice(m) == g.slice(m)
    assert g.slice(g.num_layers) is g


@settings(deadline=None)
@given(geometries())
def test_geometry_is_a_value(g: Geometry) -> None:
    twin = pickle.loads(pickle.dumps(g))
    assert twin == g
    assert hash(twin) == hash(g)
    assert json.loads(json.dumps(g.to_dict())) == g.to_dict()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_slices_at_every_length(name: str) -> None:
    geometry = PRESETS[name]
    least = geometry.stores[0].layers[0] + 1
    for n in range(least, geometry.num_layers + 1):
        assert geometry.slice(n).num_layers == n
    for n in (-1, 0, least - 1, geometry.num_layers + 1):
        with pytest.raises(UserError, match=f"layers is {n}: {name} allows {least} to"):
            geometry.slice(n)


def test_slice_cuts_stores_readers_and_pinned_at_the_edge() -> None:
    cut = TOY.slice(4)
    assert cut.name == "toy-shared[:4]"
    assert cut.store("B").layers == (3,)
    assert cut.selectors_of("B")[0].reader_layers == (3,)
    assert cut.pinned[0].layers == (0, 1, 2, 3)
    assert [s.name for s in TOY.slice(2).selectors] == ["A0"]
    assert [s.name for s in TOY.slice(2).stores] == ["A"]
