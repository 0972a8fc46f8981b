"""How options become an EngineConfig and SamplingParams.

A later source wins: defaults, --config, --set, the option itself. A config file is a flat YAML
mapping; its keys, like those of --set, are the fields of EngineConfig and SamplingParams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvpolicy import __version__
from kvpolicy.cli.options import ENGINE_DEFAULTS, SAMPLING_DEFAULTS, SETTINGS, Options
from kvpolicy.config import EngineConfig, SamplingParams, load_yaml, parse_override
from kvpolicy.errors import UserError, unknown_name
from kvpolicy.telemetry.slo import Slo, parse_slo

if TYPE_CHECKING:
    from kvpolicy.workloads.workload import Workload

__all__ = ["LATER_VALUES", "Resolved", "resolve"]

LATER_VALUES: Mapping[str, tuple[str, ...]] = {
    "model": ("tiny-csa",),
}
"""Values of settings that are kept for a later version."""


@dataclass(frozen=True)
class Resolved:
    """The settings of a command. controllers, drafters: what was named, in order, perhaps nothing.

    workload: what was named, None for prompts. tpot_bound: seconds. shadows: specs, in order.
    """

    engine: EngineConfig
    sampling: SamplingParams
    controllers: tuple[str, ...]
    drafters: tuple[str, ...]
    workload: Workload | None = None
    slo: Slo | None = None
    tpot_bound: float | None = None
    shadows: tuple[str, ...] = ()


BLOCKS = ("policy", "server")
"""Blocks in a server's config; the server reads them."""


def resolve(options: Options, extra: Mapping[str, Any] | None = None) -> Resolved:
    """Merge the sources of settings; anything wrong with them is a UserError.

    extra: settings of a server's config that stand in blocks (None: such a config is refused).
    """
    values: dict[str, Any] = {}
    if options.config is not None:
        values |= _from_file(options.config, () if extra is None else BLOCKS)
    for key in extra or ():
        if key in values:
            raise UserError(f"config {str(options.config)!r}: {key!r} is given twice")
    values |= extra or {}
    for text in options.overrides or ():
        key, value = parse_override(text)
        _check_key(key, f"--set {text!r}")
        values[key] = value
    values |= {
        key: given
        for key in SETTINGS
        if (given := getattr(options, key, None)) not in (None, []) and key not in _REPEATED
    }
    controllers = _named("controller", options.controller, values)
    drafters = _named("drafter", options.drafter, values)
    _check_drafters(drafters, values, bool(options.shadow))
    _refuse_later_values(values)
    if isinstance(values.get("stop"), str | bytes):
        values["stop"] = (values["stop"],)
    _check_utf8(values.get("stop"))
    sampling = SamplingParams(**{key: values[key] for key in SAMPLING_DEFAULTS if key in values})
    workload = _workload(options.workload, values)
    if workload is not None and workload.peak is not None:
        # A load that keeps N in the system is about memory: seats must not be what binds.
        seats = max(workload.peak, ENGINE_DEFAULTS["max_concurrency"])
        values.setdefault("max_concurrency", seats)
    engine = EngineConfig(**{key: values[key] for key in ENGINE_DEFAULTS if key in values})
    return Resolved(
        engine,
        sampling,
        controllers,
        drafters,
        workload=workload,
        slo=None if options.slo is None else parse_slo(options.slo),
        tpot_bound=_tpot_bound(options.tpot_bound_ms),
        shadows=tuple(options.shadow or ()),
    )


_REPEATED = ("controller", "drafter")


def _named(key: str, given: list[str] | None, values: dict[str, Any]) -> tuple[str, ...]:
    """What an option names that may be repeated; the first becomes the setting."""
    if given:
        values[key] = given[0]
    return tuple(given or ([values[key]] if key in values else []))


def _check_drafters(drafters: tuple[str, ...], values: Mapping[str, Any], shadows: bool) -> None:
    from kvpolicy.speculative import registry

    for name in drafters:
        registry.check(name)
    drafting = any(name != registry.NONE for name in drafters)
    if drafting and shadows:
        raise UserError("--shadow follows one row per request and step: not with a --drafter")
    if not drafting and values.get("num_draft_tokens"):
        raise UserError("--num-draft-tokens goes with a --drafter")


def _workload(uri: str | None, values: Mapping[str, Any]) -> Workload | None:
    """The named workload; clock, seed and length of answers are the general options', if given."""
    if uri is None:
        return None
    from kvpolicy.workloads import make

    clock = values.get("clock", ENGINE_DEFAULTS["clock"])
    return make(uri, clock, seed=values.get("seed"), output_tokens=values.get("max_new_tokens"))


def _tpot_bound(milliseconds: float | None) -> float | None:
    if milliseconds is None:
        return None
    if not (math.isfinite(milliseconds) and milliseconds > 0):
        raise UserError(f"--tpot-bound-ms {milliseconds:g}: must be a number above 0")
    return milliseconds / 1e3


def _from_file(path: Path, blocks: tuple[str, ...] = ()) -> dict[str, Any]:
    origin = f"config {str(path)!r}"
    values: dict[str, Any] = {}
    for key, value in load_yaml(path).items():
        name = key.replace("-", "_")
        if name in blocks:
            continue
        _check_key(name, origin)
        if name in values:
            raise UserError(f"{origin}: {name!r} is given twice")
        values[name] = value
    for name in _written_twice(path):
        raise UserError(f"{origin}: {name!r} is given twice")
    return values


def _written_twice(path: Path) -> Iterator[str]:
    """Keys that YAML would silently overwrite."""
    if not path.is_file():  # a pipe can be read only once
        return
    node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    seen: set[str] = set()
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value in seen:
            yield key.value
        seen.add(key.value)


def _check_key(key: str, origin: str) -> None:
    if key not in SETTINGS:
        raise UserError(f"{origin}: {unknown_name('option', key, SETTINGS)}")


def _check_utf8(stop: Any) -> None:
    """Stop texts are compared as bytes; bytes of the command line may not have decoded."""
    for text in stop if isinstance(stop, list | tuple) else ():
        try:
            str(text).encode()
        except UnicodeEncodeError:
            raise UserError(f"stop text {text!r} is not UTF-8") from None


def _not_yet(what: str) -> UserError:
    return UserError(f"{what} is not available yet in version {__version__} (see docs/claims.md)")


def _refuse_later_values(values: Mapping[str, Any]) -> None:
    for key, later in LATER_VALUES.items():
        if values.get(key) in later:
            raise _not_yet(f"'--{key.replace('_', '-')} {values[key]}'")
