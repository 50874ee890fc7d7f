"""Which column of a table means what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from osciformer.data.checks import check_choice
from osciformer.data.series import Empty
from osciformer.data.ties import Duplicates
from osciformer.data.time_axis import NANOSECONDS


@dataclass(frozen=True)
class Layout:
    """The columns of a table of observations, and how to read them.

    Two layouts are understood. Wide: a row has an id, a time and one column per feature. Narrow:
    a row has an id, a time, the name of a variable and its value; give `variable` and `value`.
    Rows may come in any order; series keep the order in which their ids first appear.

    Args:
        id: Column that says which series a row belongs to.
        time: Column of times: numbers, dates (with or without time zone) or durations.
        values: Feature columns; in the narrow layout, variables. All others if not given; variables
            are then in alphabetical order.
        variable: Column with the name of the variable, in the narrow layout.
        value: Column with its value, in the narrow layout.
        static: Columns (or variables) that have one value per series.
        label: Column of classes or targets, constant within a series; a list of columns gives
            several real targets.
        unit: Unit of the times when they are dates or durations: ns, us, ms, s, min, h or d.
        origin: `series`, each series begins at time 0; `absolute`, numbers stay as they are and
            dates count from 1970-01-01 UTC; `auto` takes `series` for dates and `absolute` for the
            rest.
        time_format: How to read times that are text: `iso`, or a format as of `strptime`. Text is
            an error if not given.
        duplicates: What to do about several values at one time of a series: `error`, `mean`,
            `last` or `keep`. By default an error in the wide layout and the mean in the narrow one,
            where measurements in duplicate are common.
        empty: What to do about series without any value: `error`, `drop` or `keep`.
        allow_absent: Take `values` and `static` that the table does not have as missing throughout,
            as when a model is applied to a table that lacks one of its features.

    Example:
        >>> Layout(id="patient", time="hour", label="died").columns
        ('patient', 'hour', 'died')
    """

    id: str
    time: str
    values: Sequence[str] | None = None
    variable: str | None = None
    value: str | None = None
    static: Sequence[str] = ()
    label: str | Sequence[str] | None = None
    unit: str = "s"
    origin: Literal["auto", "series", "absolute"] = "auto"
    time_format: str | None = None
    duplicates: Duplicates | None = None
    empty: Empty = "error"
    allow_absent: bool = False

    def __post_init__(self) -> None:
        for name in ("values", "static"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise TypeError(f"{name} must be a list of names; got {given!r}. Use [{given!r}]")
            object.__setattr__(self, name, None if given is None else tuple(map(str, given)))
        if self.label is not None and not isinstance(self.label, str):
            object.__setattr__(self, "label", tuple(map(str, self.label)))
        if (self.variable is None) != (self.value is None):
            raise ValueError(
                "variable and value belong together: one names the column of names, the other the "
                f"column of values; got variable={self.variable!r}, value={self.value!r}"
            )
        if self.values is not None and len(self.values) == 0:
            raise ValueError("values must name at least one feature; got none")
        check_choice("unit", self.unit, tuple(NANOSECONDS))
        check_choice("origin", self.origin, ("auto", "series", "absolute"))
        check_choice("duplicates", self.duplicates, (None, *get_args(Duplicates)))
        check_choice("empty", self.empty, get_args(Empty))
        self._check_roles()

    def _check_roles(self) -> None:
        """Refuse a name with two roles; narrow variables may be named like columns."""
        roles = [("id", self.id), ("time", self.time)]
        roles += [("variable", str(self.variable)), ("value", str(self.value))] * self.is_narrow
        roles += [("label", name) for name in self.labels]
        features = [("static", name) for name in self.static]
        features += [("values", name) for name in self.values or ()]
        for group in (roles, features) if self.is_narrow else (roles + features,):
            seen: dict[str, str] = {}
            for role, name in group:
                if name in seen:
                    raise ValueError(
                        f"column {name!r} is both {seen[name]} and {role}; it can be one of them"
                    )
                seen[name] = role

    @property
    def is_narrow(self) -> bool:
        """Whether a row holds the name of a variable and its value."""
        return self.variable is not None

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns, as a tuple."""
        if self.label is None:
            return ()
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that have a role by name, without features and static ones."""
        narrow = (self.variable, self.value)
        return (self.id, self.time, *(name for name in narrow if name is not None), *self.labels)

    def replace(self, **changes: Any) -> Layout:
        """Return a layout with some settings changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            name: list(item) if isinstance(item, tuple) else item
            for name, item in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Layout:
        """Return the layout that `to_dict` wrote."""
        return cls(**state)


def make_layout(layout: Layout | None, columns: dict[str, Any]) -> Layout:
    """Return the layout, or the one that the keyword arguments of `Layout` describe."""
    if layout is None:
        return Layout(**columns)
    return layout.replace(**columns) if columns else layout
