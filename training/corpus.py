"""Build the training and held-out text from public packages, each checked by its sha256.

    python training/corpus.py --out training/build

Packages come through the ordinary clients (`pip download`, `apt-get download`, `npm pack`), named
with their version in corpus_manifest.json. Needs Debian 12 with Python 3.11 on x86-64.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corpus_filter import Document, drop_copies, is_text

MANIFEST = Path(__file__).with_name("corpus_manifest.json")
# UTF-8 holds neither byte, so one byte a token suffices; the trainer maps them to 256 and 257.
BOS, EOS = b"\xfe", b"\xff"
# No package but CPython may give more, so that a quarter of the text is CPython.
MAX_PACKAGE_BYTES = 12_000_000
# Whole files of at least this many bytes are held out, so that 32,768-token windows fit.
HELD_OUT_BYTES = 33_000
HELD_OUT_COUNTS = {"lib": 12, "test": 8, "doc": 8, "book": 4}
SHIPPED_COUNTS = {"lib": 4, "test": 2, "doc": 2, "book": 1}
# The last fifth of the book is held out; whole files cannot be, as there is one book.
BOOK_TRAIN_SHARE = 0.8
PASSAGE_BYTES, PASSAGE_STEP = 56_000, 60_000


@dataclass(frozen=True)
class Source:
    """One package file of the manifest."""

    client: str
    name: str
    version: str
    file: str
    sha256: str
    licence: str

    def fetch_command(self) -> list[str]:
        """The client's command that puts `file` into the working directory."""
        if self.client == "apt":
            return ["apt-get", "download", f"{self.name}={self.version}"]
        if self.client == "npm":
            return ["npm", "pack", "--silent", f"{self.name}@{self.version}"]
        return [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--only-binary=:all:", f"{self.name}=={self.version}",
        ]  # fmt: skip


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(source: Source, folder: Path) -> Path:
    """Fetch one package unless it is there, and check its content."""
    path = folder / source.file
    if not path.exists():
        subprocess.run(source.fetch_command(), cwd=folder, check=True)
    if not path.exists() or sha256_of(path) != source.sha256:
        raise ValueError(
            f"{source.name} {source.version}: {source.file} is missing or its sha256 differs from "
            f"{MANIFEST.name}; delete it and fetch exactly that version again"
        )
    return path


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the .py and .txt files in a wheel, an npm tarball or a Debian package."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(".py"):
                    yield name, wheel.read(name)
        return
    if path.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", str(path)]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as archive,
        ):
            yield from tar_members(archive)
        return
    with tarfile.open(path) as archive:
        yield from tar_members(archive)


def tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the regular .py and .txt files of a tar archive."""
    for member in archive:
        if member.isfile() and member.name.endswith((".py", ".txt")):
            handle = archive.extractfile(member)
            if handle is not None:
                yield member.name.removeprefix("./"), handle.read()


def kind_of(source: Source, name: str) -> str | None:
    """lib, test, doc, book or package; None for a file that is not taken."""
    if source.client == "npm":
        if source.name.endswith("moby-dick"):
            return "book" if name.endswith("data/data.txt") else None
        return "speech" if name.startswith("package/data/") else None
    if source.client == "pip":
        return "package" if name.endswith(".py") else None
    if name.endswith(".txt"):
        return "doc" if "/_sources/" in name else None
    # Tables written as Python: codec maps and the text of the interactive help.
    if "/encodings/" in name or "/pydoc_data/" in name:
        return None
    return "test" if "/test/" in name or "/tests/" in name else "lib"


def read_documents(sources: list[Source], folder: Path) -> list[Document]:
    """All text documents of all packages, in manifest and path order."""
    documents = []
    for source in sources:
        for name, content in sorted(members(fetch(source, folder))):
            kind = kind_of(source, name)
            if kind == "book":
                documents.extend(split_book(source, name, content))
            elif kind is not None and is_text(content, prose=kind == "speech"):
                documents.append(Document(source.name, name, kind, content))
    return documents


def split_book(source: Source, name: str, content: bytes) -> list[Document]:
    """The training part of the book, and held-out passages that start at paragraphs."""
    cut = content.index(b"\n\n", int(len(content) * BOOK_TRAIN_SHARE)) + 2
    parts = [Document(source.name, f"{name}#train", "novel", content[:cut])]
    for number in range(HELD_OUT_COUNTS["book"]):
        start = content.index(b"\n\n", cut + number * PASSAGE_STEP) + 2 if number else cut
        part = content[start : start + PASSAGE_BYTES]
        parts.append(Document(source.name, f"{name}#{number}", "book", part))
    return parts


def choose_held_out(documents: list[Document]) -> list[Document]:
    """The held-out files: of each kind the long enough ones first in sha256 order of paths."""
    chosen = []
    for kind, count in HELD_OUT_COUNTS.items():
        long = [d for d in documents if d.kind == kind and len(d.content) >= HELD_OUT_BYTES]
        if kind == "book":
            chosen += long
            continue
        long.sort(key=lambda d: hashlib.sha256(d.name.encode()).hexdigest())
        chosen += long[:count]
    return chosen


def thin(documents: list[Document]) -> list[Document]:
    """Keep of each package the files first in sha256 order of their paths, up to the limit."""
    order = sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).hexdigest())
    room: dict[str, int] = {}
    kept = set()
    for document in order:
        left = room.get(document.package, MAX_PACKAGE_BYTES) - len(document.content)
        if document.kind != "package" or left >= 0:
            room[document.package] = left
            kept.add((document.package, document.name))
    return [d for d in documents if (d.package, d.name) in kept]


def encode(documents: list[Document]) -> bytes:
    """The training stream: BOS, the bytes, EOS for every document."""
    return b"".join(BOS + document.content + EOS for document in documents)


def write_held_out(held_out: list[Document], out: Path, shipped: Path) -> list[dict[str, object]]:
    """Write the full held-out files and the truncated shipped subset; return their table."""
    table, left = [], dict(SHIPPED_COUNTS)
    (out / "heldout").mkdir(parents=True, exist_ok=True)
    shipped.mkdir(parents=True, exist_ok=True)
    for document in held_out:
        ship = left[document.kind] > 0
        left[document.kind] -= ship
        stem = document.name.split("/python3.11/")[-1].split("/_sources/")[-1]
        stem = stem.replace("package/data/", "moby_dick_").replace("/", "_").replace("#", "_")
        file = f"{document.kind}-{stem.removesuffix('.txt').removesuffix('.rst')}.txt"
        (out / "heldout" / file).write_bytes(document.content)
        if ship:
            (shipped / file).write_bytes(document.content[:HELD_OUT_BYTES])
        table.append({
            "file": file, "kind": document.kind, "package": document.package,
            "path": document.name, "bytes": len(document.content), "shipped": ship,
            "sha256": hashlib.sha256(document.content).hexdigest(),
        })  # fmt: skip
    return table


def summarise(documents: list[Document]) -> dict[str, dict[str, int]]:
    """Files and bytes of the training text per package."""
    totals: dict[str, dict[str, int]] = {}
    for document in documents:
        entry = totals.setdefault(document.package, {"files": 0, "bytes": 0})
        entry["files"] += 1
        entry["bytes"] += len(document.content)
    return totals


def build(out: Path, shipped: Path, lock: bool) -> None:
    """Fetch, filter, split, write the shard, and check or (lock) rewrite the manifest's results."""
    manifest = json.loads(MANIFEST.read_text())
    folder = out / "fetch"
    folder.mkdir(parents=True, exist_ok=True)
    documents = read_documents([Source(**entry) for entry in manifest["sources"]], folder)
    held_out = choose_held_out(documents)
    train = thin(drop_copies(documents, held_out))
    stream = encode(train)
    table = write_held_out(held_out, out, shipped)
    result = {
        "train": {
            "files": len(train), "bytes": sum(len(d.content) for d in train),
            "tokens": len(stream), "sha256": hashlib.sha256(stream).hexdigest(),
            "by_package": summarise(train),
        },
        "heldout": table,
    }  # fmt: skip
    if lock:
        manifest["result"] = result
        MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n")
    elif manifest["result"] != result:
        raise ValueError(f"the corpus built here differs from the result in {MANIFEST.name}")
    (out / "train.u8.xz").write_bytes(lzma.compress(stream, preset=4))
    print(json.dumps(result["train"], indent=1))


def main() -> None:
    """Parse the command line and build the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here / "build")
    parser.add_argument(
        "--shipped", type=Path, default=here.parent / "kvpolicy/models/tiny_dsa/heldout"
    )
    parser.add_argument("--lock", action="store_true", help="rewrite the manifest's result")
    args = parser.parse_args()
    build(args.out, args.shipped, args.lock)


if __name__ == "__main__":
    main()
