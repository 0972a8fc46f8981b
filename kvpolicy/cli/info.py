"""`kvpolicy info`: what a model's KV costs per token and how many requests fit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpolicy.cli.output import check_output, emit_json
from kvpolicy.config import EngineConfig
from kvpolicy.errors import UserError
from kvpolicy.geometry.hf_config import EMBEDDED, is_folder
from kvpolicy.geometry.info import Fit, InfoReport, describe
from kvpolicy.geometry.presets import load_geometry

MIB = 1 << 20


def info_command(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|PATH", help="Preset or checkpoint folder.")
    ] = "tiny-dsa",
    layers: Annotated[
        int | None, typer.Option("--layers", help="Only the first N layers of the model.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens per request (100000, or what the model allows)."),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            help="Row format: float32, bf16, fp8, ... by model (default: float32 for a model that "
            "runs here, as engines keep it; bf16 for a geometry alone).",
        ),
    ] = None,
    index_dtype: Annotated[
        str | None, typer.Option("--index-dtype", help="Index-key format (goes with --kv-dtype).")
    ] = None,
    device_kv_mib: Annotated[
        int | None, typer.Option("--device-kv-mib", help="Device memory for KV of all kinds.")
    ] = None,
    host_kv_mib: Annotated[
        int | None, typer.Option("--host-kv-mib", help="Host memory for KV.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the JSON to a file.")
    ] = None,
) -> None:
    """Show a model's KV geometry, its bytes per token, and how many requests fit."""
    check_output(output)
    geometry = load_geometry(model)
    if layers is not None:
        geometry = geometry.slice(layers)
    report = describe(
        geometry,
        context,
        kv_dtype or default_kv_dtype(model),
        index_dtype,
        _mib("--device-kv-mib", device_kv_mib),
        _mib("--host-kv-mib", host_kv_mib),
    )
    emit_json(report.to_dict(), to_stdout=as_json, path=output)
    if not as_json:
        print_report(report, Console())


def default_kv_dtype(model: str) -> str:
    """What an engine keeps of a model that it can load; else what large models are served with."""
    runs = model in EMBEDDED or (
        is_folder(Path(model)) and (Path(model) / "model.safetensors").is_file()
    )
    return str(EngineConfig.model_fields["kv_dtype"].default) if runs else "bf16"


def print_report(report: InfoReport, console: Console) -> None:
    """The tables of `kvpolicy info`, laid out for 80 columns."""
    geometry = report.geometry
    console.print(
        f"[bold]{escape(geometry.name)}[/bold]: {geometry.num_layers} layers, hidden "
        f"{geometry.hidden_size:,}, {geometry.num_heads} heads, vocabulary "
        f"{geometry.vocab_size:,}, context up to {geometry.max_context:,} tokens",
        highlight=False,
    )
    console.print(f"source: {escape(geometry.source)}", highlight=False, style="dim")
    if geometry.notes:
        console.print(f"notes: {escape(geometry.notes)}", highlight=False, style="dim")
    console.print(_stores_table(report))
    console.print(_selectors_table(report))
    if geometry.pinned:
        console.print(_pinned_table(report))
    console.print(_bytes_table(report))
    console.print(
        f"Fetched per decoded token if every selected row came from the host: "
        f"{_size(report.fetch_bytes_per_token)}",
        highlight=False,
    )
    console.print(_request_table(report))
    if report.fit is None:
        console.print(
            "Add --device-kv-mib and --host-kv-mib to see how many requests fit.", highlight=False
        )
    else:
        console.print(_fit_table(report, report.fit))
        console.print(_verdict(report.fit), highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _stores_table(report: InfoReport) -> Table:
    """One line per kind of store: the many equal ones of a deep model are counted, not listed."""
    table = _table(
        f"Row stores ({report.kv_dtype} rows, {report.index_dtype} index keys)",
        *("stores", "layers each", "tokens/entry", "row B", "record B", "index key B"),
    )
    kinds = Counter(
        (
            str(store.n_layers),
            str(store.tokens_per_entry),
            f"{store.row_bytes(report.kv_dtype):,}",
            f"{store.record_bytes(report.kv_dtype):,}",
            f"{store.index_key_bytes(report.index_dtype):,}",
        )
        for store in report.geometry.stores
    )
    for kind, count in kinds.items():
        table.add_row(f"{count} x", *kind)
    return table


def _selectors_table(report: InfoReport) -> Table:
    """One line per kind of selector. "on its store" counts those that share its store."""
    geometry = report.geometry
    table = _table(
        "Selectors (each a top-k per query row)",
        *("selectors", "reading layers", "on its store", "top-k entries", "index heads"),
    )
    kinds = Counter(
        (
            str(len(s.reader_layers)),
            str(len(geometry.selectors_of(s.store))),
            f"{s.topk:,}",
            f"{s.index_heads} x {s.index_head_dim}",
        )
        for s in geometry.selectors
    )
    for kind, count in kinds.items():
        table.add_row(f"{count} x", *kind)
    return table


def _pinned_table(report: InfoReport) -> Table:
    table = _table("Pinned rows (always on the device)", "name", "layers", "rows/layer", "bytes")
    for pinned in report.geometry.pinned:
        rows = pinned.rows(report.context)
        total = pinned.bytes(report.context, report.kv_dtype)
        table.add_row(pinned.name, str(len(pinned.layers)), f"{rows:,}", _size(total))
    return table


def _bytes_table(report: InfoReport) -> Table:
    rate, whole = report.bytes_per_token, report.bytes_at_context
    table = _table("KV of one request", "part", "B/token", f"at {report.context:,} tokens")
    table.add_row("rows", f"{float(rate.rows):,.1f}", _size(whole.rows))
    table.add_row("index keys", f"{float(rate.index):,.1f}", _size(whole.index))
    if report.geometry.pinned:
        table.add_row("pinned rows", f"{float(rate.pinned):,.1f}", _size(whole.pinned))
    table.add_row("total", f"{float(rate.total):,.1f}", _size(whole.total), style="bold")
    return table


def _request_table(report: InfoReport) -> Table:
    one, rows = report.per_request, report.hot_rows_per_layer
    buffer = "2 x top-k" if rows is None else f"{rows:,}"
    table = _table("Device memory of one request", "held", "bytes")
    table.add_row(f"hot buffer, {buffer} rows per layer", _size(one.hot_rows))
    table.add_row("index keys", _size(one.index_keys))
    table.add_row("slot maps", _size(one.slot_maps))
    if report.geometry.pinned:
        table.add_row("pinned rows", _size(one.pinned))
    table.add_row("total with hot buffer", _size(one.hot), style="bold")
    table.add_row("total fully resident", _size(one.resident), style="bold")
    return table


def _fit_table(report: InfoReport, fit: Fit) -> Table:
    table = _table(
        f"Concurrent requests of {report.context:,} tokens that fit", "memory", "size", "requests"
    )
    device, host = _limit(report.device_kv_bytes), _limit(report.host_kv_bytes)
    table.add_row("device, fully resident", device, _count(fit.resident))
    table.add_row("device, hot buffers", device, _count(fit.hot_device))
    table.add_row("host, all rows", host, _count(fit.hot_host))
    return table


def _verdict(fit: Fit) -> str:
    return f"Requests that fit with hot buffers: {fit.hot:,} ({fit.binding} memory binds)"


def _limit(size: int | None) -> str:
    return "not given" if size is None else f"{size // MIB:,} MiB"


def _count(requests: int | None) -> str:
    return "-" if requests is None else f"{requests:,}"


def _size(size: int) -> str:
    """Binary units, as the options for memory: 1 MiB = 2**20 bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.3f} {unit}"
    return f"{size} B"


def _mib(option: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UserError(f"{option} is {value}: needs an integer >= 1")
    return None if value is None else value * MIB
