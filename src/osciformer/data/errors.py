"""What can go wrong between the name of a data set and its data."""

from __future__ import annotations


class DatasetError(Exception):
    """Any failure to find, download, check or read a registered data set."""


class UnknownDatasetError(DatasetError, LookupError):
    """No data set has that name, or it has no such split or fold."""


class MissingFileError(DatasetError, FileNotFoundError):
    """A file is not on this machine, and was not to be downloaded or has no address."""


class DownloadError(DatasetError, OSError):
    """No address gave the file."""


class DiskFullError(DownloadError):
    """There is no room for the file."""


class ChecksumError(DatasetError, ValueError):
    """A file is not the one that was expected."""


class UnsafeArchiveError(DatasetError, ValueError):
    """An archive would write outside its folder, holds links, or unpacks to too much."""


class UnreadableFileError(DatasetError, ValueError):
    """A file does not have the form that its data set is published in."""


class UnverifiedDownloadWarning(UserWarning):
    """The hash of a file was not known beforehand and is trusted from its first use on."""
