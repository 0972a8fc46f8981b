"""Controllers from files: the spec's grammar, what a file may hold, reloading, and every mistake."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.controllers import files, make, register, registry
from kvpolicy.controllers.targets import FunctionController
from kvpolicy.errors import UserError

SOURCE = '''
"""Several ways to write one."""
from dataclasses import dataclass

from kvpolicy import Observation, Plan


@dataclass
class Lazy:
    """Looks its types up in its own module."""
    rows: int = 64
    eager: bool = False

    def decide(self, observation: Observation) -> Plan:
        return Plan.even(self.rows * (2 if self.eager else 1))


def plain(observation, rows=5):
    return Plan.even(rows)


def by_annotation(seen: "Observation"):
    return Plan.even(6)


def by_result(_) -> Plan:
    return Plan.even(7)


def factory(rows=8):
    return Lazy(rows)


def open_factory(**settings):
    return Lazy(settings.get("rows", 9))


def factory_of_function():
    return lambda seen: Plan.even(10)


def refuses(rows):
    raise ValueError("rows must be even")


def breaks():
    return {}["missing"]


def leaves():
    raise SystemExit(3)


def returns_nothing():
    return None


def one(rows):
    return Lazy(rows)


ready = Lazy(11)
TABLE = {1: 2}


class NoController:
    pass
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with mine.py in it. No file that is loaded here outlives the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_loaded", {})
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path


def proposed(spec: Any) -> Any:
    """What the controller of a spec proposes (none of these looks at the observation)."""
    return make(spec).decide(None).default  # type: ignore[arg-type]


# --- the grammar ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("./mine.py:Lazy", ("./mine.py", "Lazy", "")),
        ("mine.py:Lazy:rows=128,eager=true", ("mine.py", "Lazy", "rows=128,eager=true")),
        ("/a/b=c,d e/mine.py:Lazy:x=./y.py", ("/a/b=c,d e/mine.py", "Lazy", "x=./y.py")),
        ("mine.py:Lazy:path=./other.py:Y", ("mine.py", "Lazy", "path=./other.py:Y")),
        ("C:\\code\\mine.py:Lazy", ("C:\\code\\mine.py", "Lazy", "")),
        ("C:/code/mine.py:Lazy:rows=1", ("C:/code/mine.py", "Lazy", "rows=1")),
        ("a.pyc/mine.py:Lazy", ("a.pyc/mine.py", "Lazy", "")),
        ("mine.py.py:Lazy", ("mine.py.py", "Lazy", "")),
        ("mine.py", ("mine.py", "", "")),
        ("mine.py:", ("mine.py", "", "")),
        ("static", None),
        ("static:device_buffer_rows=4", None),
        ("learned:path=./x.py", None),
        ("learned:path=./x.py:Y", None),
        ("learned:path=C:/x.py", None),
        ("C:mine.py:Lazy", None),
        ("mine:Lazy", None),
        ("mine.pyx:Lazy", None),
        ("", None),
    ],
)
def test_a_spec_names_a_file_or_it_does_not(spec: str, parts: tuple[str, str, str] | None) -> None:
    found = files.parse(spec)
    assert (found and (found.path, found.name, found.rest)) == parts


@given(st.text(st.characters(exclude_characters=":", exclude_categories=["Cs"])), st.text())
def test_any_path_without_colons_is_told_from_its_parameters(stem: str, rest: str) -> None:
    """Whatever stands in the path or the parameters: =, commas, spaces, newlines, another .py."""
    found = files.parse(f"{stem}.py:Name:{rest}")
    assert found is not None
    assert (found.path, found.name, found.rest) == (f"{stem}.py", "Name", rest)


@pytest.mark.parametrize("name", ["mine.py", ".py", "a/b.py"])
def test_no_registered_name_reads_as_a_file(name: str) -> None:
    with pytest.raises(UserError, match="controller name"):
        register(name, lambda observation: Plan.full())
    assert name not in registry._FACTORIES


# --- what a file may hold -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ("./mine.py:Lazy", 64),
        ("mine.py:Lazy:rows=3", 3),
        ("mine.py:Lazy:rows=3,eager=true", 6),
        ("mine.py:Lazy:", 64),
        ("mine.py:plain", 5),
        ("mine.py:plain:rows=15", 15),
        ("mine.py:by_annotation", 6),
        ("mine.py:by_result", 7),
        ("mine.py:factory", 8),
        ("mine.py:factory:rows=18", 18),
        ("mine.py:open_factory:rows=19,anything=1", 19),
        ("mine.py:factory_of_function", 10),
        ("mine.py:ready", 11),
        ("mine.py:one:rows=12", 12),
    ],
)
def test_classes_functions_factories_and_objects(folder: Path, spec: str, rows: int) -> None:
    assert proposed(spec) == rows


def test_paths_are_relative_absolute_or_of_the_home(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a=b, c").mkdir()
    (folder / "a=b, c" / "mine.py").write_text(SOURCE.replace("rows: int = 64", "rows: int = 65"))
    monkeypatch.setenv("HOME", str(folder / "a=b, c"))
    assert proposed("a=b, c/mine.py:Lazy:eager=true") == 130
    assert proposed(f"{folder}/mine.py:Lazy") == 64
    assert proposed("~/mine.py:Lazy") == 65


def test_a_file_is_imported_once_under_its_own_name(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "mine.py").write_text(SOURCE)
    first, again, link = make("mine.py:Lazy"), make("./mine.py:Lazy:rows=1"), folder / "link.py"
    link.symlink_to(folder / "mine.py")
    assert type(first) is type(again) is type(make("link.py:Lazy"))
    assert type(first) is not type(make("other/mine.py:Lazy"))
    assert "mine" not in sys.modules and str(folder) not in sys.path
    assert sys.modules[type(first).__module__].Lazy is type(first)


def test_an_edited_file_is_imported_again(folder: Path) -> None:
    """By its content too: two writes may carry the same time."""
    old = make("mine.py:Lazy")
    stamp = (folder / "mine.py").stat()
    (folder / "mine.py").write_text(SOURCE.replace("rows: int = 64", "rows: int = 65"))
    os.utime(folder / "mine.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert proposed("mine.py:Lazy") == 65
    edited = make("mine.py:Lazy")
    os.utime(folder / "mine.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))
    assert type(make("mine.py:Lazy")) is not type(edited)
    assert old.decide(None).default == 64  # type: ignore[arg-type]


def test_a_broken_edit_does_not_stay(folder: Path) -> None:
    before = {name for name in sys.modules if name.startswith("kvpolicy_file_")}
    (folder / "mine.py").write_text("raise RuntimeError('half done')")
    for _ in range(2):
        with pytest.raises(UserError, match=r"mine.py:1: RuntimeError: half done"):
            make("mine.py:Lazy")
    assert {name for name in sys.modules if name.startswith("kvpolicy_file_")} == before
    (folder / "mine.py").write_text(SOURCE)
    assert proposed("mine.py:Lazy") == 64


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none.py:Lazy", "controller file 'none.py': No such file or directory"),
        ("folder.py:Lazy", "controller file 'folder.py': Is a directory"),
        ("nul\0.py:Lazy", "null byte"),
        ("mine.py", "say which, as PATH.py:NAME; it defines Lazy, plain, by_annotation"),
        ("mine.py:", "say which"),
        ("mine.py:Lasy", r"has no 'Lasy' \(did you mean 'Lazy'\?\); it defines Lazy, plain"),
        ("mine.py:a b", "has no 'a b'"),
        ("empty.py:Lazy", "has no 'Lazy'; it defines no controller"),
        ("mine.py:TABLE", "'mine.py:TABLE' is of type dict: must be a class or an object with"),
        ("mine.py:NoController", "'mine.py:NoController' is the class NoController: must be"),
        ("mine.py:Lazy:rowz=3", r"'mine.py:Lazy' 'rowz' \(did you mean 'rows'\?\); allowed: rows"),
        ("mine.py:ready:rows=3", r"'mine.py:ready' 'rows'; allowed: \(none\)"),
        ("mine.py:plain:observation=3", "unknown parameter .*'observation'.*allowed: rows"),
        ("mine.py:Lazy:3", "'3' must be key=value"),
        ("mine.py:Lazy:rows=1,rows=2", "rows is given twice"),
        ("mine.py:one", "needs rows=... .*calls its first parameter 'observation'"),
        ("mine.py:refuses:rows=3", "'mine.py:refuses:rows=3': rows must be even"),
        ("mine.py:breaks", "KeyError: 'missing'"),
        ("mine.py:leaves", "controller 'mine.py:leaves': SystemExit: 3"),
        ("mine.py:returns_nothing", "the factory returned None"),
        ("syntax.py:Lazy", "controller file 'syntax.py': syntax.py:3: "),
        ("null.py:Lazy", "controller file 'null.py': null.py:1: .*null bytes"),
        ("latin.py:Lazy", "controller file 'latin.py': latin.py:"),
        ("imports.py:Lazy", "imports.py:2: ModuleNotFoundError: No module named 'nowhere_to_be'"),
        ("deep.py:Lazy", "deep.py:6: ZeroDivisionError: division by zero"),
        ("exits.py:Lazy", "exits.py:2: SystemExit: 3"),
        ("./mine:Lazy", "unknown controller './mine'.*; a file is given as PATH.py:NAME"),
    ],
)
def test_every_mistake_is_one_line(folder: Path, spec: str, message: str) -> None:
    (folder / "folder.py").mkdir()
    (folder / "empty.py").write_text("from kvpolicy import Plan\n")
    (folder / "syntax.py").write_text("x = 1\n\ndef :\n")
    (folder / "null.py").write_bytes(b"x = 1\0\n")
    (folder / "latin.py").write_bytes(b"x = '\xe9'\n")
    (folder / "imports.py").write_text("\nimport nowhere_to_be\n")
    (folder / "deep.py").write_text(
        "import json\n\n\ndef f(text):\n    return json.loads(text,\n"
        "        parse_int=lambda digits: 1 / 0)\n\n\nf('[1]')\n"
    )
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match=message) as caught:
        make(spec)
    assert "\n" not in str(caught.value)


def test_an_interrupt_passes(folder: Path) -> None:
    (folder / "stop.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        make("stop.py:Lazy")
    assert not any(name.endswith("_stop") for name in sys.modules)


# --- the same targets under a name, and without one -----------------------------------------------


def policy(observation: Observation, rows: int = 4) -> Plan:
    return Plan.even(rows)


def open_policy(observation: Observation, **settings: int) -> Plan:
    return Plan.even(settings.get("rows", 5))


def test_functions_and_kwargs_through_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    assert register("policy", policy) is policy
    register("open-policy", open_policy)
    register("open-factory", lambda **settings: make("static", **settings))
    register("ready", make("static:device_buffer_rows=21"))
    assert proposed("policy") == 4 and proposed("policy:rows=14") == 14
    assert make("policy", rows=24).decide(None).default == 24  # type: ignore[arg-type]
    assert proposed("open-policy:rows=15,other=2") == 15
    made = make("open-factory:device_buffer_rows=7")
    assert made.rows == 7  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="unknown parameter of controller 'static' 'rows'"):
        make("open-factory:rows=7")
    assert make("ready") is registry._FACTORIES["ready"]
    with pytest.raises(UserError, match="must be a class or an object with decide"):
        register("number", 3)  # type: ignore[type-var]


def test_make_takes_what_is_no_spec() -> None:
    controller = make("static")
    assert make(controller) is controller
    assert isinstance(make(policy), FunctionController)
    assert proposed(lambda anything: Plan.even(3)) == 3
    with pytest.raises(UserError, match="takes no parameters"):
        make(controller, rows=3)
    for wrong in (None, 3, type(controller), lambda: Plan.full(), lambda a, b: Plan.full()):
        with pytest.raises(UserError, match="must be an object with a method decide"):
            make(wrong)  # type: ignore[arg-type]
