"""What a command prints as a table, and the same rows as a ``.json`` or ``.csv`` file.

A row is a dictionary. A key that a row lacks is a quantity that could not be measured: a dash in the terminal, an empty
cell in CSV, absent in JSON.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from project.errors import UserError

Row = Mapping[str, Any]
ENDINGS = (".json", ".csv")


def check_output(path: Path | str, endings: Sequence[str] = ENDINGS, option: str = "--output") -> Path:
    """``path``, if a file of such an ending can be written there. Call it before any work.

    Raises:
        UserError: Another ending, a folder of that name, or a parent folder that is missing or may not be written to.
    """
    path = Path(path).expanduser()
    allowed = " or ".join(endings)
    if path.suffix.lower() not in endings:
        raise UserError(f"{option} must end in {allowed}, got {path}. The ending chooses the format.")
    if path.is_dir():
        raise UserError(
            f"{option} must be a file, got the folder {path}. Name a file in it, such as {path}/out{endings[0]}."
        )
    if not path.parent.is_dir():
        raise UserError(f"{option} must lie in a folder that exists, got {path}. Create {path.parent} first.")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UserError(f"{option} must be a file you may write, got {path}. Choose another folder.")
    return path


def write_rows(path: Path | str, rows: Sequence[Row] | Row) -> None:
    """Write rows as JSON (a list; one mapping alone as an object) or CSV, by the file's ending.

    Numbers keep their full precision. The file appears whole or not at all, and replaces what was there.

    Raises:
        UserError: As :func:`check_output`.
    """
    path = check_output(path)
    if path.suffix.lower() == ".json":
        text = json.dumps(_plain(rows), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    else:
        text = _csv([rows] if isinstance(rows, Mapping) else rows)
    replace_file(path, text.encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` beside ``path`` and move it there in one step."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        os.chmod(temporary, mode)  # mkstemp's 0600 would hide the file from everybody else
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def format_table(rows: Sequence[Row]) -> str:
    """Rows as aligned text: a heading, a rule, one line per row; numbers to the right, in four significant digits."""
    columns = columns_of(rows)
    cells = [[format_cell(row[column]) if column in row else "-" for column in columns] for row in rows]
    widths = [max(len(text) for text in texts) for texts in zip(columns, *cells, strict=True)]
    numeric = [all(_is_number(row[column]) for row in rows if row.get(column) is not None) for column in columns]

    def line(texts: Sequence[str]) -> str:
        aligned = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, numeric, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, cells)])


def format_cell(value: Any) -> str:
    """One value for a person: ``12,345``, ``12.3``, ``0.9912``, ``yes``, ``-`` for what was not measured."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        size = abs(value)
        if size != 0 and size < 0.001:
            return f"{value:.2e}"
        decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4
        return f"{value:,.{decimals}f}"
    if isinstance(value, (list, tuple)):
        return " ".join(format_cell(item) for item in value)
    return " ".join(str(value).split())


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Every key of the rows, in the order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(rows), restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        plain = _plain(row)
        writer.writerow(
            {key: json.dumps(item) if isinstance(item, (list, dict)) else item for key, item in plain.items()}
        )
    return text.getvalue()


def _plain(value: Any) -> Any:
    """The value in JSON's own types; a number that is not finite becomes null, a path or anything else its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)
