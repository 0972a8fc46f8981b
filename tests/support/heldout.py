"""The held-out texts that ship with tiny-dsa."""

from __future__ import annotations

from functools import cache

from kvpolicy.models.checkpoint import checkpoint_folder


@cache
def pieces() -> list[tuple[str, bytes]]:
    """(file name, bytes) of every held-out text, Python source first, in name order."""
    folder = checkpoint_folder("tiny-dsa") / "heldout"
    texts = [(p.name, p.read_bytes()) for p in sorted(folder.iterdir()) if p.name != "NOTICE"]
    return sorted(texts, key=lambda item: (".py" not in item[0], item[0]))
