"""Irregular series: containers, readers, transforms and batches."""

from osciformer.data.batches import (
    Batch,
    LengthBatches,
    SeriesDataset,
    collate,
    make_loader,
    padding_fraction,
    uncollate,
)
from osciformer.data.errors import UnreadableFileError
from osciformer.data.files import load_npz, read_csv, read_parquet, read_table, read_ts, save_npz
from osciformer.data.parquet_series import ParquetSeries, StreamedBatches, make_stream_loader
from osciformer.data.registry import (
    dataset_info,
    dataset_path,
    describe_dataset,
    fetch_dataset,
    get_dataset,
    list_datasets,
    register_dataset,
)
from osciformer.data.series import IrregularSeries, SingleSeries, TimeAxis, concatenate, to_frame
from osciformer.data.tables import Layout, from_frame, join_frame
from osciformer.data.transforms import ColumnScaler, SeriesStatistics, SeriesTransform

__all__ = [
    "Batch",
    "ColumnScaler",
    "IrregularSeries",
    "Layout",
    "LengthBatches",
    "ParquetSeries",
    "SeriesDataset",
    "SeriesStatistics",
    "SeriesTransform",
    "SingleSeries",
    "StreamedBatches",
    "TimeAxis",
    "UnreadableFileError",
    "collate",
    "concatenate",
    "dataset_info",
    "dataset_path",
    "describe_dataset",
    "fetch_dataset",
    "from_frame",
    "get_dataset",
    "join_frame",
    "list_datasets",
    "load_npz",
    "make_loader",
    "make_stream_loader",
    "padding_fraction",
    "read_csv",
    "read_parquet",
    "read_table",
    "read_ts",
    "register_dataset",
    "save_npz",
    "to_frame",
    "uncollate",
]
