"""Plug-ins: what other distributions offer through entry points. Found without importing them."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions

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
    refused: list[str] = []
    for distribution, points in _by_distribution(group, refused):
        for point in points:
            offers.setdefault(point.name, []).append(Plugin(kind, point.name, distribution, point))
    plugins = {}
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


def _by_distribution(
    group: str, refused: list[str]
) -> Iterator[tuple[str, tuple[EntryPoint, ...]]]:
    """(title, entry points) of the distributions that have any, the first of each name.

    Not importlib.metadata.entry_points(): there one malformed entry_points.txt hides all others.
    """
    seen: set[str] = set()
    for distribution in distributions():
        try:
            points = tuple(distribution.entry_points.select(group=group))
        except Exception as error:
            refused.append(
                f"the entry points of {_title(distribution)} cannot be read: {reason(error)}"
            )
            continue
        if not points:
            continue
        title = _title(distribution)
        key = re.sub(r"[-_.]+", "-", title.split()[0]).lower()
        if key not in seen:  # a second copy further down the search path is never imported
            seen.add(key)
            yield title, points


def _title(distribution: Distribution) -> str:
    """Name and version; of a folder without metadata its own name."""
    try:
        metadata = distribution.metadata
        name, version = metadata["Name"], metadata["Version"]
    except Exception:  # a distribution without METADATA raises from Python 3.14 on
        name = version = None
    if not name:
        folder = getattr(distribution, "_path", None)
        name = getattr(folder, "stem", "") or "an unnamed distribution"
    return f"{name} {version}" if version else str(name)
