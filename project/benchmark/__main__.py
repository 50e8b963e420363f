"""This machine's tables, such as devices, loaders, overhead. Without a name: all of them.

python -m project.benchmark
python -m project.benchmark devices --output devices.json
python -m project.benchmark overhead --model.network MLP --data.batch_size 64
Flags of project.fit (--data.*, --model.*, --config, Trainer flags) say what is measured.
"""

import os
from argparse import Namespace
from pathlib import Path

from project.engine.command import CommandParser, add_output, quick_imports, run, take_word
from project.errors import UserError, nearest, require
from project.tables import Row, check_output, flat, format_cell, format_table, write_rows

TABLES = {  # Table → the column that its chart shows, and what it says.
    "devices": (
        "samples_per_sec",
        "devices × precisions: speed, speed-up over CPU float32, accuracy, peak memory",
    ),
    "loaders": (
        "ms_per_batch",
        "this project's loader and a plain PyTorch loop's: milliseconds per batch",
    ),
    "memory": (
        "peak_mib",
        "peak by precision, activation checkpointing, accumulation, batch size",
    ),  # feature: memory
    "overhead": ("epoch_s", "what a run costs against loops written by hand"),
}
QUICK = ["--data.train_samples", "1024", "--data.val_samples", "200"]
QUICK += ["--data.source", "sample"]  # feature: mnist
# The preset of overhead, which shows best in a small network with small batches. The loops by hand do not augment.
SMALL_MLP = [
    "--model.network",
    "MLP",
    "--model.lr",
    "0.002",
    "--model.label_smoothing",
    "0",
    "--data.batch_size",
    "64",
]
SMALL_MLP += ["--data.shift_pixels", "0"]
# With these flags no preset is used: a configuration or class of the user's own may not know its flags.
BEATS_THE_PRESET = (
    "--config",
    "-c",
    "--model",
    "--model.class_path",
    "--data",
    "--data.class_path",
)
NETWORKS, PRECISIONS = ("chosen", "ResNet18"), ("32-true", "tf32", "16-mixed", "bf16-mixed")


def main(argv: list[str]) -> int:
    """Measure what ``argv`` asks for, print it, and write it where it says."""
    options = read_options(argv)
    os.environ["WANDB_MODE"] = "offline"  # a benchmark uploads nothing
    with quick_imports():
        from project.benchmark.timing import conditions, line_of

    facts = conditions()
    print(line_of(facts), flush=True)
    tables: dict[str, list[Row]] = {}
    for name in [options.table] if options.table else TABLES:
        tables[name] = measure_table(name, options)
        print(f"\n{name}: {TABLES[name][1]}\n{format_table(tables[name])}", flush=True)
        if options.output:  # after every table: a stopped pass keeps what it has
            as_json = options.output.suffix.lower() == ".json"
            lines = [
                {"table": table, **row, **flat(facts)}
                for table, rows in tables.items()
                for row in rows
            ]
            write_rows(options.output, {**facts, "tables": tables} if as_json else lines)
        if options.plot:
            draw(options.plot, tables, line_of(facts))
    return 0


def read_options(argv: list[str]) -> Namespace:
    """The benchmark's options, ``table`` (None: all) and, for ``fit``, ``fit_flags``; a UserError for bad values."""
    table, rest = take_word(argv, TABLES, switches=("--quick",))
    if table is None and argv and not argv[0].startswith("-"):
        raise UserError(
            f"TABLE must be one of {', '.join(TABLES)}, got {argv[0]}.{nearest(argv[0], TABLES)}"
        )
    tables = "\ntables:\n" + "\n".join(f"  {name}: {what}" for name, (_, what) in TABLES.items())
    parser = CommandParser(f"project.benchmark {table or ''}".strip(), (__doc__ or "") + tables)
    add = parser.add_argument
    add_output(parser)
    add_output(parser, "--plot", (".png",), "chart (default: beside --output; none without it)")
    add("--quick", action="store_true", help="tiny sizes: tries the command out, measures nothing")
    n = 5 if table else 3  # all tables together take about ten minutes
    add(
        "--n",
        type=int,
        default=n,
        metavar="N",
        help=f"measurements behind every median (default: {n})",
    )
    parser.set_defaults(
        table=table, networks=NETWORKS, precisions=PRECISIONS, batch_sizes=(), workers=(0, 2, 4)
    )
    if table == "devices":
        add("--networks", nargs="+", choices=NETWORKS, help="chosen is --model.network")
    if table in ("devices", "memory"):
        add("--precisions", nargs="+", choices=PRECISIONS)
        add(
            "--batch_sizes",
            nargs="+",
            type=int,
            metavar="B",
            help="default: some that suit the device",
        )
    if table == "loaders":
        add(
            "--workers",
            nargs="+",
            type=int,
            metavar="W",
            help="worker counts to try (default: 0 2 4)",
        )
    options, fit_flags = parser.parse_known_args(rest)
    options.fit_flags = fit_flags
    counts = {
        "n": (1, [options.n]),
        "batch_sizes": (1, options.batch_sizes),
        "workers": (0, options.workers),
    }
    for name, (least, values) in counts.items():
        require(
            (lowest := min(values, default=least)) >= least,
            f"--{name}",
            f"be at least {least}",
            lowest,
        )
    if options.output and not options.plot:
        options.plot = check_output(options.output.with_suffix(".png"), (".png",), "--plot")
    return options


def measure_table(name: str, options: Namespace) -> list[Row]:
    """The rows of one table. Typed flags of ``fit`` win over the table's preset."""
    from project.benchmark import tables
    from project.engine.cli import configure

    own = any(word.split("=")[0] in BEATS_THE_PRESET for word in options.fit_flags)
    preset = SMALL_MLP if name in ("overhead", "loaders") and not own else []
    flags = [*preset, *(QUICK if options.quick else []), *options.fit_flags]
    config = configure(flags, "project.benchmark")
    size = getattr(config.datamodule, "batch_size", 0)
    if not size:
        raise UserError(
            f"--data: the table {name} needs a batch_size, {type(config.datamodule).__name__} has none."
        )
    n = min(options.n, 2) if options.quick else options.n
    options = Namespace(**vars(options) | {"n": n, "fit_flags": flags, "batch_size": size})
    return list(getattr(tables, f"measure_{name}")(config, options))


def draw(path: Path, tables: dict[str, list[Row]], title: str) -> None:
    """The tables as one picture: a panel per table, a bar per row."""
    from matplotlib.figure import Figure

    heights = [max(1.2, 0.28 * len(rows)) for rows in tables.values()]
    figure = Figure(figsize=(10, sum(heights) + 1.1 * len(tables) + 0.5), layout="constrained")
    panels = figure.subplots(len(tables), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[
        :, 0
    ]
    for axes, (name, rows) in zip(panels, tables.items(), strict=True):
        quantity = TABLES[name][0]
        drawn = [row for row in rows if row.get(quantity) is not None]
        if not drawn:  # such as a compiled network's memory on a CPU
            continue
        before = list(drawn[0])[
            : list(drawn[0]).index(quantity)
        ]  # the columns that say what was measured
        naming = [
            key for key in before if any(row.get(key) != drawn[0][key] for row in drawn)
        ] or before[:1]
        names = [", ".join(format_cell(row.get(key)) for key in naming) for row in drawn]
        values = [row[quantity] for row in drawn]
        errors = [row[quantity] * row.get("spread_pct", 0) / 200 for row in drawn]
        axes.barh(
            range(len(drawn)),
            values,
            xerr=errors,
            tick_label=names,
            color="#4477aa",
            ecolor="#999999",
        )
        axes.invert_yaxis()
        axes.set_title(f"{name}: {quantity} by {', '.join(naming)}", loc="left", fontsize=10)
        axes.set_xscale("log" if max(values) > 50 * max(min(values), 1e-9) else "linear")
    figure.suptitle(title, fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run(main)
