"""How the numbers of a time axis map to the dates, durations or numbers that they came from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from osciformer._types import Float, Int

# Nanoseconds of each unit, so that ratios are exact integers or their inverses.
NANOSECONDS = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "min": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
TimeKind = Literal["number", "datetime", "duration"]
TimeOrigin = Literal["absolute", "series"]

# Beyond this a float64 cannot tell neighbouring integers apart.
EXACT_INTEGER = 2**53


@dataclass(frozen=True)
class TimeAxis:
    """The meaning of the float64 times of an `IrregularSeries`.

    Dates and durations become numbers of a unit. With `origin="series"` a series begins at 0, and
    the container keeps where that was; with `origin="absolute"` numbers stay as they were, and
    dates count from 1970-01-01 UTC.

    Args:
        kind: What the times were: `number`, `datetime` or `duration`.
        unit: Unit of the float64 times, one of ns, us, ms, s, min, h, d; None for numbers.
        resolution: Unit of the stored dates (ns, us, ms or s), to which decoded times are rounded.
        timezone: Time zone of the dates, such as `Europe/Vienna`; None for naive ones.
        origin: `absolute` or `series`.

    Example:
        >>> axis = TimeAxis("datetime", unit="h", resolution="s", origin="series")
        >>> noon = np.array([np.datetime64("2024-05-01T12:00", "s").astype(int)])
        >>> axis.decode(np.array([1.5]), noon)
        array(['2024-05-01T13:30:00'], dtype='datetime64[s]')
    """

    kind: TimeKind = "number"
    unit: str | None = None
    resolution: str | None = None
    timezone: str | None = None
    origin: TimeOrigin = "absolute"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", ("number", "datetime", "duration")),
            ("origin", ("absolute", "series")),
            ("unit", (None,) if self.kind == "number" else tuple(NANOSECONDS)),
            ("resolution", (None,) if self.kind == "number" else ("ns", "us", "ms", "s")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} of a time axis of kind {self.kind!r} must be one of "
                    f"{', '.join(map(repr, allowed))}; got {getattr(self, name)!r}"
                )

    @property
    def ticks_per_unit(self) -> float:
        """How many ticks of `resolution` one `unit` has; 1 for numbers."""
        if self.unit is None or self.resolution is None:
            return 1.0
        return NANOSECONDS[self.unit] / NANOSECONDS[self.resolution]

    def ticks_of(self, moments: np.ndarray) -> np.ndarray:
        """Return numbers as they are, and dates or durations as ticks of `resolution`.

        Args:
            moments: Numbers, `datetime64` or `timedelta64`, as `kind` says, of any shape.
        """
        wanted = {"number": "iuf", "datetime": "M", "duration": "m"}[self.kind]
        if moments.dtype.kind not in wanted:
            raise TypeError(
                f"these series have times of kind {self.kind!r}; got {moments.dtype}"
                + (
                    ". Pass numpy.datetime64 in UTC, such as index.tz_convert(None).to_numpy()"
                    if self.kind == "datetime"
                    else ""
                )
            )
        if self.kind == "number":
            return moments
        name = "datetime64" if self.kind == "datetime" else "timedelta64"
        return moments.astype(f"{name}[{self.resolution}]").astype(np.int64)

    def encode(
        self, ticks: np.ndarray, origins: Int[np.ndarray, "T"] | Float[np.ndarray, "T"] | None
    ) -> Float[np.ndarray, "T"]:
        """Return float64 times from numbers, or from dates and durations in ticks.

        Args:
            ticks: Integers (ticks of `resolution`) or, for numbers, integers or floats [T].
            origins: The origin of each time [T], in ticks; None for `origin="absolute"`.

        Returns:
            Times in `unit` since the origin.
        """
        # Integers are subtracted as integers: that is exact even for nanoseconds since 1970.
        since = ticks if origins is None else ticks - origins
        if self.kind == "number" and np.issubdtype(since.dtype, np.integer):
            far = np.abs(since) > EXACT_INTEGER
            if far.any():
                raise ValueError(
                    f"the integer time {since[far][0]} is beyond 2**53, where float64 cannot tell "
                    "neighbours apart; pass origin='series' so that each series begins at 0"
                )
        return since.astype(np.float64) / self.ticks_per_unit

    def decode(
        self,
        times: Float[np.ndarray, "T"],
        origins: Int[np.ndarray, "T"] | Float[np.ndarray, "T"] | None,
    ) -> np.ndarray:
        """Return the numbers, `datetime64` (UTC if there is a time zone) or `timedelta64` of times.

        Args:
            times: Times as in the container [T].
            origins: The origin of each time [T]; None for `origin="absolute"`.
        """
        if self.kind == "number":
            return np.asarray(times if origins is None else times + origins, dtype=np.float64)
        ticks = np.rint(np.asarray(times) * self.ticks_per_unit).astype(np.int64)
        if origins is not None:
            ticks = ticks + origins
        name = "datetime64" if self.kind == "datetime" else "timedelta64"
        return ticks.astype(f"{name}[{self.resolution}]")

    def to_dict(self) -> dict[str, str | None]:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> TimeAxis:
        """Return the axis that `to_dict` wrote."""
        return cls(**state)
