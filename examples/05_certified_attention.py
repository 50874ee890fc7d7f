"""Replace the keys of an attention by oscillators, with a bound on how much that changes.

Each observation starts a key that is no oscillator: its channels fade, bend and level off. A bank
of oscillators that all keys share, started differently for each, does the same as nearly as wished.
The certificate has the measured error of the attention matrix, and a bound that is proved from the
largest errors of query and keys.

The trap: a good fit at the observations proves nothing, since rows average keys over all times in
between. The bounds are about the largest error at any time.

Run `python examples/05_certified_attention.py`. Expect a few seconds on a CPU, and a table in which
ten times less error costs one or two more oscillators a channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from osciformer.theory import approximate_attention

SEED = 0
HOURS = 3.0
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def query(times: Tensor) -> Tensor:
    """Return what rows ask for at some times, in three channels."""
    return torch.stack((torch.cos(2 * times), 1 - times / HOURS, torch.sin(3 * times)), dim=-1)


class Key:
    """What an observation becomes as time goes by."""

    def __init__(self, time: float, start: Tensor) -> None:
        self.time, self.start = time, start

    def __call__(self, times: Tensor) -> Tensor:
        """Return its three channels at some times, from its own on."""
        age = times - self.time
        a, b, c = self.start
        fades, bends, levels = a * torch.exp(-age), torch.sin(b + age**2 / 2), c * torch.tanh(age)
        return torch.stack((fades, bends, levels), dim=-1)


def main(num_keys: int = 8, tolerances: tuple[float, ...] = TOLERANCES) -> dict[str, float]:
    """Approximate one attention matrix ever better; return oscillators a channel by tolerance."""
    generator = torch.Generator().manual_seed(SEED)
    times = HOURS * torch.rand(num_keys, generator=generator, dtype=torch.float64).sort().values
    starts = torch.randn(num_keys, 3, generator=generator, dtype=torch.float64)
    keys = [Key(time, start) for time, start in zip(times.tolist(), starts, strict=True)]
    print("tolerance  oscillators  measured   proved")
    numbers = {}
    for tolerance in tolerances:
        found = approximate_attention(query, keys, times, tolerance)
        modes, error = found.certificate.num_modes + 1, found.certificate.weights
        assert found.certificate.holds
        print(f"{tolerance:9.0e}  {modes:11d}  {error.measured:.2e}  {error.proved:.2e}")
        numbers[f"oscillators at {tolerance:g}"] = float(modes)
    _, weights = found.attend()
    shown = ", ".join(f"{weight:.3f}" for weight in weights[-1])
    print(f"weights of the last row, by the attention operator of the package: {shown}")
    return numbers


if __name__ == "__main__":
    main()
