"""Triton's interpreter made quick, and checks of the kernels that run in it.

Modules that import this one are skipped where there is no Triton, and where there is a GPU.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from .cases import DOUBLE
from .triton_cases import errors, exact, make_inputs, memory_full_of_nan, run

triton = pytest.importorskip("triton", reason="kernels need Triton")
tl = pytest.importorskip("triton.language")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on the GPU", allow_module_level=True)

# A function of that name hides the module.
way_in = importlib.import_module("osciformer.ops.attention.triton.attend")

# The largest errors seen: 5e-7 of outputs, 2.5e-6 of gradients (of a spectrum). In float32,
# `blocked` errs as much.
TOLERANCE = 5e-6


# --- The interpreter. -----------------------------------------------------------------------------


@contextmanager
def made_quick():
    """Spare the interpreter two thirds of its time, which is not arithmetic but types and names.

    No operation is left out and none computes anything else: what is worked out again for each of
    them is remembered instead. What a release of Triton does not have is left alone.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    semantic = importlib.import_module("triton.language.semantic")
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, remember in (
            (interpreter, "_patch_lang", _language_patched_once_a_launch),
            (interpreter, "_get_np_dtype", _numpy_types_remembered),
            (tl.core.block_type, "__init__", _block_types_remembered),
            (tl.core.tensor, "__init__", _tensors_remembered),
            (tl.core.dtype, "__eq__", _identity_first),
            (semantic.TritonSemantic, "broadcast_impl_value", _equal_shapes_first),
        ):
            original = getattr(owner, name, None)
            if original is not None:
                patch.setattr(owner, name, remember(original))
        yield


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter():
    """Run a module's tests in the quick interpreter."""
    with made_quick():
        yield


def _language_patched_once_a_launch(prepare):
    """Do not prepare the language for each device function where it has been prepared already.

    Members of the language are no builtins any more then.
    """

    class NothingToRestore:
        def restore(self):
            pass

    @cache
    def languages(fn):
        return [x for x in fn.__globals__.values() if x is tl or x is tl.core]

    def prepare_once(fn):
        is_raw = any(tl.core.is_builtin(x.load) for x in languages(fn))
        return prepare(fn) if is_raw else NothingToRestore()

    return prepare_once


def _numpy_types_remembered(numpy_type):
    known = {}

    def remembered(type):
        if type.name not in known:
            known[type.name] = numpy_type(type)
        return known[type.name]

    return remembered


def _block_types_remembered(initialise):
    known = {}

    def remembered(self, element_ty, shape):
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in known:
            initialise(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return remembered


def _tensors_remembered(initialise):
    """Take all that follows from a tensor's type from the first tensor of that type."""
    known = {}

    def remembered(self, handle, type):
        if type.name not in known:
            initialise(self, handle, type)
            known[type.name] = dict(vars(self))
        vars(self).update(known[type.name])
        self.handle = handle

    return remembered


def _identity_first(is_equal):
    return lambda a, b: a is b or is_equal(a, b)


def _equal_shapes_first(broadcast):
    def unless_equal(self, a, b):
        if a.type.is_block() and b.type.is_block() and list(a.type.shape) == list(b.type.shape):
            return a, b
        return broadcast(self, a, b)

    return unless_equal


@pytest.fixture
def rounding_to_nearest(monkeypatch):
    """Let the interpreter round float32 to bfloat16 as hardware does; it cuts the digits off."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    cut_off = interpreter.InterpreterBuilder.cast_impl

    def cast(builder, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cut_off(builder, src, dst_type)
        rounded = torch.from_numpy(src.data.copy()).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view("uint16"), dst_type.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)


@pytest.fixture(autouse=True)
def no_blocked(monkeypatch):
    """Let nothing be handed on to `blocked` by the kernels' way in."""
    monkeypatch.setattr(way_in, "blocked", None)


@pytest.fixture(autouse=True)
def tiled(monkeypatch):
    """Let the tiled kernels take short series, too, for tests of their stages."""
    monkeypatch.setattr(way_in, "PAIRED_LENGTH", 0)


# --- Series. --------------------------------------------------------------------------------------


@pytest.fixture
def short_spans(monkeypatch):
    """Make two tiles a span, so that three spans are a short series."""
    monkeypatch.setattr("osciformer.ops.attention.triton.call.SPAN", 128)


def uneven_times(length, *, batch=1, seed=3):
    """Gaps of 1e-9 to 1, one of 1e4, and every 16th token at the time of the one before."""
    g = torch.Generator().manual_seed(seed)
    gaps = 10 ** (torch.rand(batch, length, generator=g, dtype=DOUBLE) * 9 - 9)
    gaps[:, 10::16] = 0.0
    gaps[:, 40] = 1e4
    return gaps.cumsum(1)


def tied_times(length, groups):
    """Times that are all different but for groups of places from (first, last)."""
    times = torch.arange(length, dtype=DOUBLE) * 0.037
    for first, last in groups:
        times[first : last + 1] = times[first]
    return times[None]


def path_inputs(query, *args, **options):
    """Return `make_inputs` with what a path needs: three modes, or those of a trajectory."""
    x = make_inputs(*args, **options)
    if query in ("ridge", "learned"):
        x["bank"] = torch.tensor([0.3, 2.0, 20.0], dtype=DOUBLE)
    if query == "learned":
        g = torch.Generator().manual_seed(1)
        heads, channels = x.pop("q").shape[2:]
        for n in ("cos", "sin"):
            x[f"mode_{n}"] = torch.randn(heads, 3, channels, generator=g).double()
    return x


# --- Checks. --------------------------------------------------------------------------------------


def assert_close(got, want, tolerance=TOLERANCE):
    """Check all results against their largest entries."""
    found = errors(got, want)
    wrong = {name: f"{e:.1e}" for name, e in found.items() if not e <= tolerance}
    assert not wrong, f"errors above {tolerance:g}: {wrong}"


def check(x, *, judge="reference", tolerance=TOLERANCE, buffers=11, **options):
    """Compare output and all gradients; the judge gets the same rounded inputs in float64.

    `blocked`, which other tests hold against `reference`, is the quicker judge of long series.
    Buffers, of which the kernels take this many or more, start as NaN: nothing may be read before
    it is written.

    Returns:
        What `run` returns, of the kernels and of the judge.
    """
    with memory_full_of_nan() as shapes:
        got = run(x, backend="triton", **options)
    assert len(shapes) >= buffers
    want = run(exact(x), backend=judge, **options)
    assert_close(got, want, tolerance)
    return got, want
