"""Options, skips and determinism shared by all tests."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

CUDA = torch.cuda.is_available()
# Read by triton when a kernel is decorated, so it is set before any test imports one.
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

# Triton kernels: interpreted on the CPU, compiled where there is a GPU; never both in one process.
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES, scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton kernels run in this process."""
    return torch.device(request.param)


settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=200)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long forms too (make test-full)")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--full") else "ci")
    torch.set_num_threads(1)  # tiny operators: a second thread only waits


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {}
    if not CUDA:
        reasons["gpu"] = "needs a CUDA device"
    elif INTERPRETER:
        reasons["gpu"] = "TRITON_INTERPRET=1: kernels do not run on the GPU"
    if not _has_triton():
        reasons["interpreter"] = "needs triton"
    elif not INTERPRETER:
        reasons["interpreter"] = "kernels run on the GPU here, unless TRITON_INTERPRET=1"
    if not config.getoption("--full"):
        reasons["full"] = "long form: make test-full"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
