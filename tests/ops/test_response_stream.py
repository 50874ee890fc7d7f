"""A stream of rows gives what the batch does, from a state of fixed size."""

from __future__ import annotations

import pytest
import torch

from osciformer.ops import ResponseStream, oscillator_response

from .response_cases import DOUBLE, MODES, make_case


@pytest.mark.parametrize(("drive", "of"), MODES)
def test_stream_equals_batch(drive, of):
    values, times, omega, zeta = make_case(rows=20)
    values[1, :, 0] = torch.nan
    batch = oscillator_response(values, times, omega, zeta, drive=drive, of=of)
    stream = ResponseStream(omega, zeta, 2, batch_size=2, drive=drive, of=of)
    for n in range(20):
        found = stream.step(times[:, n], values[:, n])
        known = ~values[:, n].isnan() if drive == "linear" else torch.ones(2, 2, dtype=torch.bool)
        if drive != "linear":
            # The batch knows a variable's first value in advance.
            known &= ~values[:, : n + 1].isnan().all(1)
        for a, b in zip(found, batch, strict=True):
            scale = b.abs().amax(dim=(0, 1, 2)).clamp(min=1e-30)
            assert ((a - b[:, n]) / scale)[known].abs().max() < 1e-10 if known.any() else True
        if n == 10:
            other = ResponseStream(omega, zeta, 2, batch_size=2, drive=drive, of=of)
            other.load_state(stream.state)
            stream = other
    later = times[:, -1] + 0.7
    options = dict(drive=drive, of=of, query_times=later[:, None])
    batch = oscillator_response(values, times, omega, zeta, **options)
    for a, b in zip(stream.read(later), batch, strict=True):
        assert torch.allclose(a, b[:, 0], atol=1e-10 * float(b.abs().max()))


def test_before_any_observation_nothing_moves():
    stream = ResponseStream(torch.ones(3), torch.ones(3), 2)
    found = stream.step(5.0, torch.full((1, 2), torch.nan))
    assert not any(z.any() for z in (*found, *stream.read(7.0)))


def test_refusals():
    stream = ResponseStream(torch.ones(3), torch.ones(3), 2)
    stream.step(1.0, torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"series 0 has 0.5 after 1.0"):
        stream.step(0.5, torch.ones(1, 2))
    with pytest.raises(ValueError, match="time must be finite"):
        stream.read(torch.nan)
    with pytest.raises(ValueError, match=r"values must have shape \[B, F\] = \[1, 2\]"):
        stream.step(2.0, torch.ones(1, 3))
    with pytest.raises(ValueError, match="state must have the entries now, time"):
        stream.load_state({"now": torch.ones(1, dtype=DOUBLE)})
    with pytest.raises(ValueError, match="of='rate' needs a path"):
        ResponseStream(torch.ones(3), torch.ones(3), 2, drive="impulse", of="rate")
