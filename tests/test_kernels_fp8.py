"""8-bit records of rows and keys: what they hold, and that the device writes the reference's bytes."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import randn

from kvpolicy.kernels import fp8


def test_record_sizes() -> None:
    assert (fp8.row_bytes(512, 64), fp8.key_bytes(128)) == (656, 132)
    with pytest.raises(ValueError, match="latent = 96: must be a positive multiple of 128"):
        fp8.row_bytes(96, 64)
    with pytest.raises(ValueError, match="width = 30: must be a positive multiple of 4"):
        fp8.key_bytes(30)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_records_hold_their_values(power_of_two: bool) -> None:
    """No farther off than half of e4m3's widest step, and the same again after another round."""
    rows = randn(torch.device("cpu"), 40, 256 + 64) * torch.logspace(-3, 6, 40)[:, None]
    records = fp8.quantize_rows(rows, 256, power_of_two)
    assert records.shape == (40, fp8.row_bytes(256, 64))
    values = fp8.dequantize_rows(records, 256)
    groups = rows[:, :256].unflatten(1, (2, 128))
    scales = records[:, 256:264].contiguous().view(torch.float32)
    if power_of_two:
        assert bool((scales.log2() == scales.log2().round()).all())
        assert bool((groups.abs().amax(-1) <= 448 * scales).all())
    else:
        torch.testing.assert_close(448 * scales, groups.abs().amax(-1), rtol=1e-6, atol=0)
    error = (values - rows)[:, :256].unflatten(1, (2, 128)).abs().amax(-1)
    assert bool((error <= 16.001 * scales).all())
    assert bool((error > 0).any())
    assert torch.equal(values[:, 256:], rows[:, 256:].bfloat16().float())
    again = fp8.dequantize_rows(fp8.quantize_rows(values, 256, power_of_two), 256)
    torch.testing.assert_close(again, values, rtol=1e-6, atol=0)


def test_an_all_zero_group_has_a_scale() -> None:
    records = fp8.quantize_rows(torch.zeros(1, 130), 128)
    assert torch.equal(fp8.dequantize_rows(records, 128), torch.zeros(1, 130))
    assert torch.equal(fp8.dequantize_keys(fp8.quantize_keys(torch.zeros(2, 8))), torch.zeros(2, 8))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_writes_the_same_bytes(
    device: torch.device, dtype: torch.dtype, power_of_two: bool
) -> None:
    from kvpolicy.kernels.triton import fp8 as on_device

    rows = (randn(device, 9, 128 + 16) * torch.logspace(-7, 7, 9, device=device)[:, None]).to(dtype)
    rows[3, :128] = 0.0
    rows[4, 7] = 0.0
    for values in (rows, rows[2:5]):
        wanted = fp8.quantize_rows(values.cpu(), 128, power_of_two)
        assert torch.equal(on_device.quantize_rows(values, 128, power_of_two).cpu(), wanted)
    keys = rows[:, :36]
    wanted = fp8.quantize_keys(keys.cpu(), power_of_two)
    assert torch.equal(on_device.quantize_keys(keys, power_of_two).cpu(), wanted)
    assert on_device.quantize_rows(rows[:0], 128).shape == (0, fp8.row_bytes(128, 16))


def test_every_rounding_of_e4m3(device: torch.device) -> None:
    """All codes, the middles between them and their neighbours on either side."""
    from kvpolicy.kernels.triton import fp8 as on_device

    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    few = [codes, middles, middles * (1 - 2**-22), middles * (1 + 2**-22)]
    values = torch.cat([*few, *(-x for x in few), torch.tensor([448.0])])  # so the scale is 1
    values = torch.nn.functional.pad(values, (0, 1))[None]
    assert values.shape[1] % 4 == 0
    assert torch.equal(on_device.quantize_keys(values.to(device)).cpu(), fp8.quantize_keys(values))
