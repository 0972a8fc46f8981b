"""Controllers and evictions of other distributions, seen from fresh interpreters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from site_packages import install, kvpolicy, python

LAZY = '''
from kvpolicy import Plan

class Lazy:
    """Keeps what it is told to."""

    def __init__(self, rows=64, *, eager=False):
        self.rows = rows * (2 if eager else 1)

    def decide(self, observation):
        return Plan.even(self.rows)


def policy(observation, rows=16):
    """A plain function."""
    return Plan.even(rows)


def open_factory(size, **settings):
    return Lazy(size, **settings)
'''

RULES = """
from dataclasses import replace

from kvpolicy.kernels.eviction import RULES
oldest = replace(RULES["fifo"], name="oldest")
misnamed = replace(RULES["fifo"], name="another")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good ones, broken ones, and such that want a name that is not theirs."""
    folder = Path(tmp_path_factory.mktemp("site"))
    install(
        folder,
        "kv-lazy",
        {"kv_lazy": LAZY, "kv_rules": RULES},
        "[kvpolicy.controllers]\nlazy = kv_lazy:Lazy\nlazy-function = kv_lazy:policy\n"
        "open = kv_lazy:open_factory\nstatic = kv_lazy:Lazy\nbad=name = kv_lazy:Lazy\n"
        "[kvpolicy.evictions]\noldest = kv_rules:oldest\nlru = kv_rules:oldest\n",
    )
    install(
        folder,
        "kv-broken",
        {"kv_broken": "\nimport nowhere_to_be\n", "kv_exits": "raise SystemExit(3)\n"},
        "[kvpolicy.controllers]\nbroken = kv_broken:Lazy\nleaves = kv_exits:Lazy\n"
        "missing = kv_lazy:Lasy\nnumber = kv_lazy:__name__\n"
        "[kvpolicy.evictions]\nbroken = kv_broken:rule\nwrong = kv_lazy:Lazy\n"
        "misnamed = kv_rules:misnamed\n",
    )
    for name in ("kv-one", "kv-two"):
        install(folder, name, {}, "[kvpolicy.controllers]\ntwice = kv_lazy:Lazy\n")
    (folder / "kv_bare-0.1.dist-info").mkdir()  # no METADATA
    (folder / "kv_bare-0.1.dist-info" / "entry_points.txt").write_text(
        "[kvpolicy.controllers]\nbare = kv_lazy:Lazy\n"
    )
    return folder


REFUSED = {
    "controller 'static' of kv-lazy 1.0 (kv_lazy:Lazy) is refused: the name is built in",
    "eviction 'lru' of kv-lazy 1.0 (kv_rules:oldest) is refused: the name is built in",
    "controller 'twice' of kv-one 1.0 (kv_lazy:Lazy) is refused: 2 distributions offer the name",
    "controller 'twice' of kv-two 1.0 (kv_lazy:Lazy) is refused: 2 distributions offer the name",
}
BROKEN = {
    "broken": "controller 'broken' of kv-broken 1.0 (kv_broken:Lazy) cannot be loaded: "
    "ModuleNotFoundError: No module named 'nowhere_to_be'",
    "leaves": "controller 'leaves' of kv-broken 1.0 (kv_exits:Lazy) cannot be loaded: SystemExit: 3",
    "missing": "controller 'missing' of kv-broken 1.0 (kv_lazy:Lasy) cannot be loaded: "
    "AttributeError: module 'kv_lazy' has no attribute 'Lasy'",
    "number": "controller 'number' of kv-broken 1.0 (kv_lazy:__name__) is of type str: must be",
}
BROKEN_RULES = {
    "broken": "eviction 'broken' of kv-broken 1.0 (kv_broken:rule) cannot be loaded: ModuleNotFound",
    "wrong": "eviction 'wrong' of kv-broken 1.0 (kv_lazy:Lazy) is type: must be an EvictionRule",
    "misnamed": "eviction 'misnamed' of kv-broken 1.0 (kv_rules:misnamed) calls itself 'another'",
}


def test_list_as_json(site: Path) -> None:
    done = kvpolicy(site, "list", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    controllers = {entry["name"]: entry for entry in found["controllers"]}
    assert controllers["lazy"] == {
        "name": "lazy",
        "description": "Keeps what it is told to.",
        "distribution": "kv-lazy 1.0",
        "parameters": {"rows": 64, "eager": False},
    }
    assert controllers["lazy-function"]["parameters"] == {"rows": 16}
    assert controllers["open"]["required"] == ["size"]
    assert controllers["open"]["any_parameters"] is True
    assert controllers["bare"]["distribution"].startswith("kv_bare")
    assert "distribution" not in controllers["static"] and "twice" not in controllers
    for name, problem in BROKEN.items():
        assert controllers[name]["problem"].startswith(problem)
    evictions = {entry["name"]: entry for entry in found["evictions"]}
    assert (
        evictions["oldest"]["distribution"] == "kv-lazy 1.0" and evictions["oldest"]["description"]
    )
    assert "distribution" not in evictions["lru"]
    for name, problem in BROKEN_RULES.items():
        assert evictions[name]["problem"].startswith(problem)


def test_list_as_text(site: Path) -> None:
    done = kvpolicy(site, "list")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:1] == ["lazy"])
    assert lines[at].endswith("Keeps what it is told to. [from kv-lazy 1.0]")
    assert lines[at + 1].strip() == ":rows=64,eager=false"
    assert any(line.strip() == ":size=...,..." for line in lines)
    for problem in (*BROKEN.values(), *BROKEN_RULES.values()):
        assert any(problem in line for line in lines)
    said = done.stderr.splitlines()
    assert {line.removeprefix("kvpolicy: warning: ") for line in said} == REFUSED


def test_a_plug_in_is_imported_only_when_it_is_named(site: Path) -> None:
    code = (
        "import sys, kvpolicy\n"
        "assert 'lazy' in kvpolicy.controllers.names()\n"
        "assert 'oldest' in kvpolicy.evictions.names()\n"
        "kvpolicy.EngineConfig(eviction='oldest', controller='lazy')\n"
        "kvpolicy.controllers.make('static')\n"
        "assert not {'kv_lazy', 'kv_rules', 'torch'} & set(sys.modules)\n"
        "print(kvpolicy.controllers.make('lazy:rows=3,eager=true').rows)\n"
        "assert not {'kv_rules', 'kv_broken'} & set(sys.modules)\n"
        "rule = kvpolicy.CacheRule(eviction='oldest')\n"
        "assert kvpolicy.evictions.find('oldest') is sys.modules['kv_rules'].oldest\n"
    )
    done = python(site, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "6\n"


COPIES = """
import json, sys
from pathlib import Path
import kvpolicy

params, found = kvpolicy.SamplingParams(max_new_tokens=8), []
for controller, eviction in json.loads(sys.argv[1]):
    config = kvpolicy.EngineConfig(
        controller=controller, eviction=eviction, device="cpu", clock="steps"
    )
    with kvpolicy.Engine(config) as engine:
        output = engine.generate([Path(sys.argv[2]).read_bytes()[:450]], params)[0]
        found.append([engine.metrics()["fetched_rows"], output.logits_sha256])
print(json.dumps(found))
"""


def test_a_plug_in_runs_and_equals_what_it_copies(site: Path) -> None:
    """The same decisions and victims, so the same rows are fetched; and the same output."""
    runs = [
        ("static:device_buffer_rows=130", "fifo"),
        ("static:device_buffer_rows=130", "lru"),
        ("lazy:rows=65,eager=true", "oldest"),
        ("open:size=130", "oldest"),
        ("lazy-function:rows=130", "oldest"),
    ]
    done = python(site, "-c", COPIES, json.dumps(runs), __file__)
    assert done.returncode == 0, done.stderr
    static, other, *copies = json.loads(done.stdout)
    # A function has no initial rows: its requests get theirs at the first decision, before any row.
    assert static[0] > 0 and copies == [static] * 3
    assert other[0] != static[0] and other[1] == static[1]


MISTAKES = {
    "broken": BROKEN["broken"],
    "leaves": BROKEN["leaves"],
    "number": BROKEN["number"],
    "twice": "2 distributions offer the name",
    "lasy": "(did you mean 'lazy'?)",
    "lazy:size=3": "allowed: rows, eager",
    "open": "'open': needs size=...",
}


def test_errors_name_the_distribution(site: Path) -> None:
    code = (
        "import json, sys, kvpolicy\n"
        "def error(make, *spec):\n"
        "    try: make(*spec)\n"
        "    except kvpolicy.UserError as error: return str(error)\n"
        "rules = [error(kvpolicy.CacheRule, name) for name in json.loads(sys.argv[2])]\n"
        "specs = [error(kvpolicy.controllers.make, spec) for spec in json.loads(sys.argv[1])]\n"
        "print(json.dumps([specs, rules]))\n"
    )
    rules = {**BROKEN_RULES, "oldset": "(did you mean 'oldest'?)"}
    done = python(site, "-c", code, json.dumps([*MISTAKES]), json.dumps([*rules]))
    assert done.returncode == 0, done.stderr
    for found, expected in zip(json.loads(done.stdout), (MISTAKES, rules), strict=True):
        for line, part in zip(found, expected.values(), strict=True):
            assert part in line and "\n" not in line


def test_the_command_line_says_it_in_one_line(site: Path) -> None:
    done = kvpolicy(site, "compare", "x", "--controller", "broken")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvpolicy: error: {BROKEN['broken']}\n"
