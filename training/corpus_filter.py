"""What counts as training text: no data-like files, no copies, nothing close to a held-out file."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from dataclasses import dataclass

MIN_BYTES, MAX_BYTES = 200, 1_000_000
# Source lines are short; base64, minified code and tables are not.
MAX_LINE, MAX_MEAN_LINE = 2_000, 110
MAX_DIGIT_SHARE = 0.20
# zlib leaves 0.15-0.40 of source text; less is a table, more is encoded data.
MIN_RATIO, MAX_RATIO = 0.08, 0.60
# A line shorter than this (`return None`) says nothing about where a file comes from.
MIN_LINE = 20
COPY_SHARE, HELD_OUT_SHARE = 0.80, 0.25


@dataclass(frozen=True)
class Document:
    """One text file of one package."""

    package: str
    name: str
    kind: str
    content: bytes


def is_text(content: bytes, prose: bool) -> bool:
    """True for a UTF-8 text that looks written; prose may put a paragraph on one line."""
    if not MIN_BYTES <= len(content) <= MAX_BYTES:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    lines = content.split(b"\n")
    if prose:
        return True
    if max(map(len, lines)) > MAX_LINE or len(content) > MAX_MEAN_LINE * len(lines):
        return False
    digits = sum(content.count(bytes([digit])) for digit in b"0123456789")
    if digits > MAX_DIGIT_SHARE * len(content):
        return False
    return MIN_RATIO <= len(zlib.compress(content, 6)) / len(content) <= MAX_RATIO


def telling_lines(document: Document) -> set[bytes]:
    """Distinct stripped lines of at least MIN_LINE bytes, as 8-byte digests."""
    stripped = {line.strip() for line in document.content.split(b"\n")}
    return {
        hashlib.blake2b(line, digest_size=8).digest() for line in stripped if len(line) >= MIN_LINE
    }


def near_held_out(
    lines: set[bytes], held_lines: list[set[bytes]], owners: dict[bytes, list[int]]
) -> bool:
    """True when a quarter of either file's telling lines is the other's."""
    shared: Counter[int] = Counter()
    for line in lines:
        shared.update(owners.get(line, ()))
    return any(
        count > HELD_OUT_SHARE * min(len(lines), len(held_lines[owner]))
        for owner, count in shared.items()
    )


def drop_copies(documents: list[Document], held_out: list[Document]) -> list[Document]:
    """The training documents: not held out, not near a held-out file, not a copy of another.

    A copy has the same sha1, or COPY_SHARE of its telling lines first seen in one earlier file.
    """
    held_names = {(d.package, d.name) for d in held_out}
    held_lines = [telling_lines(d) for d in held_out]
    owners: dict[bytes, list[int]] = {}
    for number, lines in enumerate(held_lines):
        for line in lines:
            owners.setdefault(line, []).append(number)
    seen_sha: set[str] = set()
    first_seen: dict[bytes, int] = {}
    kept = []
    for number, document in enumerate(documents):
        if (document.package, document.name) in held_names:
            continue
        digest = hashlib.sha1(document.content).hexdigest()
        lines = telling_lines(document)
        if digest in seen_sha or near_held_out(lines, held_lines, owners):
            continue
        seen_sha.add(digest)
        earlier = Counter(first_seen[line] for line in lines if line in first_seen)
        for line in lines:
            first_seen.setdefault(line, number)
        if lines and max(earlier.values(), default=0) > COPY_SHARE * len(lines):
            continue
        kept.append(document)
    return kept
