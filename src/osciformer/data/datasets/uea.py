"""Multivariate classification sets of the UEA archive: regular, but for their lengths.

The compact copies have the values of the archive as float32. Their times are the numbers of the
steps. Labels are the class names, as text.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from osciformer.data.archives import extract
from osciformer.data.dataset_info import DataFile, DatasetInfo, Request, Source
from osciformer.data.errors import UnreadableFileError
from osciformer.data.series import IrregularSeries
from osciformer.data.ts_files import read_ts

_LICENCE = "UEA archive: donated for research, no formal licence; cite it and the set's own source"
_CITATION = (
    "Bagnall A, Dau HA, Lines J, Flynn M, Large J, Bostrom A, Southam P, Keogh E. The UEA "
    "multivariate time series classification archive, 2018. arXiv:1811.00075."
)
_SPLIT = "The archive's own train and test parts."
_OFFICIAL = ("train", "test")
_RESAMPLED = ("train", "val", "test")
_SHIFTED = (
    "Channel c + 1 is channel c moved by C steps (C channels), exactly and in every series: the "
    "channels are overlapping windows of one signal. Most likely the published values; kept."
)
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
    with tempfile.TemporaryDirectory(prefix="osciformer-") as temporary:
        folder = Path(temporary, "unpacked")
        extract(
            archive, folder, lambda name: PurePosixPath(name).name == file, max_bytes=_MAX_BYTES
        )
        found = sorted(folder.rglob(file))
        if not found:
            raise UnreadableFileError(f"{archive} does not hold {file}")
        series = read_ts(found[0])
    return series.replace(
        ids=_ids(request.split, len(series)), feature_names=_channels(series.num_features)
    )


def _ids(split: str, count: int) -> np.ndarray:
    return np.array([f"{split}-{number}" for number in range(count)])


def _channels(count: int) -> tuple[str, ...]:
    return tuple(f"channel_{number}" for number in range(count))


def _archive_source(name: str) -> Source:
    address = f"https://timeseriesclassification.com/aeon-toolkit/{name}.zip"
    return Source(files=(DataFile(f"{name}.zip", addresses=(address,)),), load=load_original)


def _official(
    name: str,
    description: str,
    sha256: str,
    *,
    notes: tuple[str, ...] = (),
    classes: tuple[str, ...] | None = None,
) -> DatasetInfo:
    return DatasetInfo(
        name=name,
        description=description,
        task="classification",
        splits=_OFFICIAL,
        split_definition=_SPLIT,
        licence=_LICENCE,
        citation=_CITATION,
        homepage=f"https://www.timeseriesclassification.com/description.php?Dataset={name}",
        local=Source(
            files=(DataFile(f"uea/{name}.npz", sha256=sha256),),
            load=partial(load_copy, classes=classes),
        ),
        public=_archive_source(name),
        notes=notes,
    )


def _resampled(
    name: str,
    description: str,
    file: str,
    sha256: str,
    *,
    notes: tuple[str, ...],
    classes: tuple[str, ...] | None = None,
) -> DatasetInfo:
    return DatasetInfo(
        name=name,
        description=description,
        task="classification",
        splits=_RESAMPLED,
        split_definition=(
            "Published random splits 70/15/15 of train and test together, with the seeds 2345, "
            "3456, 4567, 5678 and 6789: folds 1 to 5."
        ),
        licence=_LICENCE,
        citation=_CITATION,
        local=Source(
            files=(DataFile(f"uea/{file}", sha256=sha256),),
            load=partial(load_resampled, classes=classes),
        ),
        folds=(1, 2, 3, 4, 5),
        notes=notes,
    )


_HEARTBEAT = DatasetInfo(
    name="Heartbeat",
    description="Spectrograms of heart sounds: 204/205 series, 405 steps, 61 channels, 2 classes.",
    task="classification",
    splits=_OFFICIAL,
    split_definition=_SPLIT,
    licence=_LICENCE,
    citation=_CITATION,
    homepage="https://www.timeseriesclassification.com/description.php?Dataset=Heartbeat",
    local=Source(
        files=(
            DataFile(
                "uea/Heartbeat_train_only.npz",
                sha256="2213e6f446b97352f79ce42dfd301e96d85c39ea5083a9ff9338df198e715046",
            ),
        ),
        load=load_copy,
        splits=("train",),
    ),
    public=_archive_source("Heartbeat"),
    notes=("The compact copy has the train part alone.",),
)

UEA = (
    _official(
        "ArticularyWordRecognition",
        "Movements of tongue and lips: 275/300 series, 144 steps, 9 channels, 25 classes.",
        "33bb513741955b16129a36be339730d8ac1987669adfedbfc211bb56b10dc42a",
    ),
    _official(
        "AtrialFibrillation",
        "Two-lead ECG: 15/15 series, 640 steps, 2 channels, 3 classes.",
        "43e50c98eca8cea940d80104e2e31a46f3dcc89115fc586259862bac918ce876",
    ),
    _official(
        "BasicMotions",
        "Smartwatch motion: 40/40 series, 100 steps, 6 channels, 4 classes.",
        "8704e1ade7034bd6b896a2b2101d2ab50f28f47a2ac9efcc3e2aacafe4a6b55c",
    ),
    _official(
        "ERing",
        "Finger gestures: 30/270 series, 65 steps, 4 channels, 6 classes.",
        "02e4d6cfe7cf78d11d4536d80329c19c89da308e4fb110d28107575071e8c58d",
    ),
    _official(
        "FingerMovements",
        "EEG before a key press: 316/100 series, 50 steps, 28 channels, 2 classes.",
        "96cf47d758a52e0cb2a5706be65cab586ad4ca77b038932a16809f5569236228",
        notes=(_SHIFTED,),
    ),
    _official(
        "HandMovementDirection",
        "MEG of wrist movements: 160/74 series, 400 steps, 10 channels, 4 classes.",
        "ddb587a0c5a0b7c0a99c4a4723e56fb7b5071c17a0432d9bd237dc585fca3f82",
    ),
    _official(
        "Handwriting",
        "Letters from a smartwatch: 150/850 series, 152 steps, 3 channels, 26 classes.",
        "a465be2fdfaa1622b59b43665e7a1552f6eb8290fe6708e536de23a146240758",
    ),
    _HEARTBEAT,
    _official(
        "JapaneseVowels",
        "Nine speakers say two vowels: 270/370 series, 7 to 29 steps, 12 channels, 9 classes.",
        "94491798703acc7abef9bd56a7f83449a688e8d75d6f5b34e6d67a77cca40c5c",
    ),
    _official(
        "LSST",
        "Simulated light curves: 2459/2466 series, 36 steps, 6 channels, 14 classes.",
        "8fc96fa8338ec989eb5d15160ef7ed78368807db7d04ac66a21194a541ff6b81",
    ),
    _official(
        "Libras",
        "Hand movements of sign language: 180/180 series, 45 steps, 2 channels, 15 classes.",
        "8a2f9ddfd89436ee1d7c9e4ed8b123b435417bfef14159cd9b11b3d11e9da0dd",
    ),
    _official(
        "MotorImagery",
        "ECoG of imagined movements: 278/100 series, 3000 steps, 64 channels, 2 classes.",
        "b5ddc4c8e0f5353fc1db81363b879f54459b925c262a73a69413fa34ac1cc9ae",
        notes=(_SHIFTED, "Takes 290 MB of memory."),
    ),
    _official(
        "PenDigits",
        "Written digits: 7494/3498 series, 8 steps, 2 channels, 10 classes.",
        "e498032f545e635f867940a367caf1aefdadb203990e7197c4335bf00aa9bc64",
        # The copy numbers its classes from 1; their counts are those of the digits 0 to 9.
        classes=tuple("0123456789"),
    ),
    _official(
        "RacketSports",
        "Strokes from a smartwatch: 151/152 series, 30 steps, 6 channels, 4 classes.",
        "c54281c59559d0d1f7d2414e9493bc0945219e96c732c65bc275d1cf6c7c5910",
    ),
    _official(
        "SelfRegulationSCP1",
        "Slow cortical potentials: 268/293 series, 896 steps, 6 channels, 2 classes.",
        "f294182c45e95a532afe7cdd38aef30b149a3da48d8784b33b44deab3c911c56",
        notes=(_SHIFTED,),
    ),
    _resampled(
        "SelfRegulationSCP1-resampled",
        "SelfRegulationSCP1 in five published random splits of 392/84/85 series.",
        "SelfRegulationSCP1.npz",
        "f294182c45e95a532afe7cdd38aef30b149a3da48d8784b33b44deab3c911c56",
        notes=(_SHIFTED,),
    ),
    _resampled(
        "SelfRegulationSCP2-partial",
        "Slow cortical potentials: 311 of 380 series, 1152 steps, 7 channels, 2 classes.",
        "SelfRegulationSCP2_partial.npz",
        "92bd3b5a938fc37ded61735c8d7310bb7286a39837af1c3c6e951f46d27a1e9a",
        classes=("negativity", "positivity"),
        notes=(
            _SHIFTED,
            "Val and test of each fold are complete, train has 197 of 266 series: do not put "
            "results beside published ones without saying so.",
            "The names of the classes are taken from SelfRegulationSCP1 and not checked.",
        ),
    ),
    _resampled(
        "EthanolConcentration-partial",
        "Spectra of spirits: 448 of 524 series, 1751 steps, 3 channels, 4 classes.",
        "EthanolConcentration_partial.npz",
        "1a59169127903379aa56d8b3baf789379d50eb6acf4c82024f5c209c5287fdbe",
        classes=("e35", "e38", "e40", "e45"),
        notes=(
            "Val and test of each fold are complete, train has 290 of 366 series: do not put "
            "results beside published ones without saying so.",
        ),
    ),
    _official(
        "StandWalkJump",
        "ECG during three activities: 12/15 series, 2500 steps, 4 channels, 3 classes.",
        "374f6556c65353eee7be72e6d093acde8ab048fd8292e65406fe11aa0c8f199a",
        notes=("The compact copy calls the classes 1, 2, 3; the archive may use words.",),
    ),
    _official(
        "UWaveGestureLibrary",
        "Gestures with an accelerometer: 120/320 series, 315 steps, 3 channels, 8 classes.",
        "fccaf4d2aad27cbd5e33944010281a3a41e6c26f76c23b38fd2edb6aed65d23e",
    ),
)
