"""Tables in the terminal, the same rows as ``.json`` or ``.csv``, and how every file is written. A row is a dictionary.
A key it lacks was not measured: a dash in a terminal, an empty cell in CSV, absent in JSON.
"""

import contextlib
import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from project.errors import UserError, require

Row = Mapping[str, Any]


def check_output(
    path: Path | str, endings: Sequence[str] = (".json", ".csv"), option: str = "--output"
) -> Path:
    """``path``, or a UserError where no file with such an ending can be written. Call it before any work."""
    path = Path(os.path.expanduser(path))  # Path.expanduser() raises where there is no such user
    require(
        path.suffix.lower() in endings,
        option,
        f"end in {' or '.join(endings)}",
        path,
        " These are the formats.",
    )
    require(
        not path.is_dir(),
        option,
        "be a file",
        f"the folder {path}",
        f" Name one in it: {path}/out{endings[0]}.",
    )
    require(
        path.parent.is_dir(),
        option,
        "lie in a folder that exists",
        path,
        f" Create {path.parent} first.",
    )
    with contextlib.suppress(
        OSError
    ):  # os.access() says yes to root where no file can be made, as in /proc
        tempfile.TemporaryFile(dir=path.parent).close()
        if not path.exists() or os.access(path, os.W_OK):
            return path
    raise UserError(f"{option} must be a file you may write, got {path}. Choose another folder.")


def write_rows(path: Path, rows: Sequence[Row] | Row) -> None:
    """Write rows, or one mapping alone, in full precision as JSON or CSV, by the file's ending."""
    text = io.StringIO()
    # through JSON and back: NaN and infinity, which JSON does not have, become None
    plain = json.loads(json.dumps(rows, default=str), parse_constant=lambda _: None)
    if path.suffix.lower() == ".json":
        text.write(json.dumps(plain, indent=2, ensure_ascii=False) + "\n")
    else:
        plain = [plain] if isinstance(plain, dict) else plain
        writer = csv.DictWriter(text, columns_of(plain), restval="", lineterminator="\n")
        writer.writeheader()
        for row in plain:
            writer.writerow(
                {key: json.dumps(v) if isinstance(v, list | dict) else v for key, v in row.items()}
            )
    write_atomically(text.getvalue(), path)


def read_rows(path: Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.csv``, without empty cells; none where there is no file."""
    with contextlib.suppress(FileNotFoundError), open(path, newline="", encoding="utf-8") as file:
        return [
            {name: float(text) for name, text in row.items() if text}
            for row in csv.DictReader(file)
        ]
    return []


def write_atomically(data: str | bytes | memoryview, path: Path) -> None:
    """Write a file beside ``path``, flush it to disk, and put it in ``path``'s place; a UserError where that fails."""
    # a file's name need not be valid Unicode: Python reads such a byte as a code that UTF-8 does not have
    data = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    beside = path.with_name(
        f".{path.name}.{os.getpid()}.part"
    )  # two commands may write the same file
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        fix = "What was there before is whole. Free space, or make the folder writable."
        raise UserError(f"{path} could not be saved: {error.strerror or error}. {fix}") from error


def format_table(rows: Sequence[Row]) -> str:
    """Rows as aligned text: a heading, a rule, one line per row; numbers to the right, in four significant digits."""
    columns = []
    for name in columns_of(rows):
        values = [row.get(name) for row in rows]
        texts = [name, *map(format_cell, values)]
        width = max(map(len, texts))
        to_right = all(
            isinstance(value, int | float | None) and not isinstance(value, bool)
            for value in values
        )
        columns.append(
            [
                f"{text:{'>' if to_right else '<'}{width}}"
                for text in [name, "-" * width, *texts[1:]]
            ]
        )
    return "\n".join("  ".join(texts).rstrip() for texts in zip(*columns, strict=True))


def format_cell(value: Any) -> str:
    """One value for a person: ``12,345``, ``12.3``, ``0.9912``, ``yes``, ``-`` for what was not measured."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, int):
        return ("no", "yes")[value] if isinstance(value, bool) else f"{value:,}"
    if isinstance(value, float):
        decimals = 4 if abs(value) < 1 else max(0, 4 - len(str(int(abs(value)))))
        return f"{value:.2e}" if 0 < abs(value) < 0.001 else f"{value:,.{decimals}f}"
    if isinstance(value, list | tuple):
        return " ".join(map(format_cell, value))
    return " ".join(str(value).split())


def is_number(value: Any) -> bool:
    """Whether a value is a number that can be averaged and drawn: not NaN, and not beyond 1e100."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def load_yaml(text: str) -> Any:
    """What a YAML text holds; a ValueError where that contains itself, as in ``&x [*x]``."""
    content = yaml.safe_load(text)
    json.dumps(content, default=str, skipkeys=True)
    return content


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Every key of the rows, in the order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's nested keys joined by dots, without the ``init_args`` levels, as they are typed."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}".replace(".init_args", "").replace("init_args", "").strip(".")
        is_section = isinstance(value, dict) and value
        found |= flat(value, f"{name}." if name else "") if is_section else {name: value}
    return found
