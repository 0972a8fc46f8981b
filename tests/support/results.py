"""Keeping the figures of a long test: KVPOLICY_RESULTS=FOLDER writes them as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvpolicy.telemetry.record import package_version, run_record


def keep(name: str, config: dict[str, Any], results: Any) -> None:
    """Write ``name``.json with the run record, if a folder was named."""
    folder = os.environ.get("KVPOLICY_RESULTS")
    if not folder:
        return
    record = run_record(config, "cpu", "reference")
    record["versions"]["transformers"] = package_version("transformers")
    content = {"record": record, "results": results}
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
