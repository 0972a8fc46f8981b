"""Host memory in large pieces, and what is measured of the link to it."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from kvpolicy.kernels.memory_ops import memory_ops
from kvpolicy.memory import pinning
from kvpolicy.memory.calibration import LinkRates, calibrate, row_rate
from kvpolicy.memory.pinning import PinnedBuffer, touch

RATES = LinkRates(50e9, 3e-6, ((2048, 70e6), (65_536, 42e6)), ((1 << 30, 30e6),))


@pytest.mark.parametrize("size", [1, 7, 4096, 100_001])
@pytest.mark.parametrize("threads", [1, 3, 64])
def test_touch_writes_the_whole_range_and_nothing_else(size: int, threads: int) -> None:
    memory = torch.full((size + 2,), 9, dtype=torch.uint8)
    touch(memory.data_ptr() + 1, size, threads)
    assert memory.tolist() == [9, *[0] * size, 9]


def test_plain_memory_is_not_pinned() -> None:
    buffer = PinnedBuffer(10, pinned=False)
    assert buffer.bytes.shape == (10,) and not buffer.bytes.is_pinned()
    buffer.close()
    buffer.bytes.fill_(1)


@pytest.mark.gpu
def test_a_large_buffer_is_registered_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece can be read by a kernel and copied; progress reaches the end; closed, it stays memory."""
    monkeypatch.setattr(pinning, "LARGE", 1 << 22)
    monkeypatch.setattr(pinning, "CHUNK", 1 << 21)
    seen: list[tuple[int, int]] = []
    size = (5 << 20) + 4096
    buffer = PinnedBuffer(size, True, lambda done, of: seen.append((done, of)))
    assert seen == [(2 << 20, size), (4 << 20, size), (size, size)]
    assert buffer.bytes.is_pinned() and not bool(buffer.bytes.any())
    words = buffer.bytes.view(torch.int32)
    words.copy_(torch.arange(words.numel(), dtype=torch.int32))
    view = torch.zeros((1, words.numel() // 4, 4), dtype=torch.int32, device="cuda")
    at = torch.arange(view.shape[1], device="cuda")
    memory_ops("triton").host_to_arena(words, at * 4, view, at)
    assert torch.equal(view.flatten().cpu(), words)
    buffer.close()
    buffer.close()
    assert int(words[-1]) == words.numel() - 1


@pytest.mark.gpu
def test_where_registering_fails_torch_pins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(pinning, "LARGE", 1)
    monkeypatch.setattr(PinnedBuffer, "_register", refuse)
    with caplog.at_level(logging.WARNING):
        buffer = PinnedBuffer(4096, True)
    assert buffer.bytes.is_pinned()
    assert "registering failed (no more)" in caplog.text


def test_there_is_no_link_on_a_cpu() -> None:
    words = torch.zeros(1 << 24, dtype=torch.int32)
    assert calibrate(words, memory_ops("reference"), torch.device("cpu")) is None


def test_seconds_of_a_fetch() -> None:
    """The slower of bytes and rows, after the launch."""
    assert RATES.seconds(0, 656, 2048) == 0.0
    assert RATES.seconds(1000, 2624, 1024) == pytest.approx(3e-6 + 2_624_000 / 50e9)
    assert RATES.seconds(1000, 656, 40_000) == pytest.approx(3e-6 + 1000 / 42e6)
    assert row_rate(RATES.ordered, 1 << 20) == 42e6
    assert RATES.as_dict()["bandwidth"] == 50e9


@pytest.mark.gpu
def test_the_link_is_measured_in_a_second() -> None:
    buffer = PinnedBuffer(1 << 30, True)
    words, device = buffer.bytes.view(torch.int32), torch.device("cuda")
    calibrate(words, memory_ops("triton"), device)  # compiles
    start = time.perf_counter()
    rates = calibrate(words, memory_ops("triton"), device)
    assert time.perf_counter() - start < 1.0
    assert rates is not None and rates.bandwidth > 1e9 and 0 < rates.latency < 1e-3
    for _, rate in (*rates.ordered, *rates.random):
        assert 1e5 < rate < 1e9
    buffer.close()
