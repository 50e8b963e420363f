"""This machine's tables: devices, loaders, memory, overhead, accuracy. Without a name: all of them.

python -m project.benchmark
python -m project.benchmark devices --output devices.json
python -m project.benchmark overhead --model.network MLP --data.batch_size 64
python -m project.benchmark accuracy --config configs/fast.yaml --n 10 --baseline
Flags of project.fit (--data.*, --model.*, --config, Trainer flags) say what is measured.
"""

from __future__ import annotations

import argparse
import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from project.benchmark import TABLES, Row, Settings
from project.engine.command import CommandParser, add_output, quick_imports, run, take_word
from project.errors import UserError, nearest
from project.tables import check_output, format_table, write_rows

if TYPE_CHECKING:
    from project.benchmark.timing import Conditions

# For --quick: seconds instead of minutes, and figures that say only that the command works.
QUICK = ["--data.source", "sample", "--data.train_samples", "1024", "--data.val_samples", "200"]
QUICK += ["--data.test_samples", "200"]
# A small network and small batches show overhead best: the network's own work hides it least.
SMALL_MLP = ["--model.network", "MLP", "--model.lr", "0.002", "--model.label_smoothing", "0", "--data.batch_size", "64"]
PRESETS = {"overhead": SMALL_MLP, "loaders": SMALL_MLP}
# A file or class of the user's own says what is measured; it may not know the preset's flags.
BEATS_THE_PRESET = ("--config", "-c", "--model", "--model.class_path", "--data", "--data.class_path")
# All tables together take about ten minutes.
IN_WHOLE_PASS = {"devices": {"n": 3}, "overhead": {"n": 3, "each_feature": False}, "accuracy": {"n": 3}}
# Table → the quantity drawn, its axis label, and the columns that name a row.
PANELS = {
    "devices": ("samples_per_sec", "samples per second", "device network precision batch_size"),
    "loaders": ("ms_per_batch", "milliseconds per batch", "loader"),
    "memory": ("peak_mib", "peak MiB", "device precision activation_checkpointing accumulation batch_size"),
    "overhead": ("epoch_s", "seconds per epoch", "loop"),
    "accuracy": ("test/accuracy", "test accuracy", "configuration"),
}


def main(argv: list[str]) -> int:
    """Measure what ``argv`` asks for, print it, and write it where it says."""
    table, options, fit_flags = read_options(argv)
    output = check_output(options.output) if options.output else None
    plot = options.plot or (output.with_suffix(".png") if output else None)
    plot = check_output(plot, (".png",), "--plot") if plot else None
    typed = {k: v for k, v in vars(options).items() if k not in ("output", "plot") and v is not None}
    check(Settings(**typed))
    os.environ["WANDB_MODE"] = "offline"  # a benchmark uploads nothing
    with quick_imports():
        from project.benchmark.timing import Conditions

    conditions = Conditions()
    print(conditions.line, flush=True)
    tables: dict[str, list[Row]] = {}
    for name in [table] if table else TABLES:
        tables[name] = measure_table(name, fit_flags, typed, whole_pass=table is None)
        print(f"\n{name}: {TABLES[name]}\n{format_table(tables[name])}", flush=True)
        save(output, plot, conditions, tables)  # after every table: a stopped pass keeps what it has
    return 0


def read_options(argv: list[str]) -> tuple[str | None, argparse.Namespace, list[str]]:
    """The table's name or None, the benchmark's own options, and the rest, which are flags of ``fit``."""
    table, rest = take_word(argv, TABLES, switches=("--quick", "--baseline"))
    if table is None and argv and not argv[0].startswith("-"):
        raise UserError(f"TABLE must be one of {', '.join(TABLES)}, got {argv[0]}.{nearest(argv[0], TABLES)}")
    parser = CommandParser(f"project.benchmark{f' {table}' if table else ''}", __doc__)
    add = parser.add_argument
    add_output(parser)
    add("--plot", metavar="FILE.png", help="chart (default: beside --output; none without it)")
    add("--quick", action="store_true", help="tiny sizes: tries the command out, measures nothing")
    whole = "" if table else "; without a table mostly 3"
    add("--n", type=int, metavar="N", help=f"measurements behind every median (accuracy: seeds; default: 5{whole})")
    if table == "devices":
        add("--networks", nargs="+", choices=Settings.networks, help="chosen is --model.network")
    if table in ("devices", "memory"):
        add("--precisions", nargs="+", choices=Settings.precisions)
        add("--batch_sizes", nargs="+", type=int, metavar="B")
    if table == "loaders":
        add("--workers", nargs="+", type=int, metavar="W", help="worker counts to try (default: 0 2 4)")
    if table == "accuracy":
        add("--target", type=float, metavar="A", help="accuracy, 0-1, whose time is reported (default: 0.99)")
        add("--baseline", action="store_true", help="also time a plain PyTorch loop (pytorch/examples') to the target")
    return table, *parser.parse_known_args(rest)


def check(settings: Settings) -> None:
    """Refuse counts that measure nothing."""
    least = [("n", settings.n, 1), *(("batch_sizes", size, 1) for size in settings.batch_sizes)]
    for name, value, lowest in [*least, *(("workers", count, 0) for count in settings.workers)]:
        if value < lowest:
            raise UserError(f"--{name} must be at least {lowest}, got {value}.")
    if not 0 < settings.target < 1:
        raise UserError(f"--target must be above 0 and below 1, got {settings.target}. 0.99 is 99 %.")


def measure_table(name: str, fit_flags: list[str], typed: dict[str, Any], whole_pass: bool = False) -> list[Row]:
    """The rows of one table. Flags of ``fit`` and fields of :class:`Settings` that were typed win over its presets."""
    from project.engine.cli import configure

    settings = Settings(**{**(IN_WHOLE_PASS.get(name, {}) if whole_pass else {}), **typed})
    own = any(word.split("=")[0] in BEATS_THE_PRESET for word in fit_flags)
    flags = [*([] if own else PRESETS.get(name, [])), *(QUICK if settings.quick else []), *fit_flags]
    config = configure(flags, "project.benchmark")
    size = getattr(config.datamodule, "batch_size", 0)
    if not size and name != "accuracy":
        kind = type(config.datamodule).__name__
        raise UserError(f"--data: the table {name} needs a data module with a batch_size, {kind} has none.")
    n = min(settings.n, 2) if settings.quick else settings.n
    table = importlib.import_module(f"project.benchmark.{name}")
    rows: list[Row] = table.measure(config, replace(settings, n=n, fit_flags=flags, batch_size=size))
    return rows


def save(output: Path | None, plot: Path | None, conditions: Conditions, tables: dict[str, list[Row]]) -> None:
    """JSON: the conditions once and every table. CSV: every row with its conditions. And the chart."""
    if output is not None and output.suffix.lower() == ".json":
        write_rows(output, {**conditions.to_plain(), "tables": tables})
    elif output is not None:
        shared = conditions.to_columns()
        write_rows(output, [{"table": name, **row, **shared} for name, rows in tables.items() for row in rows])
    if plot is not None:
        draw(plot, tables, conditions.line)


def draw(path: Path, tables: dict[str, list[Row]], title: str) -> None:
    """The tables as one picture: a panel per table, a bar per row."""
    from matplotlib.figure import Figure

    heights = [max(1.2, 0.28 * len(rows)) for rows in tables.values()]
    figure = Figure(figsize=(10, sum(heights) + 1.1 * len(tables) + 0.5), layout="constrained")
    panels = figure.subplots(len(tables), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (table, rows) in zip(panels, tables.items(), strict=True):
        quantity, label, naming = PANELS[table]
        drawn = [row for row in rows if row.get(quantity) is not None]
        names = [" ".join(_word(key, row[key]) for key in naming.split() if key in row) for row in drawn]
        values = [row[quantity] for row in drawn]
        errors = [value * row.get("spread_pct", 0) / 200 for value, row in zip(values, drawn, strict=True)]
        axes.barh(range(len(drawn)), values, xerr=errors if any(errors) else None, color="#4477aa", ecolor="#999999")
        axes.set_yticks(range(len(drawn)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(table, loc="left", fontsize=10)
        axes.set_xlabel(label, fontsize=8)
        axes.grid(axis="x", alpha=0.3)
        if values and max(values) > 50 * max(min(values), 1e-9):
            axes.set_xscale("log")
    figure.suptitle(title, fontsize=7)
    figure.savefig(path, dpi=120)


def _word(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return key.replace("_", " ") if value else ""
    # a configuration may be a long line of flags
    return f"{key.replace('_', ' ')} {value}" if isinstance(value, int) else str(value)[:60]


if __name__ == "__main__":
    run(main)
