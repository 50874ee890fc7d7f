"""Classifiers of aeon, in a virtual environment that has it: requests and answers on one line each.

`aeon_models.py` starts this file. A request is a JSON object with `data`, an npz file of the arrays
`train`, `test` [n, F, T], `train_labels`, `test_labels` [n]; `model`; and `seed`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

NAMES = {"multirocket_hydra": "MultiRocketHydraClassifier", "rocket": "RocketClassifier"}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracy of a classifier, or its error."""
    # Not at the top, so that a failure of the import is an answer, too.
    from aeon.classification import convolution_based

    with np.load(request["data"]) as arrays:
        train, test = arrays["train"], arrays["test"]
        train_labels, test_labels = arrays["train_labels"], arrays["test_labels"]
    kind = getattr(convolution_based, NAMES[request["model"]])
    model = kind(random_state=request["seed"], n_jobs=1)
    started = time.process_time()
    model.fit(train, train_labels)
    fitted = time.process_time()
    accuracy = float((model.predict(test) == test_labels).mean())
    return {
        "accuracy": accuracy,
        "cpu_seconds": round(fitted - started, 2),
        "aeon": version("aeon"),
        "numpy": version("numpy"),
    }


def follow(parent: int) -> None:
    """End with the process that asked, even in the middle of an answer."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Answer requests until there are no more."""
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # what packages print is no answer
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
