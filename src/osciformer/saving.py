"""Trained models as files: safetensors for the weights, JSON for all the rest, nothing executable.

A file is a safetensors file, which other programs can read too. Its metadata hold one JSON text:

- `format`: `osciformer-model`; `version`: of the writer's format; `readable_since`: the oldest
  format version whose readers understand the file. A reader passes over what it does not know, and
  refuses a file whose `readable_since` is above its own version.
- `versions`: of osciformer, torch and Python, for the record.
- `digest`: SHA-256 of the weights.
- `content`: what the caller gave, such as configuration, transforms, classes and names.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from osciformer._files import finite_json, write_bytes
from osciformer._optional import need
from osciformer._types import Tensor

FORMAT = "osciformer-model"
FORMAT_VERSION = 1
METADATA_KEY = "osciformer"
HEADER_LIMIT = 100_000_000  # the format's own bound on its header, in bytes


class ModelFileError(ValueError):
    """A file that is no model of this package, is damaged, or is too new."""


class ModelFile(NamedTuple):
    """What a file holds."""

    content: Mapping[str, Any]  #: Plain values: configuration, transforms, names.
    weights: Mapping[str, Tensor]  #: Tensors by name, on the CPU.
    versions: Mapping[str, str]  #: Versions of the packages that wrote it.


def save_model(path: str | Path, content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """Write a model file, as a whole or not at all, and return its path.

    Args:
        path: The file; an existing one is replaced once the new one is complete.
        content: Plain values that JSON can hold; a number that is not finite becomes null.
        weights: Tensors by name, such as `model.state_dict()`.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = save_model(Path(folder.name) / "a.safetensors", {"a": 1}, {"w": torch.ones(2)})
        >>> load_model(path).content, load_model(path).weights["w"]
        ({'a': 1}, tensor([1., 1.]))
        >>> folder.cleanup()
    """
    from osciformer import __version__

    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    versions = {
        "osciformer": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "readable_since": 1,
        "versions": versions,
        "digest": _digest(tensors),
        "content": finite_json(content),
    }
    text = json.dumps(header, allow_nan=False)
    data = need("safetensors.torch", extra="train").save(tensors, metadata={METADATA_KEY: text})
    write_bytes(path, data)
    return Path(path)


def load_model(path: str | Path) -> ModelFile:
    """Return what a model file holds; nothing in it is executed.

    Raises:
        ModelFileError: If it is not a model file, is damaged, or needs a newer version.
    """
    header = read_header(path)
    SafetensorError = need("safetensors", extra="train").SafetensorError
    try:
        weights = need("safetensors.torch", extra="train").load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFileError(f"{path} is damaged, perhaps cut short in copying: {error}") from error
    if _digest(weights) != header.get("digest"):
        raise ModelFileError(f"{path} is damaged: its weights are not those that were saved")
    return ModelFile(header["content"], weights, header.get("versions", {}))


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the JSON part of a model file, `content` among it, without reading the weights."""
    path = Path(path)
    if path.is_dir():
        raise ModelFileError(f"{path} is a folder; give the model file inside it")
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        raw = file.read(length) if len(start) == 8 and 2 <= length <= HEADER_LIMIT else b""
    try:
        metadata = json.loads(raw.decode("utf-8"))["__metadata__"]
    except (ValueError, KeyError, TypeError) as error:
        # The length of a proper header may begin with these bytes as well, so JSON comes first.
        if start[:2] in (b"PK", b"\x80\x02"):
            raise ModelFileError(
                f"{path} is a pickled checkpoint, which could execute code when read; model files "
                "are written by save"
            ) from error
        raise ModelFileError(
            f"{path} is not a model file, or its beginning is damaged: a safetensors file with "
            "metadata was expected"
        ) from error
    if METADATA_KEY not in metadata:
        raise ModelFileError(f"{path} is a safetensors file of another program than osciformer")
    try:
        header: dict[str, Any] = json.loads(metadata[METADATA_KEY])
        is_ours = header["format"] == FORMAT and isinstance(header["content"], dict)
        version, readable_since = int(header["version"]), int(header["readable_since"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"the description in {path} is damaged: {error!r}") from error
    if not is_ours:
        raise ModelFileError(f"{path} does not hold an {FORMAT}; got {header['format']!r}")
    if readable_since > FORMAT_VERSION:
        raise ModelFileError(
            f"{path} has format version {version}, written by osciformer "
            f"{header.get('versions', {}).get('osciformer', 'of a later version')}; this one reads "
            f"up to {FORMAT_VERSION}. Run: pip install --upgrade osciformer"
        )
    return header


class BuildLimit(TorchFunctionMode):
    """While it lasts, refuses to make many more tensors and numbers than a file has.

    Settings of a few bytes may ask for a million layers. A model is built before it is known
    whether the tensors of its file fit, and this stops one that cannot fit before it fills the
    memory. Models need some room beyond what is saved, for what they compute in between.

    Example:
        >>> with BuildLimit({"w": torch.ones(2)}):
        ...     _ = torch.nn.Linear(1_000_000, 1_000_000)
        Traceback (most recent call last):
        ValueError: its settings ask for a far larger model than the 1 tensors of 2 numbers it holds
    """

    def __init__(self, weights: Mapping[str, Tensor], num_layers: int = 0) -> None:
        super().__init__()
        self._held = len(weights), sum(x.numel() for x in weights.values())
        self._left = 16 * self._held[0] + 1000, 16 * self._held[1] + 1_000_000
        self._count(num_layers, 0)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count what a function is about to make, and call it."""
        if func in _MAKERS:
            self._count(1, _MAKERS[func](args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _count(self, tensors: int, numbers: int) -> None:
        self._left = self._left[0] - tensors, self._left[1] - numbers
        if min(self._left) < 0:
            held = f"{self._held[0]} tensors of {self._held[1]} numbers"
            raise ValueError(f"its settings ask for a far larger model than the {held} it holds")


def _product(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    sizes = args or (kwargs["size"],)
    return math.prod(sizes if isinstance(sizes[0], int) else sizes[0])


def _square(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return int(args[0] * args[-1])


def _line(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return int(args[-1] if args else max(kwargs.get("steps", 0), kwargs.get("end", 0)))


# How many numbers the functions make that are told a size.
_MAKERS = dict.fromkeys((torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn), _product)
_MAKERS |= {torch.full: lambda args, kwargs: _product(args[:1], kwargs), torch.eye: _square}
_MAKERS |= dict.fromkeys((torch.arange, torch.linspace, torch.logspace), _line)


def _digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and numbers of tensors."""
    total = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
