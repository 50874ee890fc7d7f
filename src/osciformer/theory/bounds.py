r"""The inequalities of the theorem, each with its constant.

`docs/theory.md` proves them. Where the paper's constant is not the best one, the better one is
here: it is what makes a certificate worth having.
"""

from __future__ import annotations

import math

import torch

from osciformer._types import Float, Tensor
from osciformer.theory.bank import OscillatorBank


def fejer_bound(lipschitz: float, length: float, order: int) -> float:
    r"""Return how far a Fejer mean of order M can be from a path with a Lipschitz constant.

    $$\sup\|f - \sigma_M f\| \le \frac{\Lambda L}{\pi} m_M, \qquad m_M = \frac\pi2 - \frac4\pi
    \sum_{k\ \mathrm{odd}}^{M} \Big(1 - \frac{k}{M+1}\Big) \frac{1}{k^2}
    \approx \frac{2}{\pi M} (\ln M + 2.27)$$

    for the even extension of a path on an interval of length L; $m_M$ is the mean of $|\theta|$
    under the kernel. A straight line reaches it, so no smaller constant holds.

    Example:
        >>> round(fejer_bound(1.0, 1.0, 100), 4)
        0.0138
    """
    odd = torch.arange(1, order + 1, 2, dtype=torch.float64)
    mean = 0.5 * math.pi - 4.0 / math.pi * float(((1.0 - odd / (order + 1)) / odd**2).sum())
    return lipschitz * length / math.pi * mean


def perturbation_constant(bank: OscillatorBank, length: float) -> float:
    r"""Return the paper's K with $\sup_{s \le T}\|C(e^{A_\gamma s} - e^{A_0s})\| \le K\max\gamma$.

    $K = 2\|C\|M_{\bar\gamma}M_0T$. Energy does not grow, so both suprema of norms are at most
    $\max(\omega_n, 1/\omega_n)$, of the zero mode $(T + \sqrt{T^2 + 4})/2$, for any damping.

    Args:
        bank: The bank; its decay rates do not matter.
        length: Longest time T.
    """
    moving = bank.omega[bank.omega > 0]
    largest = torch.cat((moving, 1.0 / moving)).max().item() if len(moving) else 0.0
    largest = max(largest, 0.5 * (length + math.hypot(length, 2.0)))
    return 2.0 * math.sqrt(len(bank.omega)) * largest**2 * length


def readout_constant(bank: OscillatorBank, length: float) -> float:
    r"""Return a K like `perturbation_constant` that is not far from the truth.

    $$K = \Big(T^4 + \sum_{n\ge1} 4T^2 \max(1, \omega_n^{-2})\Big)^{1/2}$$
    """
    moving = bank.omega[bank.omega > 0]
    parts = 4.0 * length**2 * torch.clamp(moving**-2, min=1.0)
    return math.sqrt(length**4 + float(parts.sum()))


def damping_bound(
    bank: OscillatorBank, states: Float[Tensor, "*S M+1 2 d"], length: float
) -> Float[Tensor, "*S"]:
    r"""Return how far the bank's damping moves a path within a time T: $2T\sum_n\gamma_nr_n$.

    The states are those of the undamped path, its zero mode without velocity; $r_n$ are their
    amplitudes. Frequencies do not matter, and neither does how strong the damping is.
    """
    return 2.0 * length * (bank.amplitudes(states)[..., 1:] @ bank.gamma[1:])


def logit_bound(query_size: float, key_size: float, query_error: float, key_error: float) -> float:
    r"""Return how far logits can move: $\|q\|\varepsilon_k + (\|k\| + \varepsilon_k)\varepsilon_q$.

    All four are suprema over the times of Euclidean norms. With an exact query it is the paper's.
    """
    return query_size * key_error + (key_size + key_error) * query_error


def softmax_bound(error: float) -> float:
    r"""Return how far a softmax can move in the sum of absolute differences: $2\tanh(e/2) \le e$.

    `error` is the largest change of a logit. The paper has $e$; both have slope 1 at zero, and this
    one is reached by two equal logits that move apart.

    Example:
        >>> softmax_bound(1e-6) <= 1e-6, softmax_bound(100.0)
        (True, 2.0)
    """
    return 2.0 * math.tanh(0.5 * error)


def output_bound(weight_error: float, value_size: float, value_error: float) -> float:
    r"""Return how far weighted averages of values can move: $\varepsilon_v + \|v\|\varepsilon_w$.

    Args:
        weight_error: $\varepsilon_w$: sum of absolute differences of the weights of a row.
        value_size: Supremum of the norms of the values.
        value_error: $\varepsilon_v$: supremum of the norms of their errors.
    """
    return value_error + value_size * weight_error
