"""This machine's tables, such as devices, loaders, overhead. Without a name: all of them.

python -m NAME.benchmark
python -m NAME.benchmark devices --output devices.json
python -m NAME.benchmark overhead --model.network MLP --data.batch_size 64
Flags of NAME.fit (--data.*, --model.*, --config, Trainer flags) say what is measured.
"""

import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unbroken.cli.parser import CommandParser, add_output, take_word
from unbroken.cli.program import folder_of
from unbroken.cli.start import quick_imports
from unbroken.errors import UserError, nearest, require
from unbroken.tables import (
    MARK_OF_PICTURE,
    Row,
    check_output,
    flat,
    format_table,
    refuse_file_of_others,
    write_rows,
)

if TYPE_CHECKING:
    from unbroken.cli.cli import Configuration


class Table(NamedTuple):
    """A table of the benchmark."""

    # The column that its chart shows.
    quantity: str
    # What the table says.
    meaning: str


TABLES = {
    "devices": Table(
        "samples_per_sec",
        "devices × precisions: speed, speed-up over CPU float32, accuracy, peak memory",
    ),
    "loaders": Table(
        "ms_per_batch",
        "a run's own loader and a plain PyTorch loop's: milliseconds per batch",
    ),
    "memory": Table(
        "peak_mib",
        "peak by precision, activation checkpointing, accumulation, batch size",
    ),
    "overhead": Table("epoch_s", "what a run costs against loops written by hand"),
}
NETWORKS = ("chosen", "ResNet18")
PRECISIONS = ("32-true", "tf32", "16-mixed", "bf16-mixed")
WORKERS = (0, 2, 4)

# Measurements behind every median. All tables together take about ten minutes with three.
N_OF_ONE_TABLE = 5
N_OF_ALL_TABLES = 3
N_QUICK = 2

# Settings of the program's own, beside its defaults. Each file may be missing. What a run costs
# beside loops by hand shows best in a small network with small batches, and without augmentation,
# which these loops do not have.
PRESET = "benchmark.yaml"
# With --quick: a few samples, of data that need no download
QUICK_PRESET = "benchmark_quick.yaml"
USE_THE_PRESET = ("overhead", "loaders")
# With these flags no preset is used: a class of the user's own may not know its flags.
BEATS_THE_PRESET = (
    "--config",
    "-c",
    "--model",
    "--model.class_path",
    "--data",
    "--data.class_path",
)


def main(package: str, argv: list[str]) -> int:
    """Measure what ``argv`` asks for, print it, and write it where it says."""
    options = read_options(package, argv)
    # A benchmark uploads nothing.
    os.environ["WANDB_MODE"] = "offline"
    with quick_imports():
        from unbroken.commands.benchmark.conditions import conditions, line_of
    facts = conditions(folder_of(package))
    print(line_of(facts), flush=True)
    tables: dict[str, list[Row]] = {}
    for name in [options.table] if options.table else TABLES:
        tables[name] = measure_table(package, name, options)
        print(f"\n{name}: {TABLES[name].meaning}\n{format_table(tables[name])}", flush=True)
        # Files are written after every table: a pass that is stopped keeps what it has.
        write(options, facts, tables, title=line_of(facts))
    return 0


def write(options: Namespace, facts: Row, tables: dict[str, list[Row]], title: str) -> None:
    """Write the tables and their picture, where files were asked for."""
    if options.output and options.output.suffix.lower() == ".json":
        write_rows(options.output, {**facts, "tables": tables})
    elif options.output:
        lines: list[Row] = []
        for table, rows in tables.items():
            lines += [{"table": table, **row, **flat(facts)} for row in rows]
        write_rows(options.output, lines)
    if options.plot:
        from unbroken.commands.benchmark.picture import draw

        quantities = {name: table.quantity for name, table in TABLES.items()}
        draw(options.plot, tables, quantities, title)


def read_options(package: str, argv: list[str]) -> Namespace:
    """The benchmark's options, ``table`` (None: all) and, for ``fit``, ``fit_flags``.

    A UserError for bad values.
    """
    table, rest = take_word(argv, TABLES, switches=("--quick",))
    if table is None and argv and not argv[0].startswith("-"):
        hint = nearest(argv[0], TABLES)
        raise UserError(f"TABLE must be one of {', '.join(TABLES)}, got {argv[0]}.{hint}")
    parser = make_parser(package, table)
    options, fit_flags = parser.parse_known_args(rest)
    options.fit_flags = fit_flags
    check_at_least(1, "--n", [options.n])
    check_at_least(1, "--batch_sizes", options.batch_sizes)
    check_at_least(0, "--workers", options.workers)
    if options.output and not options.plot:
        options.plot = check_output(options.output.with_suffix(".png"), (".png",), "--plot")
        refuse_file_of_others(options.plot, MARK_OF_PICTURE, "--plot")
    return options


def make_parser(package: str, table: str | None) -> CommandParser:
    """The options of a table; None: of a pass over all tables."""
    meanings = [f"  {name}: {entry.meaning}" for name, entry in TABLES.items()]
    doc = (__doc__ or "") + "\ntables:\n" + "\n".join(meanings)
    parser = CommandParser(package, f"benchmark {table or ''}".strip(), doc)
    parser.set_defaults(
        table=table, networks=NETWORKS, precisions=PRECISIONS, batch_sizes=(), workers=WORKERS
    )
    add_output(parser)
    add_output(parser, "--plot", (".png",), "chart (default: beside --output; none without it)")
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny sizes: tries the command out, measures nothing")
    n = N_OF_ONE_TABLE if table else N_OF_ALL_TABLES
    behind = f"measurements behind every median (default: {n})"
    add("--n", type=int, default=n, metavar="N", help=behind)
    if table == "devices":
        add("--networks", nargs="+", choices=NETWORKS, help="chosen is --model.network")
    if table in ("devices", "memory"):
        add("--precisions", nargs="+", choices=PRECISIONS)
        sizes = "default: some that suit the device"
        add("--batch_sizes", nargs="+", type=int, metavar="B", help=sizes)
    if table == "loaders":
        counts = "worker counts to try (default: 0 2 4)"
        add("--workers", nargs="+", type=int, metavar="W", help=counts)
    return parser


def check_at_least(least: int, option: str, values: Iterable[int]) -> None:
    """A UserError for a value that is too small."""
    for value in values:
        require(value >= least, option, f"be at least {least}", value)


def measure_table(package: str, name: str, options: Namespace) -> list[Row]:
    """The rows of one table. Typed flags of ``fit`` win over the table's preset."""
    from unbroken.cli.cli import configure
    from unbroken.commands.program_of import program_of
    from unbroken.loading.batch_size import batch_size_of

    program = program_of(package)
    flags = [*presets_of(name, program.defaults_file.parent, options), *options.fit_flags]
    config = configure(program, "benchmark", flags)
    size = batch_size_of(config.datamodule)
    if not size:
        data = type(config.datamodule).__name__
        raise UserError(f"--data: the table {name} needs a batch_size, {data} has none.")
    n = min(options.n, N_QUICK) if options.quick else options.n
    changed = {"n": n, "fit_flags": flags, "batch_size": size}
    return list(rows_of(name, config, Namespace(**vars(options) | changed)))


def presets_of(table: str, folder: Path, options: Namespace) -> list[str]:
    """The flags that read those presets of a folder which the table uses."""
    typed = {word.partition("=")[0] for word in options.fit_flags}
    names = []
    if table in USE_THE_PRESET and typed.isdisjoint(BEATS_THE_PRESET):
        names.append(PRESET)
    if options.quick:
        names.append(QUICK_PRESET)
    flags = []
    for name in names:
        if (folder / name).is_file():
            flags += ["--config", str(folder / name)]
    return flags


def rows_of(table: str, config: "Configuration", options: Namespace) -> Iterable[Row]:
    """Measure a table."""
    if table == "devices":
        from unbroken.commands.benchmark.table_devices import measure_devices

        return measure_devices(config, options)
    if table == "loaders":
        from unbroken.commands.benchmark.table_loaders import measure_loaders

        return measure_loaders(config, options)
    if table == "memory":
        from unbroken.commands.benchmark.table_memory import measure_memory

        return measure_memory(config, options)
    from unbroken.commands.benchmark.table_overhead import measure_overhead

    return measure_overhead(config, options)
