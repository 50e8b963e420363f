"""Tables in the terminal, the same rows as ``.json`` or ``.csv``, and how every file is written.

A row is a dictionary. A key that a row lacks was not measured: it is a dash in a terminal, an empty
cell in CSV, and absent in JSON.
"""

import csv
import io
import json
import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from unbroken.errors import CONTROL, UserError, in_a_cell, require
from unbroken.errors import printable as printable
from unbroken.storage.files import write_atomically
from unbroken.storage.reading import Cells

Row = Mapping[str, Any]

# A spreadsheet takes a cell that begins with one of these for a formula, and computes it.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
# Of a longer list, such as a mask, the terminal shows the first values; a file holds all.
MOST_SHOWN = 16
# Characters to which the cells of a column are filled up. A longer one stands out.
WIDEST = 1_000
# What a picture says of itself, as matplotlib's metadata, and how that stands in a PNG file
MADE_BY = {"Software": __name__.split(".")[0]}
MARK_OF_PICTURE = b"Software\0" + MADE_BY["Software"].encode()
# A number beyond it cannot be averaged or drawn.
LARGEST_NUMBER = 1e100
# The most values of a YAML text whose aliases are written out
MOST_VALUES = 100_000


def check_output(
    path: Path | str, endings: Sequence[str] = (".json", ".csv"), option: str = "--output"
) -> Path:
    """``path``, or a UserError where no file with such an ending can be written. Call it before any
    work.
    """
    # Path.expanduser() raises where there is no such user.
    path = Path(os.path.expanduser(path))
    require(
        not path.is_dir(),
        option,
        "be a file",
        f"the folder {path}",
        f" Name a file in it: {path / 'out'}{endings[0]}.",
    )
    require(
        path.suffix.lower() in endings,
        option,
        f"end in {' or '.join(endings)}",
        path,
        " These are the formats.",
    )
    require(
        path.parent.is_dir(),
        option,
        "lie in a folder that exists",
        path,
        f" Create {path.parent} first.",
    )
    if not can_be_written(path):
        raise UserError(
            f"{option} must be a file you may write, got {path}. Choose another folder."
        )
    return path


def refuse_file_of_others(path: Path, mark: bytes, option: str) -> None:
    """A UserError if a file that would be replaced holds anything without this command's ``mark``.

    It is for names that nobody has typed: a file that an option names is the user's to replace.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        is_own = data.find(mark) >= 0
    if not is_own:
        raise UserError(
            f"{path} was not written by this command, and would be replaced. Move it away, or name"
            f" another place with {option}."
        )


def can_be_written(path: Path) -> bool:
    """Whether a file can be made in the folder of ``path``, and ``path`` itself may be replaced."""
    try:
        # os.access() is not enough: it says yes to root where no file can be made, as in /proc.
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError:
        return False
    return not path.exists() or os.access(path, os.W_OK)


def write_rows(path: Path, rows: Sequence[Row] | Row) -> None:
    """Write rows, or one mapping alone, in full precision as JSON or CSV, by the file's ending.

    In CSV a text that a spreadsheet would take for a formula gets an apostrophe before it, as
    spreadsheets do it themselves. In JSON every text stays what it is.
    """
    plain = as_plain(rows)
    if path.suffix.lower() == ".json":
        text = json.dumps(plain, indent=2, ensure_ascii=False)
        # Somebody may look at the file in a terminal. Whoever reads it as JSON gets the same text.
        text = CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"
    elif isinstance(plain, dict):
        text = as_csv([plain])
    else:
        text = as_csv(plain)
    write_atomically(text, path)


def as_plain(rows: Sequence[Row] | Row) -> Any:
    """Rows of plain values: tensors and arrays become lists; NaN and infinity, which JSON does not
    have, None; other objects their text.
    """
    text = json.dumps(rows, default=plain_value)
    return json.loads(text, parse_constant=lambda _: None)


def plain_value(value: Any) -> Any:
    """What JSON can hold of a value that it does not know."""
    # The text of a large tensor would be shortened.
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def as_csv(rows: Sequence[Row]) -> str:
    """Plain rows as a CSV text with a heading; lists and dictionaries as JSON in their cell."""
    names = columns_of(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_cell(name) for name in names])
    for row in rows:
        writer.writerow([csv_cell(row.get(name, "")) for name in names])
    return text.getvalue()


def csv_cell(value: Any) -> Any:
    """A value as the cell of a CSV file: never a formula, nor a command of the terminal."""
    if isinstance(value, list | dict):
        return json.dumps(value)
    if isinstance(value, str):
        mark = "'" if value.startswith(FORMULA_STARTS) else ""
        return mark + in_a_cell(value)
    return value


def read_rows(path: Path, is_bounded: bool = False) -> Iterator[dict[str, float]]:
    """The rows of a ``metrics.csv``, without empty cells; none where there is no file. A row
    without an epoch is given one (:func:`with_moment`).

    Args:
        path: The file.
        is_bounded: Whether it may be a stranger's, and is not read where it is very large.
    """
    try:
        cells = Cells(path, is_bounded)
    except FileNotFoundError:
        return
    before: dict[str, float] = {}
    without: list[dict[str, float]] = []
    for cells_of_row in cells:
        pairs = zip(cells.names, cells_of_row, strict=True)
        row = {name: float(text) for name, text in pairs if text}
        if "epoch" not in row:
            without.append(row)
            continue
        yield from (with_moment(each, before, row) for each in without)
        without = []
        before = {name: row[name] for name in ("step", "epoch") if name in row}
        yield row
    yield from (with_moment(each, before, {}) for each in without)


def with_moment(
    row: dict[str, float], before: dict[str, float], after: dict[str, float]
) -> dict[str, float]:
    """A row that was logged without an epoch, with that of a row beside it.

    Lightning's LearningRateMonitor logs so as an epoch begins: the step fits between the rows, and
    the epoch is that of the row after it. A row whose step does not fit was logged under a number
    of the module's own, as by ``self.log("step", ...)``. It is of the moment of the row before it.
    """
    first = before.get("step", 0)
    last = after.get("step", -1)
    if first <= row.get("step", -1) <= last:
        return row | {"epoch": after["epoch"]}
    return row | before


def format_table(rows: Sequence[Row]) -> str:
    """Rows as aligned text: a heading, a rule, one line per row; numbers to the right, in four
    significant digits.
    """
    columns = [format_column(name, [row.get(name) for row in rows]) for name in columns_of(rows)]
    lines = zip(*columns, strict=True)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def format_column(name: str, values: Sequence[Any]) -> list[str]:
    """A column's cells, all of one width: its name, a rule, its values."""
    heading = printable(name)
    texts = [format_cell(value) for value in values]
    width = min(WIDEST, max(len(text) for text in [heading, *texts]))
    cells = [heading, "-" * width, *texts]
    if all(value is None or is_plain_number(value) for value in values):
        return [cell.rjust(width) for cell in cells]
    return [cell.ljust(width) for cell in cells]


def format_cell(value: Any) -> str:
    """One value for a person: ``12,345``, ``12.3``, ``0.9912``, ``yes``, ``-`` for what was not
    measured.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return format_float(value)
    if isinstance(value, list | tuple):
        return format_list(flat_list(value))
    return printable(str(value))


def format_list(values: Sequence[Any]) -> str:
    """The values of a list beside each other, and how many there are if these are not all."""
    shown = [format_cell(each) for each in values[:MOST_SHOWN]]
    if len(values) > MOST_SHOWN:
        shown.append(f"... ({len(values):,} values)")
    return " ".join(shown)


def flat_list(values: Sequence[Any]) -> list[Any]:
    """The values of a list and of the lists in it, in order."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += flat_list(value)
        else:
            found.append(value)
    return found


def format_float(value: float) -> str:
    """A number in four significant digits; ``-`` where it is not finite."""
    if not math.isfinite(value):
        return "-"
    if 0 < abs(value) < 0.001:
        return f"{value:.2e}"
    if abs(value) < 1:
        return f"{value:.4f}"
    digits_before_point = len(str(int(abs(value))))
    decimals = max(0, 4 - digits_before_point)
    return f"{value:,.{decimals}f}"


def format_metric(value: float) -> str:
    """A metric in a line for a person: four decimals, such as ``0.9912`` and ``12.3456``, or
    ``3.00e-05`` where these would show little or nothing of it.
    """
    if 0 < abs(value) < 0.001:
        return format_float(value)
    return f"{value:.4f}"


def is_plain_number(value: Any) -> bool:
    """Whether a value is an int or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a number that can be averaged and drawn: not NaN, and not beyond 1e100."""
    return is_plain_number(value) and abs(value) < LARGEST_NUMBER


def load_yaml(text: str) -> Any:
    """What a YAML text holds; a ValueError where its aliases make it too much."""
    refuse_too_many_aliases(text)
    return yaml.safe_load(text)


def refuse_too_many_aliases(text: str) -> None:
    """A ValueError where a YAML text has very many values with its aliases written out: a few lines
    can name them. So has one that contains itself, as in ``&x [*x]``.
    """
    if has_aliases(text) and _written_out(yaml.compose(text, yaml.SafeLoader), {}) > MOST_VALUES:
        raise ValueError(f"with its aliases written out it has more than {MOST_VALUES:,} values")


def has_aliases(text: str) -> bool:
    """Whether a YAML text names something a second time."""
    if "*" not in text:
        return False
    return any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))


def _written_out(node: yaml.Node | None, known: dict[yaml.Node, float]) -> float:
    """How many values are in a node where each alias is written out; infinite in one that contains
    itself.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if node not in known:
        # Until it is counted: it is met again inside itself alone.
        known[node] = math.inf
        inside = node.value
        if isinstance(node, yaml.MappingNode):
            inside = [value for _, value in node.value]
        known[node] = 1 + sum(_written_out(each, known) for each in inside)
    return known[node]


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Every key of the rows, in the order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's nested keys joined by dots, without the ``init_args`` levels, as they are
    typed.
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}".replace(".init_args", "").replace("init_args", "").strip(".")
        if not (isinstance(value, dict) and value):
            found[name] = value
        elif name:
            found |= flat(value, f"{name}.")
        else:
            found |= flat(value)
    return found
