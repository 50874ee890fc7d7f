"""The oscillators that a network has learned, and what frequencies they answer to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from osciformer._optional import need
from osciformer._types import Complex, Float
from osciformer.events.neural.encoder import GapScale
from osciformer.math.driven import transfer_function
from osciformer.math.integrals import modulated_averages
from osciformer.math.spectrum import decay_rate, regime
from osciformer.nn.attention import OscillatorAttention
from osciformer.nn.parameters import Spectrum
from osciformer.nn.timeline import TimeScale

#: Damping ratios within this of 1 are called near-critical.
NEAR_CRITICAL = 0.05
_ROLES = {"key_spectrum": "keys", "value_spectrum": "values", "spectrum": "resonators"}
_SPAN_IN_GAPS = 20.0  # of sequences of events, whose unit is the mean gap


class LayerSpectrum(NamedTuple):
    """The oscillators of one layer in one role, in the unit of the data's times."""

    layer: str  #: Number of the block, from 1, or the name of what is no block.
    role: str  #: `keys`, `values` or `resonators`.
    omega: Float[np.ndarray, "H C"]  #: Natural frequencies, radians per unit of time.
    zeta: Float[np.ndarray, "H C"]  #: Damping ratios.
    velocity: Float[np.ndarray, "H C"]  #: Velocity that a channel at position 1 starts with itself.
    span: float  #: Length of the longest training series; of events, 20 mean gaps.
    unit: str | None  #: Unit of time; None for plain numbers.

    @property
    def period(self) -> Float[np.ndarray, "H C"]:
        """Periods of the undamped oscillators, 2 pi / omega."""
        return 2.0 * np.pi / self.omega

    @property
    def name(self) -> str:
        """The layer and role in words."""
        layer = f"layer {self.layer}" if self.layer.isdigit() else self.layer
        return f"{layer}, {self.role}"


def find_spectra(model: Any) -> list[LayerSpectrum]:
    """Return the spectra of a fitted estimator's network; none if it has no oscillators.

    Example:
        >>> from osciformer import OsciFormerClassifier
        >>> X = [([0.0, 1.0, 3.0 + k], [[k % 2], [1.0], [k % 2]]) for k in range(8)]
        >>> model = OsciFormerClassifier(dim=8, num_heads=1, max_epochs=1, random_state=0)
        >>> [item.name for item in find_spectra(model.fit(X, [0, 1] * 4))]
        ['layer 1, keys', 'layer 1, values', 'layer 2, keys', 'layer 2, values']
    """
    network = getattr(model, "model_", None)
    if not isinstance(network, torch.nn.Module):
        return []
    unit = getattr(model, "time_unit_", None) or model.time_axis_.unit
    scale, span, found = 1.0, 1.0, []
    for module in network.modules():
        if isinstance(module, TimeScale):
            scale = span = float(module.scale)
            break
        if isinstance(module, GapScale):
            scale, span = float(module.unit), _SPAN_IN_GAPS * float(module.unit)
            break
    modules = dict(network.named_modules())
    for path, module in modules.items():
        if not isinstance(module, Spectrum):
            continue
        parent, _, last = path.rpartition(".")
        number = re.search(r"\bblocks\.(\d+)\b", path)
        layer = str(int(number[1]) + 1) if number else parent.rpartition(".")[2]
        arrays = [x.detach().double().cpu().numpy() for x in (module.omega, module.zeta)]
        if last == "spectrum":  # a bank of one oscillator per channel has no heads
            arrays = [array.reshape(1, -1) for array in arrays]
        omega, zeta = arrays
        starts = np.zeros_like(omega)
        if isinstance(owner := modules[parent], OscillatorAttention):
            maps = getattr(owner, f"{last.removesuffix('_spectrum')}_velocity")
            if maps is not None:
                starts = maps.detach().double().diagonal(dim1=1, dim2=2).cpu().numpy()
        others = omega / scale, zeta, starts / scale, span, unit
        found.append(LayerSpectrum(layer, _ROLES[last], *others))
    return found


def summarise_spectra(spectra: Sequence[LayerSpectrum], tolerance: float = NEAR_CRITICAL) -> Any:
    """Return a data frame of damping regimes and medians, a row per layer, role and head.

    `underdamped`, `near_critical` and `overdamped` are parts of the channels; near-critical are
    those with a damping ratio within `tolerance` of 1. `period` and `zeta` are medians.
    """
    rows = []
    for item in spectra:
        for head, (omega, zeta) in enumerate(zip(item.omega, item.zeta, strict=True), start=1):
            kinds = regime(torch.from_numpy(omega), torch.from_numpy(zeta), tolerance=tolerance)
            shares = [float((kinds == kind).double().mean()) for kind in (-1, 0, 1)]
            medians = np.median(item.period[head - 1]), np.median(zeta)
            rows.append((item.layer, item.role, head, len(omega), *shares, *medians))
    names = ["layer", "role", "head", "channels", "underdamped", "near_critical", "overdamped"]
    return need("pandas", extra="data").DataFrame(rows, columns=[*names, "period", "zeta"])


class ProbeResponse(NamedTuple):
    """What one key makes of a query that is a cosine, by the frequency of the cosine."""

    drive_omega: Float[np.ndarray, "W"]  #: Frequencies, radians per unit of time.
    amplitude: Complex[np.ndarray, "W"]  #: Average of the key times $e^{iwt}$ over the gap.
    gain: Complex[np.ndarray, "W"]  #: Transfer function H of the oscillator.
    omega: float  #: Natural frequency of the key.
    zeta: float  #: Its damping ratio.
    gap: float  #: Time from the key to the row that asks.
    unit: str | None  #: Unit of time; None for plain numbers.

    def attention(self, phase: Float[np.ndarray, "P"]) -> Float[np.ndarray, "W P"]:
        r"""Return $\alpha(w, \varphi)$, the logit for the query $\cos(w t + \varphi)$."""
        return np.real(self.amplitude[:, None] * np.exp(1j * phase))

    @property
    def best(self) -> Float[np.ndarray, "W"]:
        r"""The largest logit over all phases, $\alpha_{\max}(w)$."""
        return np.abs(self.amplitude)

    @property
    def best_phase(self) -> Float[np.ndarray, "W"]:
        """The phase at which the logit is largest."""
        return -np.angle(self.amplitude)


def probe_channel(
    spectrum: LayerSpectrum,
    head: int,
    channel: int,
    *,
    gap: float | None = None,
    drive_omega: Float[np.ndarray, "W"] | None = None,
) -> ProbeResponse:
    r"""Return the response of a channel's logit to cosines of many frequencies.

    $$\alpha(w, \varphi) = \frac1\Delta \int_0^\Delta \cos(w s + \varphi)\, k(s)\, ds$$

    The key k starts at position 1 with its own learned velocity; a token scales it. For a key that
    is started by a blow alone and a long gap, the best phase is that of the transfer function. What
    drives and other channels add is left out.

    Args:
        spectrum: One of `find_spectra`.
        head: Number of the head, from 0.
        channel: Number of the channel, from 0.
        gap: The gap $\Delta$; the longest span of a training series if not given.
        drive_omega: Frequencies w; from a tenth of the natural one to ten times it if not given.
    """
    omega, zeta, velocity = (
        float(array[head, channel]) for array in (spectrum.omega, spectrum.zeta, spectrum.velocity)
    )
    gap = spectrum.span if gap is None else gap
    if drive_omega is None:
        drive_omega = omega * np.geomspace(0.1, 10.0, 401)
    w = torch.from_numpy(np.asarray(drive_omega, dtype=np.float64))
    parts = (torch.full_like(w, x) for x in (omega, zeta))
    of_position, of_velocity = modulated_averages(torch.full_like(w, gap), w, *parts)
    one, ratio = torch.tensor([omega, zeta], dtype=torch.float64)
    gain = transfer_function(w, omega=one, gamma=decay_rate(one, ratio)).numpy()
    amplitude = (of_position + velocity * of_velocity).numpy()
    return ProbeResponse(w.numpy(), amplitude, gain, omega, zeta, gap, spectrum.unit)
