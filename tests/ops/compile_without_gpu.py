"""Compiles kernels for a GPU that is not there, and prints what happened as JSON.

Run by `test_triton_compilation` without Triton's interpreter, with a cache folder of its own.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from osciformer.ops.attention.triton import compilation, operators

#: Kernels that compile within a second.
CHEAP = ("build_table", "row_sums", "span_times", "weigh_rows")
HEADS, CHANNELS = 3, 16


class Driver:
    """As much of a driver as compilation asks for."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def shapes(length, batch=2):
    """Return the tensors of a call, without memory."""
    tokens = [torch.empty(batch, length, HEADS, CHANNELS, dtype=torch.bfloat16, device="meta")] * 3
    spectra = [torch.empty(2, HEADS, CHANNELS, dtype=torch.float64, device="meta")] * 2
    times = torch.empty(batch, length, dtype=torch.float64, device="meta")
    return [*tokens, None, None, *spectra, None, times, None]


def launches_of(prepare_call, *args, **flags):
    """Return the launches that a call would prepare."""
    found = []

    def keep(kind, rehearsal, name):
        with compilation.recorded() as launches:
            rehearsal()
        found.extend(launches)

    operators.prepare = keep
    prepare_call(*args, (0.25, True, False), **flags)
    operators.prepare = compilation.prepare
    return found


def rehearse(length, **flags):
    """Return the launches of a call of this length to the tiled kernels."""
    return launches_of(operators._prepare, shapes(length), **flags)


def rehearse_pairs(length, **flags):
    """Return the launches of a call of this length to the kernels of short series."""
    spectra = [torch.empty(HEADS, CHANNELS, dtype=torch.float32, device="meta")] * 4
    q, k, v, *velocities, _, _, _, times, mask = shapes(length)
    tensors = (q, k, v, *velocities, *spectra, times, times, mask)
    return launches_of(operators._prepare_pairs, tensors, **flags)


def count_kernels(launches, names=CHEAP):
    """Return in how many ways some kernels are compiled in this process."""
    kernels = {one.kernel.__name__: one.kernel for one in launches}
    return {name: len(kernels[name].device_caches[0][0]) for name in names}


def main():
    driver.set_active(Driver())
    report = {"forward": [], "training": [], "told": [], "watched": []}
    for name, is_trained in (("forward", False), ("training", True)):
        launches = rehearse(700, is_trained=is_trained, is_spectral=is_trained)
        report[name] = sorted({one.kernel.__name__ for one in launches})

    compilation._PATIENCE = 0.0
    cheap = [one for one in launches if one.kernel.__name__ in CHEAP]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compilation.prepare("cold", lambda: record_again(cheap), "a test")
        report["told"] = [
            str(one.message) for one in told if one.category is compilation.CompilationWarning
        ]
    report["compiled"] = count_kernels(launches)
    report["on_disk"] = len(list(compilation.cache_folder().glob("*/*.cubin")))

    # Lengths and numbers of series that Triton would tell apart, were they given as they are.
    for length in (1, 64, 600, 704):
        for one in rehearse(length, is_trained=True, is_spectral=True):
            if one.kernel.__name__ in CHEAP:
                one.kernel.warmup(*one.args, grid=(1,), **one.options)
    report["after_other_lengths"] = count_kernels(launches)

    for one in cheap:
        one.kernel.device_caches.clear()
    with compilation.watched(lambda done, count: report["watched"].append([done, count])):
        compilation.compile_together(cheap, "a test")

    for length in (24, 64, 255):
        launches = rehearse_pairs(length, is_trained=True, is_spectral=True)
        for one in launches:
            one.kernel.warmup(*one.args, grid=(1,), **one.options)
    report["pairs"] = count_kernels(launches, [one.kernel.__name__ for one in launches])
    launches = rehearse_pairs(24, is_trained=False, is_spectral=False)
    report["pairs_forward"] = [one.kernel.__name__ for one in launches]

    def fail():
        raise RuntimeError("no rehearsal")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compilation.prepare("failing", fail, "a test")
    report["failed"] = [str(one.message) for one in told]

    def interrupt():
        raise KeyboardInterrupt

    try:
        compilation.prepare("interrupted", interrupt, "a test")
    except KeyboardInterrupt:
        report["is_tried_again"] = "interrupted" not in compilation._PREPARED
    json.dump(report, sys.stdout)


def record_again(launches):
    """Launch what was recorded."""
    for kernel, args, options in launches:
        compilation.launch(kernel, (1,), *args, **options)


if __name__ == "__main__":
    main()
