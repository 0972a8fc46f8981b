"""pyproject.toml lists packages by hand; these tests compare the list with the folders."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDER_OF = SETUPTOOLS["package-dir"]


def folder_of(package: str) -> Path:
    """The folder of a package: its longest mapped prefix, then the rest of its name."""
    prefix = max((p for p in FOLDER_OF if f"{package}.".startswith(f"{p}.")), key=len)
    rest = package[len(prefix) :].strip(".")
    return ROOT / FOLDER_OF[prefix] / rest.replace(".", "/")


def packages_on_disk() -> set[str]:
    found = set()
    for package, folder in FOLDER_OF.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inner)))
    return found


def test_packages_are_the_folders_with_an_init_file() -> None:
    listed = SETUPTOOLS["packages"]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == packages_on_disk()


def test_every_source_file_is_in_a_package() -> None:
    inside = {folder_of(package) for package in SETUPTOOLS["packages"]}
    data = ROOT / "kvpolicy" / "models" / "tiny_dsa"
    for folder in FOLDER_OF.values():
        for file in (ROOT / folder).rglob("*.py"):
            assert file.parent in inside or data in file.parents, f"{file} would not be installed"


@pytest.mark.parametrize("package", SETUPTOOLS["package-data"])
def test_package_data_exists(package: str) -> None:
    for pattern in SETUPTOOLS["package-data"][package]:
        assert any(p.is_file() for p in folder_of(package).glob(pattern)), f"{package}: {pattern}"


def test_no_data_file_is_left_out() -> None:
    """Whatever lies beside the code and is no Python file must be package data."""
    shipped = {
        path
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in folder_of(package).glob(pattern)
    }
    for folder in FOLDER_OF.values():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in {".py", ".pyc"}:
                assert path in shipped, f"{path} is not package data"


def test_console_script_names_a_module() -> None:
    module, _, function = PROJECT["project"]["scripts"]["kvpolicy"].partition(":")
    file = folder_of(module).with_suffix(".py")
    assert re.search(rf"^(def {function}\(|{function} =)", file.read_text(), re.MULTILINE)


def test_tests_are_no_package() -> None:
    """With tests/__init__.py pytest may put the checkout on sys.path, which hides the install."""
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_no_source_folder_is_ignored_by_git() -> None:
    """The usual line "env/" in .gitignore would hide a source folder."""
    names = [str(folder_of(p).relative_to(ROOT) / "__init__.py") for p in SETUPTOOLS["packages"]]
    try:
        done = subprocess.run(
            ["git", "check-ignore", "--no-index", *names], cwd=ROOT, capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("needs git")
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.stdout == ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_constraints_pin_every_direct_dependency(device: str) -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.split(r"[<>=!;\[ ]", line)[0].lower().replace("_", "-") for line in wanted}
    if device == "cuda":
        names.discard("triton")  # asked for by torch itself
    lines = (ROOT / "constraints" / f"{device}.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line and line[0] != "#"}
    assert names <= pinned
