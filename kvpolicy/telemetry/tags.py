"""Names in TensorBoard: every tag that a policy's diagnostics may have, and how the charts are laid out."""

from __future__ import annotations

from typing import Any

__all__ = ["ABOUT", "FAMILIES", "HISTOGRAMS", "IMAGES", "LAYOUT", "TAGS", "TEXTS", "margin"]

TAGS = {
    "load/requests": "requests in the system, running and waiting",
    "load/running": "requests on the device",
    "load/waiting": "requests that wait for memory or a seat",
    "load/oldest_wait_steps": "steps that the first of them has waited",
    "load/arrivals": "requests that came since the last point",
    "load/finished": "requests that ended since the last point",
    "load/preemptions": "requests put back to the host, since the start",
    "memory/required_mib": "protected device memory",
    "memory/optional_mib": "hot rows beyond the floor: what the policy keeps",
    "memory/free_mib": "device memory that nobody holds",
    "memory/retained_share": "optional / (optional + free): how much of what it may keep it keeps",
    "misses/of_unique_rows": "fetched / unique rows of decode steps",
    "misses/of_selected_rows": "fetched / selected rows of decode steps, the paper's",
    "misses/fetched_rows_per_step": "rows fetched per engine step, a row per layer",
    "misses/host_to_device_mib_per_step": "all that was copied to the device per engine step; of a "
    "shadow without what prompts fetch",
    "speed/tokens_per_step": "tokens generated per engine step",
    "speed/step_ms": "wall time per step, where most steps decoded",
    "latency/tpot_ms_p50": "time per token of the last requests that ended",
    "latency/tpot_ms_p05": "its lower edge",
    "latency/tpot_ms_p99": "its upper edge",
    "latency/ttft_ms_p50": "time to the first token of the last requests that ended",
    "latency/ttft_ms_p05": "its lower edge",
    "latency/ttft_ms_p99": "its upper edge",
    "action/rows_mean": "budget of a request and store in rows, over all",
    "action/rows_min": "the smallest",
    "action/rows_max": "the largest",
    "action/full_share": "part of the caches that hold every entry",
    "action/released_mib": "hot rows that decisions took back since the last point",
    "action/given_mib": "hot rows that decisions gave out since the last point",
    "action/reserve_mib": "memory that the plan keeps free, in bytes that it named",
    "control/decisions": "decisions since the start",
    "control/projected": "plans that were altered to fit, since the start",
    "control/fallbacks": "decisions of the fallback since the controller failed, since the start",
    "control/decision_ms_p50": "wall time of a decision",
    "control/decision_ms_p05": "its lower edge",
    "control/decision_ms_p99": "its upper edge",
    "speculation/accepted_length": "tokens per verification, bonus counted; nothing without drafter",
}
"""Tag of a scalar -> what it is. Whatever has no value at a point is not written there."""

FAMILIES = {
    "action/agent/": "raw values of an agent's action, by name",
    "reward/": "terms of the reward, by name, and their total",
    "regret/": "rows moved beyond the oracle's bound, by name",
}
"""Beginning of tags whose ends the caller names -> what they are."""

HISTOGRAMS = {"action/rows": "budgets of all requests and stores, in rows"}
IMAGES = {
    "residency/position_x_request": "which part of each request's history is hot",
    "residency/group_x_time": "which part of each layer group's history the budgets hold, over time",
}
TEXTS = {"run/record": "the run record", "run/about": "what the tags are"}


def margin(name: str) -> list[str]:
    """Value, lower and upper edge of a margin chart of percentiles."""
    return [f"{name}_p50", f"{name}_p05", f"{name}_p99"]


def _lines(*tags: str) -> list[Any]:
    return ["Multiline", [f"{tag}$" for tag in tags]]


LAYOUT: dict[str, dict[str, list[Any]]] = {
    "1 At a glance": {
        "requests in the system": _lines("load/requests"),
        "optional memory (what the policy keeps), MiB": _lines("memory/optional_mib"),
        "released by decisions, MiB": _lines("action/released_mib"),
        "miss rate, of selected rows": _lines("misses/of_selected_rows"),
        "requests that wait": _lines("load/waiting"),
        "time to first token, ms (p50, p05 to p99)": ["Margin", margin("latency/ttft_ms")],
    },
    "2 Memory and misses": {
        "required memory, MiB": _lines("memory/required_mib"),
        "free memory, MiB": _lines("memory/free_mib"),
        "given by decisions, MiB": _lines("action/given_mib"),
        "rows fetched per step": _lines("misses/fetched_rows_per_step"),
    },
    "3 Latency": {
        "steps that the first in the queue has waited": _lines("load/oldest_wait_steps"),
        "time per decode step, ms": _lines("speed/step_ms"),
        "time per token, ms (p50, p05 to p99)": ["Margin", margin("latency/tpot_ms")],
    },
    "4 Decisions": {
        "rows per request and store (mean, min to max)": [
            "Margin",
            ["action/rows_mean", "action/rows_min", "action/rows_max"],
        ],
        "share of caches that are full": _lines("action/full_share"),
        "share of spare memory that is kept": _lines("memory/retained_share"),
        "decision, ms (p50, p05 to p99)": ["Margin", margin("control/decision_ms")],
        "projected plans and fallbacks": _lines("control/projected", "control/fallbacks"),
    },
    "5 Learning": {
        "reward and its terms": _lines("reward/.*"),
        "regret against the oracle": _lines("regret/.*"),
        "agent's action": _lines("action/agent/.*"),
        "accepted length": _lines("speculation/accepted_length"),
    },
}
"""Category -> chart -> kind and tags, as ``SummaryWriter.add_custom_scalars`` takes it."""


def _about() -> str:
    rows = {**TAGS, **{f"{k}...": v for k, v in FAMILIES.items()}, **HISTOGRAMS, **IMAGES}
    lines = [f"| `{tag}` | {what} |" for tag, what in rows.items()]
    return "\n".join(["| tag | what |", "|---|---|", *lines])


ABOUT = _about()
"""The tags as a Markdown table."""
