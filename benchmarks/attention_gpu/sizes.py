"""Lengths and shapes of a run, and what its parts share."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        n: Lengths of the main comparison.
        tokens: Tokens in a batch, so that the batch is `tokens // N`.
        c: Numbers of channels a head.
        heads: H.
        query_n: Lengths of the other query modes.
        modes_n: Lengths at which the number of modes varies.
        num_modes: The numbers J.
        blocked_n: Lengths of the PyTorch backend.
        conti_n: Lengths of ContiFormer, until one does not fit.
        conti_c: Its channels a head.
        error_n: Lengths at which results are compared.
        profile_n: Lengths whose kernels are listed.
        graph_n: Length of graph capture and compilation.
        long_n: Length of the training step.
        seconds: Time for the repetitions of one call.
        matmul: Size of the square matrix product that sets the peak.
    """

    n: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    tokens: int = 65536
    c: tuple[int, ...] = (32, 64)
    heads: int = 8
    query_n: tuple[int, ...] = (4096, 16384)
    modes_n: tuple[int, ...] = (4096,)
    num_modes: tuple[int, ...] = (4, 8, 16, 32)
    blocked_n: tuple[int, ...] = (1024, 2048, 4096)
    conti_n: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    conti_c: int = 32
    error_n: tuple[int, ...] = (1024, 4096)
    profile_n: tuple[int, ...] = (4096, 1024)
    graph_n: int = 1024
    long_n: int = 65536
    seconds: float = 1.0
    matmul: int = 8192

    def batch(self, n: int) -> int:
        """Return the batch at length `n`, at least 1."""
        return max(1, self.tokens // n)


FULL = Sizes()
QUICK = Sizes(
    n=(1024, 4096),
    tokens=8192,
    query_n=(4096,),
    blocked_n=(1024,),
    conti_n=(128, 256, 512),
    error_n=(1024,),
    profile_n=(1024,),
    long_n=16384,
    seconds=0.2,
)
#: For machines without a GPU: the numbers mean nothing, the code runs.
CPU = Sizes(
    n=(64, 128),
    tokens=128,
    c=(4,),
    heads=2,
    query_n=(64,),
    modes_n=(64,),
    num_modes=(2, 4),
    blocked_n=(64,),
    conti_n=(8,),
    conti_c=4,
    error_n=(64,),
    profile_n=(16,),
    graph_n=16,
    long_n=128,
    seconds=0.02,
    matmul=64,
)


@dataclass
class Run:
    """What the parts share.

    Attributes:
        sizes: What is measured.
        device: Where.
        backend: Backend of the operator that is judged.
        deadline: `time.monotonic()` after which no measurement is begun.
        peak_tflops: Measured rate of a large matrix product.
    """

    sizes: Sizes
    device: torch.device
    backend: str
    deadline: float = float("inf")
    peak_tflops: float | None = None

    @property
    def memory_mib(self) -> float:
        """Memory of the device; infinite on a CPU, which is not filled."""
        if self.device.type != "cuda":
            return float("inf")
        return torch.cuda.get_device_properties(self.device).total_memory / 2**20

    @property
    def is_late(self) -> bool:
        """Whether the time for the whole run is used up."""
        return time.monotonic() > self.deadline
