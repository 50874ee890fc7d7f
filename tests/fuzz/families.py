"""Families of odd and broken inputs; each draws one from a seed and knows what may come of it.

An input is read rightly, by an oracle that shares no code with the library, or refused in a
sentence. Anything else fails: another answer, a traceback, a file that is left half-written.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

RIGHT, REFUSED = "right", "refused"
MISSING = {"", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "?"}
COLUMNS = {"id": "who", "time": "hour", "values": ["a", "b"]}
# What errors of the library itself look like; all else is an error of another one that got out.
CLEAR = (ValueError, TypeError, OSError)
UNCLEAR = re.compile(
    r"Traceback|run again with --debug|object is not|unhashable|codec can't|has no attribute|"
    r"has no kernel|unexpected keyword|list index|NoneType|Errno|\bKeyError\b|0x[0-9a-f]{8}"
)
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
Rng = np.random.Generator


def is_unclear(message: str) -> bool:
    """Return whether a message is another library's, unless it says which file is damaged."""
    return bool(UNCLEAR.search(message)) and not re.search("cannot be read as|is damaged", message)


class World(NamedTuple):
    """What the inputs of a family are made for: a folder to write to, and trained models."""

    folder: Path
    models: Mapping[str, Path]


def pick(rng: Rng, items: Iterable[Any]) -> Any:
    listed = list(items)
    return listed[int(rng.integers(len(listed)))]


def base(rng: Rng, count: int = 8) -> dict[str, list[Any]]:
    """Return a small good table, by column; each series has rows at times that increase."""
    columns: dict[str, list[Any]] = {name: [] for name in ("who", "hour", "a", "b", "ill")}
    for number in range(count):
        length = int(rng.integers(2, 5))
        columns["who"] += [f"s{number}"] * length
        columns["hour"] += np.cumsum(rng.integers(1, 9, length) / 4).tolist()
        columns["a"] += rng.normal(size=length).astype(np.float32).tolist()
        columns["b"] += rng.normal(size=length).astype(np.float32).tolist()
        columns["ill"] += [number % 2] * length
    return columns


def write_csv(path: Path, columns: Mapping[str, list[Any]], encoding: str = "utf-8") -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write_parquet(path: Path, columns: Any, **options: Any) -> Path:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def read(read: Callable[[], Any], check: Callable[[Any], None], is_bad: bool | None) -> str:
    """Return what came of a call of a reader, and check it; `is_bad` of None allows both."""
    try:
        found = read()
    except CLEAR as error:
        if not str(error) or is_unclear(str(error)) or isinstance(error, UnicodeError):
            raise AssertionError(f"unclear: {error!r}") from error
        if is_bad is False:
            raise AssertionError(f"refused: {error!r}") from error
        return REFUSED
    assert not is_bad, f"accepted: {found!r}"
    check(found)
    return RIGHT


def command(
    world: World,
    *arguments: Any,
    check: Callable[[Path], None] = lambda output: None,
    is_bad: bool | None,
    output: str = "out.csv",
) -> str:
    """Return what came of a call of the program that writes `output`, and check it."""
    from osciformer.cli import main

    target, before = world.folder / output, sorted(world.folder.rglob("*"))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(item) for item in (*arguments, "-o", target)])
    text = err.getvalue()
    assert not CONTROLS.search(text), f"control characters: {text!r}"
    left = sorted(set(world.folder.rglob("*")) - set(before))
    if code != 0:
        assert code in (1, 2), (code, text)
        assert not is_unclear(text), text
        assert "error: " in text or "Usage" in text, text
        assert not left, f"left behind: {left}; {text}"
        assert is_bad is not False, f"refused; {text}"
        return REFUSED
    assert not is_bad, f"accepted; {text}"
    assert target.exists(), text
    assert not [path for path in left if path.name.startswith(".")], left
    check(target)
    return RIGHT


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def finite(rows: list[dict[str, str]], keys: tuple[str, ...] = ("who",)) -> None:
    for row in rows:
        for name, cell in row.items():
            if name not in keys and name.startswith(("probability", "q0")):
                assert math.isfinite(float(cell)), (name, cell)


def predict(world: World, table: Path, ids: list[str], is_bad: bool) -> str:
    """Predict classes for a table; the rows are about these ids, in this order."""

    def check(path: Path) -> None:
        rows = rows_of(path)
        finite(rows)
        assert [row["who"] for row in rows] == ids

    call = ["predict", world.models["classes"], table]
    return command(world, *call, check=check, is_bad=is_bad)


_ODD_TEXTS = ["=1+1", "@x", "-", "ä", "日本", "a,b", 'q"q', "a\nb", "\x1b[2J", "\u202ex", "e\u0301"]
_ODD_TEXTS += ["é", "None", "none", "N/A", "TRUE", "inf", "#", "'", "0" * 30, "9" * 25, "x" * 999]


def _odd_name(rng: Rng) -> str:
    number = int(rng.integers(0, 12))
    forms = ("{}", "0{}", "00{}", "{}.0", "{}e0", " {}", "{} ", "+{}", "-{}", "{:b}", "{}\t")
    alike = [form.format(number) for form in forms]
    return str(pick(rng, [*alike, *_ODD_TEXTS, str(10**19 + number)]))


def ids(rng: Rng, world: World) -> str:
    """Ids that look like numbers, like each other, like nothing, or like formulas."""
    names = list(dict.fromkeys(_odd_name(rng) for _ in range(8)))
    if rng.random() < 0.3:
        names[int(rng.integers(len(names)))] = str(pick(rng, [*sorted(MISSING), " ", "y" * 2000]))
    bad = any(name.strip() in MISSING or len(name) > 1000 for name in names)
    columns = base(rng, len(names))
    columns["who"] = [names[int(who[1:])] for who in columns["who"]]
    order = rng.permutation(len(columns["who"])) if rng.random() < 0.5 else slice(None)
    columns = {name: np.array(cells, object)[order].tolist() for name, cells in columns.items()}
    wanted = list(dict.fromkeys(columns["who"]))
    if rng.random() < 0.5:
        table = write_csv(world.folder / "t.csv", columns)
    else:
        table = write_parquet(world.folder / "t.parquet", columns)
    return predict(world, table, wanted, is_bad=bad)


def labels(rng: Rng, world: World) -> str:
    """Classes that are odd, missing or of another kind, in the table or in another one."""
    from osciformer.data import from_frame, join_frame, read_table

    names = list(dict.fromkeys(_odd_name(rng) for _ in range(int(rng.integers(1, 5)))))
    columns = base(rng)
    given = {f"s{k}": str(pick(rng, names)) for k in range(8)}
    if rng.random() < 0.3:
        given["s3"] = str(pick(rng, [*sorted(MISSING), "  "]))
    bad = any(label.strip() in MISSING for label in given.values())
    columns["ill"] = [given[who] for who in columns["who"]]
    whole = write_csv(world.folder / "t.csv", columns)
    if rng.random() < 0.5:
        whole = write_parquet(world.folder / "t.parquet", columns)

    def check(series: Any) -> None:
        assert dict(zip(series.ids.tolist(), series.labels.tolist(), strict=True)) == given

    if rng.random() < 0.3:
        series = from_frame({name: columns[name] for name in ("who", "hour", "a", "b")}, **COLUMNS)
        apart = {"who": list(given), "ill": list(given.values())}
        join = lambda: join_frame(series, apart, id="who", label="ill")  # noqa: E731
        return read(join, check, is_bad=bad)
    return read(lambda: read_table(whole, label="ill", **COLUMNS), check, is_bad=bad)


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CELLS = ["", "NA", "?", "nan", "null", "low", "1,5", "1_0", "0x1F", "inf", "-inf", "1e400", "3e38"]
_CELLS += [
    "4e38",
    " 1",
    "1 ",
    "+1",
    "1.",
    ".5",
    "1e-50",
    "--1",
    "1e",
    "true",
    "١",
    "1 000",
    "1.5.2",
]
_CELLS += ["2024-01-01", "N/A", "-", "'1'", "$1", "1%", "(1)", "1d", "1f", "Infinity", "NaN "]


def cells(rng: Rng, world: World) -> str:
    """Feature cells of CSV that are no numbers, or nearly."""
    from osciformer.data import read_csv

    columns, wanted = base(rng), []
    for row in range(len(columns["a"])):
        if rng.random() < 0.04:
            columns["a"][row] = pick(rng, _CELLS)
        text = str(columns["a"][row])
        known = _NUMBER.fullmatch(text.strip())
        wanted.append(float(text) if known else math.nan if text.strip() in MISSING else math.inf)
    narrow = np.array(wanted, dtype=np.float64)
    with np.errstate(over="ignore"):
        narrow = narrow.astype(np.float32)
    table = write_csv(world.folder / "t.csv", columns)

    def check(series: Any) -> None:
        np.testing.assert_array_equal(series.values[:, 0], narrow)

    settings: dict[str, Any] = {**COLUMNS, "empty": "keep"}
    # Of odd spellings of numbers, such as " 1", some are refused.
    is_bad = True if np.isinf(narrow).any() else None
    return read(lambda: read_csv(table, **settings), check, is_bad)


def times(rng: Rng, world: World) -> str:
    """Times of all types and sizes, good and impossible."""
    from osciformer.data import read_table

    count = 6
    steps = np.sort(rng.permutation(1000)[:count])
    kinds: dict[str, Any] = {
        "int": pa.array(steps),
        "uint64": pa.array(steps.astype(np.uint64) + np.uint64(2**63)),
        "lowest": pa.array([-(2**63), *steps[1:].tolist()]),
        "beyond": pa.array([2**53 + 1 + int(k) for k in steps]),
        "float": pa.array(steps / 8),
        "nan": pa.array([*(steps[1:] / 8).tolist(), math.nan]),
        "inf": pa.array([*(steps[1:] / 8).tolist(), math.inf]),
        "null": pa.array([None, *steps[1:].tolist()]),
        "bool": pa.array([True] * count),
        "text": pa.array([f"{k} h" for k in steps]),
        "dates": pa.array(steps, pa.timestamp("s")),
        "zoned": pa.array(steps, pa.timestamp("us", "Europe/Vienna")),
        "days": pa.array(steps.astype(np.int32), pa.date32()),
        "duration": pa.array(steps, pa.duration("ms")),
        "wrapping": pa.array([-(2**63), *([2**62] * (count - 1))], pa.timestamp("ns")),
        "clock": pa.array(steps.astype(np.int32), pa.time32("s")),
        "list": pa.array([[int(k)] for k in steps]),
        "decimal": pa.array(steps).cast(pa.decimal128(30, 3)),
        "dictionary": pa.array([f"{k}" for k in steps]).dictionary_encode(),
        "equal": pa.array([int(steps[0])] * count),
        "nothing": pa.array([None] * count),
    }
    name = str(pick(rng, kinds))
    seconds = {"days": 86400.0, "duration": 1e-3, "zoned": 1e-6, "float": 0.125}
    is_good = name in ("int", "float", "dates", "zoned", "days", "duration", "decimal")
    is_late = rng.random() < 0.3 and name in ("beyond", "int", "dates")
    column, order = kinds[name], rng.permutation(count)
    table = pa.table({"who": ["x"] * count, "hour": column, "a": np.arange(count) / 4})
    table = table.take(pa.array(order))
    if rng.random() < 0.4 and name in ("int", "float", "nan", "inf", "null", "text", "bool"):
        cells = {key: table.column(key).to_pylist() for key in table.column_names}
        path = write_csv(world.folder / "t.csv", cells)
    else:
        path = write_parquet(world.folder / "t.parquet", table)
    settings = {"id": "who", "time": "hour", "values": ["a"]}
    settings |= {"origin": "series"} if is_late else {}

    def check(series: Any) -> None:
        wanted = steps * seconds.get(name, 1.0)
        if is_late or name in ("dates", "zoned", "days"):
            wanted = wanted - wanted[0]
        np.testing.assert_allclose(series.times, wanted, rtol=1e-12, atol=1e-9)
        np.testing.assert_array_equal(series.values[:, 0], np.arange(count) / 4)

    is_bad = not is_good and not (is_late and name == "beyond")
    return read(lambda: read_table(path, **settings), check, is_bad)


def damage(rng: Rng, world: World) -> str:
    """Files with checksums that were cut, patched, or lost a bit: never another content."""
    from osciformer.data import from_frame, read_table, save_npz

    columns = base(rng)
    series = from_frame(columns, label="ill", **COLUMNS)
    kind = str(pick(rng, ["plain", "zstd", "npz", "ts.gz", "csv.gz"]))
    path = world.folder / f"t.{'parquet' if kind in ('plain', 'zstd') else kind}"
    settings: dict[str, Any] = {**COLUMNS, "label": "ill"}
    if kind in ("plain", "zstd"):
        compression = "none" if kind == "plain" else kind
        write_parquet(path, columns, compression=compression, write_page_checksum=True)
    elif kind == "npz":
        save_npz(series, path)
        settings = {}
    elif kind == "csv.gz":
        plain = write_csv(world.folder / "t.csv", columns)
        path.write_bytes(gzip.compress(plain.read_bytes()))
        series = series.replace(labels=np.asarray(series.labels).astype(str))
    else:
        text = "@timestamps true\n@classLabel true p q\n@data\n(0,1),(1,2):p\n(0,3),(2,4):q\n" * 1
        path.write_bytes(gzip.compress(text.encode()))
        settings, series = {}, read_table(path)
    content = bytearray(path.read_bytes())
    # The last bytes of a gzip file are its length, and the first a header with a date.
    where = int(rng.integers(4, len(content)))
    how = str(pick(rng, ["bit", "cut", "patch", "swap"]))
    if how == "bit":
        content[where] ^= 1 << int(rng.integers(8))
    elif how == "cut":
        del content[where:]
    elif how == "patch":
        content[where : where + 8] = rng.bytes(min(8, len(content) - where))
    else:
        content[where:], content[4:where] = content[4 : len(content) - where + 4], content[where:]
    path.write_bytes(content)

    def check(found: Any) -> None:
        if path.suffix == ".parquet" and not found.equals(series):
            # The footer of Parquet has no checksum: a name in it may change, the numbers do not.
            np.testing.assert_array_equal(found.values, series.values)
            np.testing.assert_array_equal(found.times, series.times)
            return
        assert found.equals(series), "another content"

    return read(lambda: read_table(path, **settings), check, None)


def types(rng: Rng, world: World) -> str:
    """Columns of Parquet of all types, in all roles."""
    from osciformer.data import ParquetSeries, read_table

    columns = base(rng)
    count = len(columns["who"])
    whole = np.arange(count)
    numbers = (pa.int8(), pa.uint16(), pa.int64(), pa.uint64(), pa.float16(), pa.float64())
    kinds: dict[str, Any] = {str(kind): pa.array(whole % 100).cast(kind) for kind in numbers}
    others = {
        "bool": [bool(k % 2) for k in whole],
        "text": [f"t{k}" for k in whole],
        "bytes": [b"\xff\x00" for _ in whole],
        "list": [[int(k)] for k in whole],
        "struct": [{"x": int(k)} for k in whole],
        "null": [None] * count,
    }
    kinds |= {name: pa.array(cells) for name, cells in others.items()}
    kinds["large text"] = kinds["text"].cast(pa.large_string())
    kinds["category"] = kinds["text"].dictionary_encode()
    kinds["decimal"] = pa.array(whole).cast(pa.decimal128(30, 2))
    kinds["broken text"] = pa.array([b"\xff\xfe"] * count).view(pa.string())
    kinds["map"] = pa.array([[("k", 1)]] * count, pa.map_(pa.string(), pa.int64()))
    role, name = str(pick(rng, ["who", "hour", "a", "ill"])), str(pick(rng, kinds))
    table = pa.table(columns)
    table = table.set_column(table.column_names.index(role), role, kinds[name])
    path = write_parquet(world.folder / "t.parquet", table)
    # Ids and classes may be anything with a name or a number; features and times are numbers.
    is_number = name in {*map(str, numbers), "decimal"}
    named = is_number or name in ("text", "large text", "category")
    # Classes must not differ within a series, as these cells do.
    good = {"who": named, "ill": False, "hour": is_number}
    good["a"] = is_number or name in ("bool", "null")
    is_stream = bool(rng.random() < 0.3)
    settings: dict[str, Any] = {**COLUMNS, "label": "ill", "empty": "keep"}

    def check(series: Any) -> None:
        if role == "who":
            assert len(series) == count
            assert series.ids.astype(str).tolist() == [str(c) for c in kinds[name].to_pylist()]
        if role == "a":
            cells = [math.nan if cell is None else cell for cell in kinds[name].to_pylist()]
            wanted = np.array(cells, np.float32)
            np.testing.assert_array_equal(series.values[:, 0], wanted)

    reader = (lambda: ParquetSeries(path, **settings).read()) if is_stream else None
    return read(reader or (lambda: read_table(path, **settings)), check, not good[role])


def headers(rng: Rng, world: World) -> str:
    """Columns that are missing, twice, renamed, in another order or of another encoding."""
    columns = base(rng)
    wanted = list(dict.fromkeys(columns["who"]))
    table = world.folder / "t.csv"
    how = str(pick(rng, ["absent", "twice", "renamed", "order", "bom", "latin", "ragged", "empty"]))
    victim = str(pick(rng, ["who", "hour", "a", "b"]))
    names, cells = list(columns), list(columns.values())
    encoding, bad = "utf-8", how in ("absent", "twice", "renamed", "ragged", "empty")
    if how == "absent":
        del columns[victim]
        write_csv(table, columns)
    elif how == "renamed":
        new = str(pick(rng, [victim.upper(), f" {victim}", f"{victim}\0", "", "\x1b[1m"]))
        write_csv(table, {new if name == victim else name: columns[name] for name in names})
    elif how == "twice":
        lines = [[*names, victim], *zip(*cells, columns[victim], strict=True)]
        table.write_text("\n".join(",".join(map(str, line)) for line in lines))
    elif how == "order":
        write_csv(table, {names[k]: cells[k] for k in rng.permutation(len(names))})
    elif how == "empty":
        table.write_bytes(
            pick(rng, [b"", b"\n\n", b"who,hour,a,b\n", b"\x00\x01", b"\xff\xfe\x00"])
        )
    elif how == "ragged":
        text = write_csv(table, columns).read_text().splitlines()
        text[int(rng.integers(1, len(text)))] += str(pick(rng, [",1", ",", ',"']))
        table.write_text("\n".join(text))
    else:
        encoding = {"bom": "utf-8-sig", "latin": "latin-1"}[how]
        columns["who"] = [f"{who}ä" for who in columns["who"]]
        wanted = [f"{who}ä" for who in wanted]
        bad = how == "latin"
        write_csv(table, columns, encoding)
    return predict(world, table, wanted, is_bad=bad)


def collisions(rng: Rng, world: World) -> str:
    """Id and time columns that are called like columns of the output."""
    names = ["prediction", "variable", "q0.5", "q0.05", "time", "id", "prediction_", "variable_"]
    id, time = rng.permutation(names)[:2].tolist()
    columns = base(rng)
    wanted = list(dict.fromkeys(columns["who"]))
    renamed = {id: columns["who"], time: columns["hour"], "a": columns["a"], "b": columns["b"]}
    from osciformer.cli import predict as module

    load = module.Model.load

    def load_renamed(*args: Any, **settings: Any) -> Any:
        model = load(*args, **settings)
        return model._replace(layout={**model.layout, "id": id, "time": time})

    def check(path: Path) -> None:
        rows = rows_of(path)
        finite(rows, (id, time))
        assert list(dict.fromkeys(row[id] for row in rows)) == wanted
        assert len(rows[0]) == 9

    module.Model.load = load_renamed  # type: ignore[assignment,method-assign]
    try:
        table = write_csv(world.folder / "t.csv", renamed)
        call = ["predict", world.models["forecasts"], table, "--quantiles", "--horizon=2"]
        return command(world, *call, "--every=1", check=check, is_bad=False)
    finally:
        module.Model.load = load  # type: ignore[method-assign]


def outcomes(rng: Rng, world: World) -> str:
    """Tables of outcomes, a row per series, that lack, repeat or contradict."""
    columns = base(rng)
    table = {"who": [f"s{k}" for k in range(8)], "ill": [str(k % 2) for k in range(8)]}
    how = str(pick(rng, ["good", "numbers", "lacking", "contrary", "twice", "blank", "extra"]))
    bad = how in ("lacking", "contrary", "blank")
    if how == "lacking":
        table = {name: cells[:-1] for name, cells in table.items()}
    elif how == "blank":
        table["ill"][int(rng.integers(8))] = str(pick(rng, sorted(MISSING)))
    elif how in ("contrary", "twice"):
        table = {name: [*cells, cells[2]] for name, cells in table.items()}
        table["ill"][-1] = "1" if how == "contrary" else table["ill"][2]
    elif how == "extra":
        table = {"who": [*table["who"], "zz"], "ill": [*table["ill"], ""]}
    elif how == "numbers":
        columns["who"] = [who[1:] for who in columns["who"]]
        table["who"] = [who[1:] for who in table["who"]]
    kept = {name: columns[name] for name in ("who", "hour", "a", "b")}
    other: Any = table
    if how == "numbers":  # one of the two as numbers, as Parquet has them
        other = {"who": [int(who) for who in table["who"]], "ill": table["ill"]}
    path = write_csv(world.folder / "t.csv", kept)
    apart = write_parquet(world.folder / "o.parquet", other)
    if how != "numbers" and rng.random() < 0.5:
        apart = write_csv(world.folder / "o.csv", table)
    call = ["evaluate", world.models["classes"], path, "--labels", apart, "--target=ill"]
    return command(world, *call, "--bootstrap=0", is_bad=bad, output="out.json")


def events(rng: Rng, world: World) -> str:
    """Types of events that are blank, unknown, or look like numbers."""
    from osciformer.cli.tables import read_events

    names = [_odd_name(rng) for _ in range(3)] if rng.random() < 0.7 else ["0", "2", "1"]
    if rng.random() < 0.2:
        names.append(str(pick(rng, [*sorted(MISSING), " "])))
    given = [str(pick(rng, names)) for _ in range(10)]
    columns = {"who": ["07"] * 5 + ["7"] * 5, "t": [*range(5), *range(5)], "what": given}
    path = write_csv(world.folder / "t.csv", columns)
    if rng.random() < 0.4:
        path = write_parquet(world.folder / "t.parquet", columns)
    known = sorted(set(given)) if rng.random() < 0.5 else None

    def check(found: Any) -> None:
        assert found.ids.tolist() == ["07", "7"]
        codes = found.type_names or [str(number) for number in range(found.num_types)]
        assert [codes[number] for number in found.types] == given

    layout = {"id": "who", "time": "t", "type": "what"}
    bad = any(name.strip() in MISSING for name in given)
    return read(lambda: read_events(path, layout, known), check, is_bad=bad)


def archives(rng: Rng, world: World) -> str:
    """Archives in npz format whose members are absent, foreign or of another kind or shape."""
    from osciformer.data import from_frame, load_npz, save_npz

    series = from_frame(base(rng), label="ill", **COLUMNS)
    path = world.folder / "t.npz"
    save_npz(series, path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    victim = str(pick(rng, arrays))
    odd: list[Any] = [np.zeros(0), np.zeros((2, 2, 2)), np.array("x"), np.array(5), np.arange(3)]
    odd += [np.array([math.nan]), np.array([math.inf] * 9), np.array(["a"] * 4), np.array(b"\xff")]
    odd += [-arrays["offsets"], arrays["offsets"] * 2, arrays["times"][::-1], np.array(1j)]
    odd += [np.array("[]"), np.array("null"), np.array('{"format": "osciformer series 1"}')]
    how = str(pick(rng, ["absent", "odd", "foreign", "edited"]))
    if how == "absent":
        del arrays[victim]
    elif how == "odd":
        arrays[victim] = pick(rng, odd)
    elif how == "foreign":
        arrays[str(pick(rng, ["extra", "../up", "__class__", "times.npy"]))] = np.zeros(2)
    else:
        description = json.loads(str(arrays["description"]))
        key = str(pick(rng, description))
        description[key] = pick(rng, [None, 5, "x", [], {}, ["a", "a"], [1, 2], {"kind": "x"}])
        arrays["description"] = np.array(json.dumps(description))
    np.savez(path, **arrays)
    if rng.random() < 0.2:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("notes.txt", "hello")

    def check(found: Any) -> None:
        np.testing.assert_array_equal(found.values, series.values)
        np.testing.assert_array_equal(found.times, series.times)
        assert len(found.feature_names) == 2

    return read(lambda: load_npz(path), check, None)


def ts_files(rng: Rng, world: World) -> str:
    """Files in .ts format with odd numbers, dates among numbers, and lines of another length."""
    from osciformer.data import read_ts

    stamped, cells = bool(rng.random() < 0.5), ["1", "2.5", "-3e2", "?", "NaN", "4"]
    odd = ["1_0", "x", "", "١", "1e400", "2020-01-01", "0x1", "1 2", "5)", "(5", "inf", "ä"]
    lines, wanted, is_bad = [], [], False
    for number in range(3):
        row = [str(pick(rng, cells[:3]))] + [str(pick(rng, cells)) for _ in range(3)]
        if rng.random() < 0.25:
            row[-1] = str(pick(rng, odd))
            is_bad |= row[-1] != ""
        wanted += [math.nan if cell in ("?", "NaN", "") else row_value(cell) for cell in row]
        stamps = [str(k) for k in range(4)]
        if stamped and rng.random() < 0.15:
            stamps[int(rng.integers(4))] = str(pick(rng, ["2020-01-01", "1_0", "", "x", "nan"]))
            is_bad = True
        pairs = ",".join(f"({s},{cell})" for s, cell in zip(stamps, row, strict=True))
        lines.append(f"{pairs if stamped else ','.join(row)}:{'pq'[number % 2]}")
    head = f"@timestamps {str(stamped).lower()}\n@classLabel true p q\n@data\n"
    path = world.folder / "t.ts"
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")

    def check(series: Any) -> None:
        found = series.values[:, 0]
        kept = np.array(wanted, np.float32)
        kept = kept[~np.isnan(kept)] if stamped else kept
        np.testing.assert_array_equal(found, kept)
        assert series.labels.tolist() == ["p", "q", "p"]

    return read(lambda: read_ts(path), check, is_bad)


def row_value(cell: str) -> float:
    return float(cell) if _NUMBER.fullmatch(cell) else math.inf


def flags(rng: Rng, world: World) -> str:
    """Calls with flags that are unknown, lack a value, or have one that is not allowed."""
    table = write_csv(world.folder / "t.csv", base(rng))
    good = ["--task=classification", "--id=who", "--time=hour", "--target=ill", "--features=a,b"]
    values = ["", "x", "-1", "nan", "1e999", "none", "a,b", "{", '{"0": -1}', "\x1b[0m", "ä", "[]"]
    names = [
        "dim",
        "epochs",
        "batch-size",
        "learning-rate",
        "patience",
        "dropout",
        "seed",
        "devices",
    ]
    names += ["precision", "accelerator", "validation", "unit", "origin", "duplicates", "empty"]
    names += [
        "horizon",
        "type",
        "labels",
        "time-format",
        "class-weight",
        "no-such-flag",
        "variable",
    ]
    # Allowed, and not worth a training.
    harmless = {("time-format", value) for value in values}
    harmless |= {(name, "none") for name in ("patience", "validation", "labels", "class-weight")}
    harmless |= {("duplicates", "none"), ("variable", "none")}
    pairs = [(name, value) for name in names for value in values if (name, value) not in harmless]
    name, value = pick(rng, pairs)
    how = str(pick(rng, ["value", "bare", "command", "predict"]))
    if how == "predict":
        option = str(pick(rng, ["--horizon=1", "--every=x", "--times=no.csv", "--labels=no", "-q"]))
        call = ["predict", world.models["classes"], table, option]
        return command(world, *call, is_bad=True)
    if how == "command":
        return command(world, str(pick(rng, ["fti", "", "--fit", "predict"])), is_bad=True)
    call = ["fit", table, *good, "--epochs=1", "--dim=8", "--num-layers=1", "--accelerator=cpu"]
    flag = f"--{name}={value}" if how == "value" else f"--{name}"
    return command(world, *call, flag, is_bad=True, output="run")


def settings_files(rng: Rng, world: World) -> str:
    """YAML files of settings that are no YAML, have unknown keys or wrong kinds."""
    table = write_csv(world.folder / "t.csv", base(rng))
    lines = ["task: classify", "dim: [1]", "drop_out: 1", "- a", "a: [", "task", "dim: 1.5", "? {}"]
    lines += ["!!python/object/apply:os.system [true]", "dim: .nan", "epochs: -3", "id: [who, a]"]
    lines += ["\x00", "ä: \xff", "table: {a: b}", "static: {a: 1}", "*x", "&a [*a]", "1: 2"]
    path = world.folder / "s.yaml"
    path.write_bytes("\n".join(pick(rng, lines) for _ in range(2)).encode("latin-1"))
    call = ["fit", table, "--config", path, "--id=who", "--time=hour", "--target=ill"]
    return command(world, *call, is_bad=True, output="run")


def models(rng: Rng, world: World) -> str:
    """Model files that are cut off, foreign, or whose description was changed."""
    content = bytearray(world.models["classes"].joinpath("model.safetensors").read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    how = str(pick(rng, ["cut", "head", "length", "foreign", "empty"]))
    if how == "cut":
        del content[int(rng.integers(len(content) - 1)) :]
    elif how == "head":
        where = 8 + int(rng.integers(size))
        content[where : where + 4] = rng.bytes(4)
    elif how == "length":
        content[:8] = struct.pack("<Q", int(rng.integers(2**40)))
    else:
        content = bytearray(b"" if how == "empty" else rng.bytes(200))
    path = world.folder / "m.safetensors"
    path.write_bytes(content)
    table = write_csv(world.folder / "t.csv", base(rng))
    check = lambda output: finite(rows_of(output))  # noqa: E731
    is_bad = True if how != "head" else None
    return command(world, "predict", path, table, is_bad=is_bad, check=check)


def fits(rng: Rng, world: World) -> str:
    """Whole runs on CSV with odd classes, one of them with a weight; all come back by name."""
    names = list(dict.fromkeys(_odd_name(rng) for _ in range(3)))
    columns = base(rng, 12)
    given = [names[int(who[1:]) % len(names)] for who in columns["who"]]
    columns["ill"] = given
    table, run = write_csv(world.folder / "t.csv", columns), world.folder / "run"
    weight = json.dumps({pick(rng, [*names, "nobody"]): 2})
    call = ["fit", table, "--task=classification", "--model=resonator", "--families=summary"]
    call += ["--id=who", "--time=hour", "--features=a,b", "--target=ill"]
    is_bad = len(names) < 2 or "nobody" in weight or any(name in MISSING for name in names)
    call += [f"--class-weight={weight}"]
    if command(world, *call, is_bad=is_bad, output="run") == REFUSED:
        return REFUSED

    def check(path: Path) -> None:
        rows = rows_of(path)
        finite(rows)
        assert list(rows[0]) == ["who", "prediction", *(f"probability_{n}" for n in sorted(names))]
        assert {row["prediction"] for row in rows} <= set(names)

    return command(world, "predict", run, table, check=check, is_bad=False)


FAMILIES: dict[str, Callable[[Rng, World], str]] = {
    family.__name__: family
    for family in (ids, labels, cells, times, damage, types, headers, collisions, outcomes)
} | {
    family.__name__: family
    for family in (events, archives, ts_files, flags, settings_files, models, fits)
}
