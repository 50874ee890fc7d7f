"""Multivariate classification sets of the UEA archive: regular, but for their lengths.

The compact copies have the values of the archive as float32. Their times are the numbers of the
steps. Labels are the class names, as text.
"""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath

import numpy as np

from osciformer.data.archives import iter_members
from osciformer.data.dataset_info import Request
from osciformer.data.errors import UnreadableFileError
from osciformer.data.files import read_ts
from osciformer.data.series import IrregularSeries

_RESAMPLED = ("train", "val", "test")
# Unpacked, the largest of these sets takes well below a gigabyte.
_MAX_BYTES = 2 << 30


def load_copy(request: Request, classes: tuple[str, ...] | None = None) -> IrregularSeries:
    """Return a part of a compact copy with the archive's train and test parts."""
    (path,) = request.files.values()
    with np.load(path, allow_pickle=False) as arrays:
        try:
            values = arrays[f"X_{request.split}"]
            lengths = arrays[f"len_{request.split}"]
            labels = arrays[f"y_{request.split}"]
            names = np.array(classes) if classes else arrays["classes"]
        except KeyError as error:
            raise UnreadableFileError(f"{path}: {error}") from error
    return IrregularSeries.from_padded(
        values,
        lengths=lengths,
        labels=names[labels],
        ids=_ids(request.split, len(values)),
        feature_names=_channels(values.shape[2]),
    )


def load_resampled(request: Request, classes: tuple[str, ...] | None = None) -> IrregularSeries:
    """Return a part of one of five random splits (fold 1 to 5) of all series together."""
    (path,) = request.files.values()
    with np.load(path, allow_pickle=False) as arrays:
        if "X" in arrays:
            values, labels, split = arrays["X"], arrays["y"], arrays["split"]
            names = np.array(classes)
        else:
            values = np.concatenate([arrays["X_train"], arrays["X_test"]])
            labels = np.concatenate([arrays["y_train"], arrays["y_test"]])
            split, names = arrays["split5"], arrays["classes"]
    if request.fold is None:
        raise ValueError("fold must be one of 1 to 5, got None")
    chosen = np.flatnonzero(split[:, request.fold - 1] == _RESAMPLED.index(request.split))
    return IrregularSeries.from_padded(
        values[chosen],
        lengths=np.full(len(chosen), values.shape[1]),
        labels=names[labels[chosen]],
        ids=chosen,
        feature_names=_channels(values.shape[2]),
    )


def load_original(request: Request) -> IrregularSeries:
    """Return a part of the archive's zip file, which holds it as a `.ts` file."""
    (archive,) = request.files.values()
    file = f"{archive.stem}_{request.split.upper()}.ts"
    members = iter_members(
        archive, lambda name: PurePosixPath(name).name == file, max_bytes=_MAX_BYTES
    )
    with tempfile.TemporaryDirectory(prefix="osciformer-") as folder:
        path = Path(folder, file)
        for _, blocks in members:
            with path.open("wb") as stream:
                stream.writelines(blocks)
        if not path.exists():
            raise UnreadableFileError(f"{archive} does not hold {file}")
        series = read_ts(path)
    return series.replace(
        ids=_ids(request.split, len(series)), feature_names=_channels(series.num_features)
    )


def _ids(split: str, count: int) -> np.ndarray:
    return np.array([f"{split}-{number}" for number in range(count)])


def _channels(count: int) -> tuple[str, ...]:
    return tuple(f"channel_{number}" for number in range(count))
