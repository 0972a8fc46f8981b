"""Plug-ins: what other distributions offer through entry points. Found without importing them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, entry_points

from kvpolicy.errors import UserError, reason

__all__ = ["Found", "Plugin", "check_name", "find_plugins"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point. kind: what it adds ("controller"); distribution: name and version."""

    kind: str
    name: str
    distribution: str
    point: EntryPoint

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.kind} {self.name!r} of {self.distribution} ({self.point.value})"

    def load(self) -> object:
        """Import what the entry point names. UserError, naming the distribution, if that fails."""
        try:
            return self.point.load()
        except (Exception, SystemExit) as error:
            log.debug("%s cannot be loaded", self.label, exc_info=True)
            raise UserError(f"{self.label} cannot be loaded: {reason(error)}") from None


@dataclass(frozen=True, slots=True)
class Found:
    """The plug-ins of a group by name, and one line about each that is refused."""

    plugins: dict[str, Plugin]
    refused: tuple[str, ...]


def find_plugins(group: str, kind: str, built_in: Collection[str]) -> Found:
    """Entry points of ``group`` in all installed distributions, none of them imported.

    Refused are names of ``built_in``, names that cannot stand in a spec, and names that two
    distributions offer (which one would be meant depends on the order of the search path).
    """
    offers: dict[str, list[Plugin]] = {}
    for point in entry_points(group=group):
        plugin = Plugin(kind, point.name, _title(point.dist), point)
        offers.setdefault(point.name, []).append(plugin)
    plugins = {}
    refused: list[str] = []
    for name, same in sorted(offers.items()):
        problem = _problem(name, same, built_in)
        if problem:
            refused += [f"{plugin.label} is refused: {problem}" for plugin in same]
        else:
            plugins[name] = same[0]
    return Found(plugins, tuple(refused))


def check_name(kind: str, name: object) -> None:
    """UserError for a name that could not be told from the rest of a spec or from a file."""
    allowed = isinstance(name, str) and name and not any(c in name for c in ":=, /\\\n")
    if not allowed or str(name).endswith(".py"):
        raise UserError(
            f"{kind} name {name!r}: must be non-empty, without ':', '=', ',', '/' or spaces, "
            "and must not end in .py"
        )


def _problem(name: str, same: list[Plugin], built_in: Collection[str]) -> str:
    if name in built_in:
        return "the name is built in"
    if len(same) > 1:
        return f"{len(same)} distributions offer the name"
    try:
        check_name(same[0].kind, name)
    except UserError as error:
        return str(error)
    return ""


def _title(distribution: Distribution | None) -> str:
    """Name and version; of a distribution without metadata the name of its folder."""
    name = version = ""
    try:
        assert distribution is not None
        metadata = distribution.metadata
        name, version = metadata["Name"] or "", metadata["Version"] or ""
    except Exception:  # whatever a broken METADATA makes the reader raise
        log.debug("a distribution without readable metadata", exc_info=True)
    if name:
        return f"{name} {version}".rstrip()
    return getattr(getattr(distribution, "_path", None), "stem", "") or "an unnamed distribution"
