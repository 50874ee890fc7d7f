"""Irregular series: containers, readers, transforms and batches."""

from osciformer.data.batches import Batch, collate, uncollate
from osciformer.data.combine import concatenate
from osciformer.data.errors import UnreadableFileError
from osciformer.data.files import load_npz, read_csv, read_parquet, read_table, read_ts, save_npz
from osciformer.data.frames import from_frame, join_frame, to_frame
from osciformer.data.layout import Layout
from osciformer.data.loading import SeriesDataset, make_loader
from osciformer.data.parquet_series import ParquetSeries
from osciformer.data.registry import (
    dataset_info,
    dataset_path,
    describe_dataset,
    fetch_dataset,
    get_dataset,
    list_datasets,
    register_dataset,
)
from osciformer.data.sampler import LengthBatches, padding_fraction
from osciformer.data.series import IrregularSeries
from osciformer.data.single import SingleSeries
from osciformer.data.statistics import SeriesStatistics
from osciformer.data.streamed_batches import StreamedBatches, make_stream_loader
from osciformer.data.time_axis import TimeAxis
from osciformer.data.transforms import ColumnScaler, SeriesTransform

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
