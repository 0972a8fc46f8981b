"""Who may import whom, read from the source.

Four folders at the top:  kernels <- kvpolicy <- env <- agents, each may import those to its left.
Inside kvpolicy a module may import modules of its own rank or of a lower one: RANK is the order.
Imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Name below kvpolicy -> rank; the longest name that fits counts. "" is kvpolicy/__init__.py, the
# public names. A model's geometry lies below the memory, its forward pass above.
RANK = {
    "errors": 0,
    "yaml_values": 1,
    "plugins": 1,
    "evictions": 2,
    "telemetry": 1,
    "telemetry.diagnostics": 5,
    "telemetry.live": 7,
    "geometry": 2,
    "recording": 3,
    "memory": 3,
    "selection": 4,
    "models": 4,
    "control": 4,
    "learned": 5,
    "controllers": 5,
    "config": 6,
    "sampling": 6,
    "speculative": 6,
    "engine": 7,
    "recording.recorder": 7,
    "shadows": 7,
    "workloads": 7,
    "bench": 8,
    "serving": 8,
    "testing": 9,
    "twin": 8,
    "episodes": 8,
    "": 8,
    "cli": 9,
    "__main__": 10,
}

# Package -> the other packages that it may import. "kvpolicy" is what lies in that folder itself.
MAY_IMPORT = {
    "kvpolicy.kernels": set(),
    "kvpolicy": {"kvpolicy.kernels"},
    "kvpolicy.env": {"kvpolicy", "kvpolicy.kernels"},
    "kvpolicy.agents": {"kvpolicy", "kvpolicy.env"},
}
FOLDER_OF = {
    "kvpolicy.kernels": "kernels",
    "kvpolicy": "kvpolicy",
    "kvpolicy.env": "env",
    "kvpolicy.agents": "agents",
}

# Third-party package -> the packages that may import it. The runtime serves without the learning
# stack, and only kernels know triton, which exists on Linux only.
ONLY_IN = {
    "gymnasium": {"kvpolicy.env", "kvpolicy.agents"},
    "stable_baselines3": {"kvpolicy.env", "kvpolicy.agents"},
    "triton": {"kvpolicy.kernels"},
    "matplotlib": {"kvpolicy"},
    "fastapi": {"kvpolicy"},
    "starlette": {"kvpolicy"},
    "uvicorn": {"kvpolicy"},
    "prometheus_client": {"kvpolicy"},
    "transformers": set(),
}


def package_of(module: str) -> str:
    """Which of the four packages a module belongs to."""
    for package in ("kvpolicy.kernels", "kvpolicy.env", "kvpolicy.agents"):
        if f"{module}.".startswith(f"{package}."):
            return package
    return "kvpolicy"


def sources() -> dict[str, Path]:
    """Module name -> file, for every source file of ours."""
    found = {}
    for package, folder in FOLDER_OF.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            if "tiny_dsa" in file.parts:
                continue  # held-out text of the model, not code
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            found[".".join((package, *parts))] = file
    return found


SOURCES = sources()


def imports(module: str, file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each import; `from a import b` gives a.b if that is a module."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_ours = full in SOURCES or package_of(full) != package_of(base)
                yield node.lineno, full if is_ours else base
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in {"importlib.import_module", "import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            name = node.args[0].value
            yield node.lineno, f"{package}{name}" if name.startswith(".") else name


def rank(module: str) -> int:
    name = module.partition(".")[2]
    while name not in RANK and "." in name:
        name = name.rpartition(".")[0]
    assert name in RANK, f"{module}: give {name!r} a rank in tests/test_layers.py"
    return RANK[name]


@pytest.mark.parametrize("module", SOURCES)
def test_imports_keep_to_the_layers(module: str) -> None:
    file, package = SOURCES[module], package_of(module)
    own_rank = rank(module) if package == "kvpolicy" else 0
    wrong = []
    for line, name in imports(module, file):
        top = name.partition(".")[0]
        if top == "kvpolicy":
            other = package_of(name)
            if other != package:
                if other not in MAY_IMPORT[package]:
                    wrong.append(f"{file}:{line}: {package} must not import {other} ({name})")
            elif package == "kvpolicy" and rank(name) > own_rank:
                wrong.append(f"{file}:{line}: {module} must not import {name}, of a higher rank")
        elif package not in ONLY_IN.get(top, {package}):
            wrong.append(f"{file}:{line}: {package} must not import {top}")
    assert not wrong, "\n".join(wrong)


def test_top_level_names_are_not_imported() -> None:
    """`import kernels` works in a checkout; once installed it is another distribution."""
    for module, file in SOURCES.items():
        for line, name in imports(module, file):
            top = name.partition(".")[0]
            assert top not in {"kernels", "env", "agents"}, f"{file}:{line}: {name}"


def test_the_table_has_no_idle_rows() -> None:
    names = {module.partition(".")[2] for module in SOURCES if package_of(module) == "kvpolicy"}
    assert set(RANK) - names <= {"__main__"}
