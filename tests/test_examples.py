"""Every example runs as it stands, from elsewhere, on one core."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpolicy.cli.main import app

FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    """Each of them asserts what it shows."""
    assert "\nassert " in example.read_text() or "\n    assert " in example.read_text()
    done = subprocess.run(
        [sys.executable, "-P", str(example)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_20_lines_are_20_and_work_by_their_path(tmp_path: Path) -> None:
    """Those of the example and those of the README."""
    example = FOLDER / "custom_controller.py"
    assert len([line for line in example.read_text().splitlines() if line]) <= 20
    readme = (FOLDER.parent / "README.md").read_text()
    code = re.search(r"^```python\n(# greedy.py\n.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert code is not None and code[1].count("\n") <= 20
    (tmp_path / "greedy.py").write_text(code[1])
    for path in (example, tmp_path / "greedy.py"):
        arguments = ["run", "x" * 50, "--max-new-tokens", "2", "--controller", f"{path}:Greedy"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.stderr
