"""Check that a constraints file and the ranges in pyproject.toml belong together (`make dryrun`).

    python constraints/check.py cpu                      # for the Python that runs it
    python constraints/check.py cuda --python 3.12 3.13  # for others, by their wheels' metadata

pip resolves the dependencies and all extras under the constraints, as if nothing were installed,
and installs nothing. The check fails when pip finds no solution, when the solution holds a package
that the file does not pin, or when the file pins a package that nothing needs.

To renew the pins: install `-e '.[dev,plot,serve,tune]'` into a new virtual environment, write what
`pip freeze --all` prints into both files (without pip, kvpolicy and local versions such as +cpu;
without triton in cuda.txt), run this.

Under --python the environment markers are still those of the Python that runs the check.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Exact versions of these are asked for by the CUDA build of torch.
FOLLOW_TORCH = re.compile(r"triton|cuda-.*|nvidia-.*")
# Pinned in cpu.txt, and needed on Linux only.
LINUX_ONLY = {"triton"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """The dependencies and those of every extra."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [*project["dependencies"], *(line for extra in extras for line in extra)]


def pins(path: Path) -> dict[str, str]:
    found = {}
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line)
            if not match:
                raise SystemExit(f"{path}: not an exact pin: {line}")
            found[normal(match[1])] = match[2]
    return found


def resolve(constraints: Path, python: str | None) -> dict[str, str]:
    """Name and version of what pip would install; raises SystemExit where it finds no solution."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", str(report), "--constraint", str(constraints)]
        if python:
            command += ["--python-version", python, "--only-binary=:all:", "--target", folder]
        done = subprocess.run(command + requirements(), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{constraints.name}: pip finds no solution\n{done.stderr.strip()}")
        install = json.loads(report.read_text())["install"]
    return {normal(item["metadata"]["name"]): item["metadata"]["version"] for item in install}


def check(device: str, python: str | None) -> str:
    path = HERE / f"{device}.txt"
    version = python or f"{sys.version_info.major}.{sys.version_info.minor}"
    label = f"{path.name}, Python {version}"
    pinned, solved = pins(path), resolve(path, python)
    missing = sorted(n for n in solved if n not in pinned and not FOLLOW_TORCH.fullmatch(n))
    unused = sorted(n for n in pinned if n not in solved and n not in LINUX_ONLY)
    if missing or unused:
        raise SystemExit(
            f"{label}: not pinned: {', '.join(missing) or 'none'}; "
            f"pinned for nothing: {', '.join(unused) or 'none'}"
        )
    triton = f", triton {solved['triton']}" if "triton" in solved else ""
    return f"{label}: {len(solved)} packages, torch {solved['torch']}{triton}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Check constraints against pyproject.toml.")
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("--python", nargs="+", default=[None], metavar="X.Y")
    arguments = parser.parse_args()
    for python in arguments.python:
        print(check(arguments.device, python), flush=True)


if __name__ == "__main__":
    main()
