"""Sequences of events in continuous time, each with a type.

A split is an Arrow table with one row an event: `seq_id` (from 0), `time` and `type` (from 0), in
time order inside a sequence, the rows of a sequence together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from osciformer._optional import need
from osciformer.data.dataset_info import DataFile, DatasetInfo, Request, Source
from osciformer.data.errors import UnreadableFileError

_FOLDS = (1, 2, 3, 4, 5)


def load_copy(request: Request) -> Any:
    """Return the events of one split, and of one fold where there are folds."""
    table = _read_copy(request)
    compute = need("pyarrow.compute", extra="data")
    if request.fold is not None:
        table = table.filter(compute.equal(table["fold"], request.fold)).drop_columns("fold")
    if "split" in table.column_names:
        table = table.filter(compute.equal(table["split"], request.split)).drop_columns("split")
    return table


def load_stackoverflow_copy(request: Request) -> Any:
    """Return the sequences that are, or are not, in the test part of a fold."""
    if request.fold is None:
        raise ValueError("fold must be one of 1 to 5, got None")
    table = _read_copy(request)
    bit = table["test_fold_mask"].to_numpy() >> (request.fold - 1) & 1
    table = table.filter(need("pyarrow", extra="data").array(bit == (request.split == "test")))
    return table.drop_columns(["split", "test_fold_mask"])


def _read_copy(request: Request) -> Any:
    (path,) = request.files.values()
    return need("pyarrow.parquet", extra="data").read_table(path)


def load_text(request: Request) -> Any:
    """Return the events of two text files: a line a sequence, one with types, one with times.

    The types count from 1 in the files.
    """
    key = f"{request.fold}-{request.split}.txt"
    types = _read_lines(request.files[f"event-{key}"])
    times = _read_lines(request.files[f"time-{key}"])
    if len(types) != len(times):
        raise UnreadableFileError(
            f"event-{key} has {len(types)} sequences, time-{key} has {len(times)}"
        )
    for number, (some, others) in enumerate(zip(types, times, strict=True), start=1):
        if len(some) != len(others):
            raise UnreadableFileError(
                f"line {number} has {len(some)} types in event-{key} "
                f"and {len(others)} times in time-{key}"
            )
    return _table(times, [line - 1 for line in types])


def _read_lines(path: Path) -> list[np.ndarray]:
    with path.open(encoding="utf-8") as stream:
        lines = [line.split() for line in stream]
    try:
        return [np.array(line, dtype=np.float64) for line in lines if line]
    except ValueError as error:
        raise UnreadableFileError(f"{path}: {error}") from error


def load_json(request: Request) -> Any:
    """Return the events of one JSON file in the form of EasyTPP, a list or a line a sequence."""
    path = request.files[f"{request.split}.json"]
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            sequences = json.loads(text)
        else:
            sequences = [json.loads(line) for line in text.splitlines() if line.strip()]
        times = [np.array(s["time_since_start"], dtype=np.float64) for s in sequences]
        types = [np.array(s["type_event"], dtype=np.float64) for s in sequences]
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFileError(
            f"{path} must hold sequences with time_since_start and type_event ({error})"
        ) from error
    return _table(times, types)


def _table(times: Sequence[np.ndarray], types: Iterable[np.ndarray]) -> Any:
    pyarrow = need("pyarrow", extra="data")
    lengths = [len(sequence) for sequence in times]
    return pyarrow.table(
        {
            "seq_id": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
            "time": np.concatenate([np.empty(0), *times]),
            "type": np.concatenate([np.empty(0), *types]).astype(np.int16),
        }
    )


def _copy(name: str, sha256: str) -> Source:
    return Source(files=(DataFile(f"tpp/{name}.parquet", sha256=sha256),), load=load_copy)


def _text_source(folder: str) -> Source:
    base = f"https://raw.githubusercontent.com/dunan/NeuralPointProcess/master/data/real/{folder}/"
    return Source(
        files=tuple(
            DataFile(
                f"{kind}-{fold}-{split}.txt",
                addresses=(f"{base}{kind}-{fold}-{split}.txt",),
                splits=(split,),
                folds=(fold,),
            )
            for fold in _FOLDS
            for split in ("train", "test")
            for kind in ("event", "time")
        ),
        load=load_text,
    )


def _json_source(name: str) -> Source:
    base = f"https://huggingface.co/datasets/easytpp/{name}/resolve/main/"
    return Source(
        files=tuple(
            DataFile(f"{split}.json", addresses=(f"{base}{split}.json",), splits=(split,))
            for split in ("train", "dev", "test")
        ),
        load=load_json,
    )


_info = partial(DatasetInfo, task="events")
_RMTPP = (
    "Du N, Dai H, Trivedi R, Upadhyay U, Gomez-Rodriguez M, Song L. Recurrent marked temporal "
    "point processes: embedding event history to vector. KDD 2016."
)
_NHP = (
    "Mei H, Eisner J. The neural Hawkes process: a neurally self-modulating multivariate point "
    "process. NeurIPS 2017."
)
_EASYTPP = (
    "Xue S, Shi X, Zhang JY, Mei H. HYPRO: a hybridly normalized probabilistic model for "
    "long-horizon prediction of event sequences. NeurIPS 2022. Xue S et al. EasyTPP: towards open "
    "benchmarking temporal point processes. ICLR 2024."
)


def _synthetic(name: str, what: str, sha256: str) -> DatasetInfo:
    return _info(
        name=name,
        description=f"Synthetic: {what}. 250/100/32 sequences, 5 types.",
        splits=("train", "dev", "test"),
        split_definition="The parts of the authors, cut.",
        licence="Synthetic; licence not stated",
        citation=_NHP,
        local=_copy(name, sha256),
        notes=("A cut of the original, which has 8,000 sequences.",),
    )


EVENTS = (
    _info(
        name="bookorder",
        description="Buy and sell orders of a stock: train 100 x 3319, test 100 x 829, 2 types.",
        splits=("train", "test"),
        folds=_FOLDS,
        split_definition="Five folds of the authors, each with a train and a test part.",
        licence="Not stated",
        citation=_RMTPP,
        homepage="https://github.com/dunan/NeuralPointProcess",
        local=_copy(
            "bookorder", "f9d1a4e67e004d9f5eb88d806320d61d11420ecbb8e59aa61668af5d60d51f4b"
        ),
        public=_text_source("book_order"),
    ),
    _info(
        name="stackoverflow",
        description="Badges of users over two years: 6633 sequences, 22 types.",
        splits=("train", "test"),
        folds=_FOLDS,
        split_definition="Five folds of the authors, each with a train and a test part.",
        licence="Stack Exchange, CC BY-SA",
        citation=_RMTPP,
        homepage="https://github.com/dunan/NeuralPointProcess",
        local=Source(
            files=(
                DataFile(
                    "tpp/stackoverflow.parquet",
                    sha256="ba3cb319275d4d55e40019a41601952f7bf480d2f48eb30a42a8caef95bc0478",
                ),
            ),
            load=load_stackoverflow_copy,
        ),
        public=_text_source("so"),
        notes=(
            "Times are seconds since 1970: subtract the first one of a sequence, and scale.",
            "The compact copy has 4,468 sequences: test parts are complete, train parts are not "
            "(fold 1: 3,142 of 5,307). Sequence numbers of the copy are over all sequences.",
        ),
    ),
    _info(
        name="mimic2",
        description="Hospital visits, (time, type) alone: 527/58/65 sequences a fold, 75 types.",
        splits=("train", "dev", "test"),
        folds=_FOLDS,
        split_definition="Five folds, each with train, dev and test parts.",
        licence="Derived and de-identified; the records of MIMIC-II themselves need credentials",
        citation=_RMTPP,
        homepage="https://github.com/dunan/NeuralPointProcess",
        local=_copy("mimic2", "253d3b5322d76981ab7cfacfd4bb84e2b232fd8895e71c6809744df658aa995e"),
    ),
    _info(
        name="neonate",
        description="Seizures of 79 newborns as three experts and their consensus marked them.",
        splits=("all",),
        split_definition="None; split by infant (`seq_id` 1 to 79).",
        licence="CC BY 4.0",
        citation=(
            "Stevenson NJ, Tapani K, Lauronen L, Vanhatalo S. A dataset of neonatal EEG recordings "
            "with seizure annotations. Scientific Data 6:190039, 2019."
        ),
        homepage="https://zenodo.org/record/4940267",
        local=_copy("neonate", "f0f6061b226d772081fba6cdb3ea4094a675e5a10fe89395de914c6dacba3e9a"),
        notes=(
            "Columns besides: `expert` (A, B, C, or ABC for the consensus: choose one), `duration` "
            "and `record_length` in seconds. An infant without seizures has no row.",
        ),
    ),
    _info(
        name="taxi",
        description="Taxi pick-ups and drop-offs in New York: 1400/200/400 sequences, 10 types.",
        splits=("train", "dev", "test"),
        split_definition="The parts of HYPRO and EasyTPP.",
        licence="NYC TLC open data, as processed by EasyTPP",
        citation=_EASYTPP,
        homepage="https://huggingface.co/datasets/easytpp/taxi",
        local=_copy("taxi", "b3b8de3ba36ee7823a09e9c078b83fe17bf6b4eca2398e60a86e2e48334a49ec"),
        public=_json_source("taxi"),
    ),
    _info(
        name="taobao",
        description="Clicks on kinds of goods: 1300/200/500 sequences, 17 types.",
        splits=("train", "dev", "test"),
        split_definition="The parts of HYPRO and EasyTPP.",
        licence="Tianchi, for research; as processed by EasyTPP",
        citation=_EASYTPP,
        homepage="https://huggingface.co/datasets/easytpp/taobao",
        local=_copy("taobao", "abdc852653fc673d9cca37708e9269235cfa3d6647f2551f299ab89a53a822b7"),
        public=_json_source("taobao"),
        notes=(
            "Times of the compact copy are in units of 10,000 s since 1970; it has not been "
            "compared with the public files.",
        ),
    ),
    _synthetic(
        "hawkes_nhp",
        "a Hawkes process",
        "599be99455941c0f4639437e8fab6d577162f2508b89c4f1c7c9f825b5287a9a",
    ),
    _synthetic(
        "hawkes_inhibition_nhp",
        "a Hawkes process with inhibition",
        "c38f9a4f3ce5a6a7be31c44c9535f3dcdb70c59f76ea274ccdc0246e04787cda",
    ),
    _synthetic(
        "conttime_nhp",
        "a neural Hawkes process",
        "9118b055dc0c2e00b08c9a3b4678f740e5d2662c6bb8bbbaa9bcf376dc8f5264",
    ),
)
