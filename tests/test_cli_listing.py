"""`kvpolicy list`."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
from typer.testing import CliRunner

import kvpolicy.env
from kvpolicy import controllers, workloads
from kvpolicy.cli.main import app
from kvpolicy.geometry.presets import preset_names
from kvpolicy.kernels.eviction import RULES
from kvpolicy.memory.rule import EVICTIONS
from kvpolicy.speculative import registry

BUILT_IN = set(RULES)  # other tests register their own while they run
KINDS = ["controllers", "evictions", "drafters", "models", "workloads", "environments"]


def test_json_holds_every_registered_name() -> None:
    result = CliRunner().invoke(app, ["list", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert list(found) == KINDS
    names = {kind: [entry["name"] for entry in entries] for kind, entries in found.items()}
    assert names["controllers"] == list(controllers.names())
    assert names["evictions"] == list(RULES)
    assert names["drafters"] == registry.names()
    assert {"none", "dflash", "dflash2", "dspark"} <= set(names["drafters"])
    assert names["models"] == list(preset_names())
    assert names["workloads"] == [name for name, _ in workloads.describe()]
    assert names["environments"] == [kvpolicy.env.REPLAY, kvpolicy.env.LIVE]
    assert set(names["environments"]) == {
        i for i in gymnasium.registry if i.startswith("kvpolicy/")
    }
    assert all(e["description"] for entries in found.values() for e in entries)


def test_every_eviction_rule_is_described() -> None:
    assert set(EVICTIONS) == BUILT_IN


def test_text_has_one_line_per_name() -> None:
    result = CliRunner().invoke(app, ["list"])
    lines = result.stdout.splitlines()
    assert [line for line in lines if line and not line.startswith(" ")] == KINDS
    first_words = [line.split()[0] for line in lines if line.startswith("  ")]
    for name in (*controllers.names(), *RULES, *preset_names()):
        assert name in first_words


def test_output_file(tmp_path: Path) -> None:
    target = tmp_path / "names.json"
    result = CliRunner().invoke(app, ["list", "--output", str(target)])
    assert result.exit_code == 0
    assert list(json.loads(target.read_text())) == KINDS
