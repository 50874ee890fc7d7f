"""Training leaves no trace in the process: random states, signals, log levels, warnings."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import torch

LOGGERS = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")


@contextlib.contextmanager
def undisturbed_random_state() -> Iterator[None]:
    """Put the states of Python's, NumPy's and torch's generators back afterwards."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence what Lightning says about itself, and put the handler of Ctrl-C back afterwards."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main_thread else None
    try:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            for module in ("pytorch_lightning", "lightning_fabric", "torchmetrics"):
                warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
            # Advice whose origin Lightning gives as the caller's.
            for message in (".*does not have many workers.*", ".*GPU available but not used.*"):
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
