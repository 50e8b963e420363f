"""Which columns of runs are worth showing, and in which order the runs stand."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from unbroken.commands.runs.saved_run import FOUND_SOURCE, RESUMED_WITH, SavedRun, last_name
from unbroken.tables import Row, columns_of, format_column, is_number, printable

# Characters of a text in the terminal: the first with which all columns fit, or the last. The name
# of a run is always whole; of several runs the first ones are shown.
LONGEST_TEXTS = (1_000, 96, 64, 48, 36, 24)
NAME = "name"
NAMES = "runs"
# Of a longer text no more is looked at for it.
MOST_LOOKED_AT = 1_000
# Spaces between two columns
GAP = 2
SEED = "seed_everything"


def by_module(runs: Sequence[SavedRun]) -> dict[str, list[SavedRun]]:
    """The runs of each module, by the name of its class."""
    groups: dict[str, list[SavedRun]] = {}
    for run in runs:
        groups.setdefault(run.module, []).append(run)
    return groups


def differing(runs: Sequence[SavedRun]) -> list[str]:
    """Names of the settings that are not the same in all runs, or not all the time in one of them.

    What was typed for a run comes first: the rest may follow from it. The seed comes last.
    """
    values_of: dict[str, list[Any]] = {}
    for run in runs:
        for name, value in run.settings.items():
            values_of.setdefault(name, []).append(value)
    found = []
    for name, values in values_of.items():
        # A run that trains, or was stopped, has not told what it found.
        if name != FOUND_SOURCE and len(values) < len(runs):
            values.append(None)
        if name == RESUMED_WITH or any(value != values[0] for value in values):
            found.append(name)
    typed = {RESUMED_WITH} | {option for run in runs for option in run.typed}

    def place(name: str) -> tuple[bool, bool]:
        was_typed = name in typed or name.removeprefix("trainer.") in typed
        return (name == SEED, not was_typed)

    return sorted(found, key=place)


def shown_settings(runs: Sequence[SavedRun], names: Sequence[str]) -> list[dict[str, Any]]:
    """The values of some settings in each run, as people read them."""
    rows: list[dict[str, Any]] = [{} for _ in runs]
    for name in names:
        values = [run.settings.get(name) for run in runs]
        if any(name in run.classes for run in runs):
            values = shortened(values)
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def shortened(paths: Sequence[Any]) -> list[Any]:
    """Classes without their modules, unless two of them have one name."""
    full = {str(path) for path in paths if path is not None}
    short = {path: last_name(path) for path in full}
    has_namesakes = len(set(short.values())) < len(full)
    if has_namesakes:
        return list(paths)
    # A run without such a setting has None.
    return [short.get(str(path)) for path in paths]


def sort_rows(rows: Sequence[Row], column: str) -> list[Row]:
    """Rows by a column: numbers first, then texts, then what is missing."""

    def key(row: Row) -> tuple[int, float, str]:
        value = row.get(column)
        if is_number(value):
            return (0, value, "")  # type: ignore[return-value]
        if value is None:
            return (2, 0, "")
        return (1, 0, str(value))

    return sorted(rows, key=key)


def fitted(rows: Sequence[Row], width: int, first: Sequence[str]) -> list[Row]:
    """Rows with the columns that fit into ``width`` characters; at least with the first column.

    They stay in their order. Where not all fit, the last ones are left out, but not those of
    ``first``: they are left out after all others.

    Long texts are cut where that makes room, dates have no year, settings no section, and columns
    without a value are left out.
    """
    columns = columns_of(rows)
    names = [name for name in columns if has_values(rows, name)]
    short = short_names(columns)
    for longest in LONGEST_TEXTS:
        cells: list[Row] = [
            {name: cut(name, row.get(name), longest) for name in names} for row in rows
        ]
        widths = widths_of(cells, short)
        if sum(widths.values()) - GAP <= width:
            break
    # The last ones go first, and those of ``first`` after all others.
    leaving = [name for name in names[1:] if name in first]
    leaving += [name for name in names[1:] if name not in first]
    total = sum(widths.values()) - GAP
    left_out = set()
    while total > width and leaving:
        name = leaving.pop()
        total -= widths[name]
        left_out.add(name)
    kept = [name for name in names if name not in left_out]
    return [{short[name]: row[name] for name in kept} for row in cells]


def widths_of(rows: Sequence[Row], short: Mapping[str, str] = {}) -> dict[str, int]:
    """The characters that each column takes, with the gap behind it."""
    return {
        name: len(format_column(short.get(name, name), [row[name] for row in rows])[0]) + GAP
        for name in columns_of(rows)
    }


def side_by_side(runs: Sequence[SavedRun]) -> list[Row]:
    """A row for each setting by which runs differ, then for each result; a column for each run."""
    settings = shown_settings(runs, differing(runs))
    rows = [run.row(shown) for run, shown in zip(runs, settings, strict=True)]
    names = [name for name in columns_of(rows) if name != "name"]
    return [{"": name, **{row["name"]: row.get(name) for row in rows}} for name in names]


def full_name(name: str, known: Sequence[str]) -> str:
    """The column that a name without its section means, such as ``model.lr`` for ``lr``; the name
    itself where it means none, or several.
    """
    meant = [each for each in known if each == name or each.endswith(f".{name}")]
    return meant[0] if len(meant) == 1 else name


def short_names(known: Sequence[str]) -> dict[str, str]:
    """The names of settings without their section, where no other has the same."""
    last = {name: name.rpartition(".")[2] for name in known}
    count = Counter(last.values())
    shortened = {}
    for name in known:
        is_unique = count[last[name]] == 1
        shortened[name] = last[name] if is_unique else name
    return shortened


def has_values(rows: Sequence[Row], name: str) -> bool:
    """Whether a column holds anything."""
    return any(row.get(name) is not None for row in rows)


def cut(name: str, value: object, longest: int = LONGEST_TEXTS[-1]) -> object:
    """A value of the column ``name`` for the terminal: numbers as they are, long texts cut."""
    if value is None or isinstance(value, int | float) or name == NAME:
        return value
    if name == NAMES:
        return first_of(str(value).split(" "), longest)
    text = printable(str(value)[:MOST_LOOKED_AT])
    if name == "date":
        return text.partition("-")[2]
    return text if len(text) <= longest else text[: longest - 1] + "…"


def first_of(names: Sequence[str], longest: int) -> str:
    """As many whole names as so many characters hold, at least one, and how many more there are."""
    for count in range(len(names), 1, -1):
        shown = " ".join(names[:count])
        text = shown if count == len(names) else f"{shown} and {len(names) - count} more"
        if len(text) <= longest:
            return text
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
