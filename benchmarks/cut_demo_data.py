"""Cuts the clinical data of `osciformer demo` from set-a of PhysioNet 2012.

Run `OSCIFORMER_DATA=... python benchmarks/cut_demo_data.py src/osciformer/demo_data`. Of the stays
with at least one measurement, in the order of their numbers, 2,000 are taken at equal distances;
of these every fourth goes to the test table. The same input gives the same tables.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from osciformer._optional import need
from osciformer.data import IrregularSeries, get_dataset, to_frame

NUM_STAYS = 2000
STATIC = ("Age", "Gender", "Height", "ICUType", "AdmissionWeight")


def main(folder: Path) -> None:
    stays = get_dataset("physionet2012", "set-a")
    stays = stays[stays.lengths > 0]
    stays = stays[np.arange(NUM_STAYS) * len(stays) // NUM_STAYS]
    stays = stays.replace(static=stays.static, static_names=STATIC)
    is_test = np.arange(NUM_STAYS) % 4 == 3
    folder.mkdir(parents=True, exist_ok=True)
    write(stays[~is_test], folder / "stays-train.parquet")
    write(stays[is_test], folder / "stays-test.parquet")


def write(stays: IrregularSeries, path: Path) -> None:
    pa, parquet = need("pyarrow", extra="data"), need("pyarrow.parquet", extra="data")
    table = to_frame(stays, "pyarrow", id="record_id", time="minute", label="in_hospital_death")
    small = {"record_id": pa.int32(), "minute": pa.int16(), "in_hospital_death": pa.int8()}
    for name, kind in small.items():
        position = table.column_names.index(name)
        table = table.set_column(position, name, table[name].cast(kind))
    parquet.write_table(table, path, compression="zstd", compression_level=19)
    deaths = int((stays.labels == 1).sum())
    print(f"{path}: {len(stays)} stays, {deaths} deaths, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
