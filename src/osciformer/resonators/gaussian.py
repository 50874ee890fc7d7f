"""The Gaussian kernel of columns, by landmarks, so that its cost is linear in the series."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from osciformer._types import Float

#: Exponent at the mean squared distance of two series.
SHARPNESS = 0.5
# Directions of the landmarks' kernel that are flatter than this part of the steepest are left out.
_FLAT = 1e-6


def sharpen(kernel: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Return the Gaussian kernel of rows whose products are given."""
    squares = np.diag(kernel)
    distance = squares[:, None] + squares - 2.0 * kernel
    mean = distance.mean()
    found: np.ndarray = np.exp(distance * (-SHARPNESS / mean if mean > 0 else 0.0))
    return found


class Gaussian(NamedTuple):
    """`exp(-rate * d)` of the squared distances d of rows and landmarks."""

    landmarks: Float[np.ndarray, "m p"]
    rate: float

    @classmethod
    def of(cls, landmarks: Float[np.ndarray, "m p"]) -> Gaussian:
        """Return the kernel whose rate fits the mean squared distance of the landmarks."""
        spread = landmarks.var(axis=0).sum()
        return cls(landmarks, float(0.5 * SHARPNESS / spread) if spread > 0 else 0.0)

    def __call__(self, columns: Float[np.ndarray, "n p"]) -> Float[np.ndarray, "n m"]:
        """Return the kernel of rows and landmarks."""
        distance = columns @ self.landmarks.T
        distance *= -2.0
        distance += np.square(columns).sum(axis=1)[:, None]
        distance += np.square(self.landmarks).sum(axis=1)
        distance *= -self.rate
        found: np.ndarray = np.exp(np.minimum(distance, 0.0, out=distance), out=distance)
        return found

    def expansion(self) -> Float[np.ndarray, "m r"]:
        """Return W such that the products of rows of `kernel @ W` are about the kernel."""
        spectrum, basis = np.linalg.eigh(self(self.landmarks))
        kept = spectrum > _FLAT * spectrum[-1]
        return basis[:, kept] / np.sqrt(spectrum[kept])

    def slopes(
        self, columns: Float[np.ndarray, "n p"], coefficients: Float[np.ndarray, "m"]
    ) -> Float[np.ndarray, "n p"]:
        """Return how `kernel @ coefficients` changes with each column of each row."""
        weighed = self(columns) * coefficients
        return 2.0 * self.rate * (weighed @ self.landmarks - weighed.sum(axis=1)[:, None] * columns)
