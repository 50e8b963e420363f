"""List, compare and average the runs of checkpoints/.

python -m NAME.runs
python -m NAME.runs --sort val/accuracy
python -m NAME.runs --compare mine other            # side by side, and where they part
python -m NAME.runs --settings                      # every column, however wide
python -m NAME.runs --root s3://bucket/runs         # those of a mirror
python -m NAME.runs --seeds --output seeds.csv      # mean and standard deviation over seeds
python -m NAME.runs --seeds 5 --run_name slow --model.lr 0.01   # trains five of them first

Reads each run's summary.json, config.yaml, metrics.csv and digests.csv. The terminal shows what
fits: for each module its runs with their results and the settings by which they differ. With
--seeds N, options that are not named here are those of fit.
"""

import argparse
import shutil
import sys
from pathlib import Path

from unbroken.cli.parser import CommandParser, add_output
from unbroken.commands.runs.chains import compared
from unbroken.commands.runs.listing import (
    by_module,
    cut,
    differing,
    fitted,
    full_name,
    shown_settings,
    side_by_side,
    sort_rows,
)
from unbroken.commands.runs.saved_run import SavedRun, find_runs
from unbroken.commands.runs.seeds import seed_rows, train_seeds
from unbroken.errors import nearest, require
from unbroken.mirror.store import is_address
from unbroken.mirror.visiting import fetch_runs
from unbroken.tables import Row, columns_of, format_table, printable, write_atomically, write_rows

# Names of columns in an error, and lines on what is not shown
MOST_COLUMNS_NAMED = 100
MOST_LEFT_OUT = 10


def main(package: str, argv: list[str]) -> int:
    """List, compare or draw runs as ``argv`` says."""
    args, fit_arguments = parse(package, argv)
    names = train_seeds(package, args.seeds or 0, args.run_name, args.root, fit_arguments)
    runs = find_runs(local_root(args.root))
    require(
        runs,
        "--root",
        "hold runs",
        f"{args.root}, where there is none",
        f" Train one: python -m {package}.fit",
    )
    if names:
        runs = [each for each in runs if each.name in names]
    if args.compare:
        code = compare(runs, args)
        print_what_is_left_out(runs)
        return code
    rows = rows_of(runs, args)
    if args.sort:
        known = columns_of(rows)
        args.sort = full_name(args.sort, known)
        more = ", ..." if len(known) > MOST_COLUMNS_NAMED else ""
        must = f"be a column ({', '.join(known[:MOST_COLUMNS_NAMED])}{more})"
        require(args.sort in known, "--sort", must, args.sort, nearest(args.sort, known))
        rows = sort_rows(rows, args.sort)
    print_tables(runs, args)
    if args.output:
        write_rows(args.output, rows)
    if args.report:
        from unbroken.commands.runs.page import render

        write_atomically(render(runs), args.report)
        print(f"report in {args.report}")
    print_what_is_left_out(runs)
    return 0


def print_what_is_left_out(runs: list[SavedRun]) -> None:
    """Say which files of runs were not read, and what else is not shown."""
    lines = [printable(line) for run in runs for line in run.left_out]
    for line in lines[:MOST_LEFT_OUT]:
        print(line, file=sys.stderr)
    if len(lines) > MOST_LEFT_OUT:
        print(f"and {len(lines) - MOST_LEFT_OUT:,} more such lines", file=sys.stderr)


def compare(runs: list[SavedRun], args: argparse.Namespace) -> int:
    """Print the named runs side by side: by what they differ, and what came out; and in which
    window the training of each parts from that of the first.
    """
    by_name = {each.name: each for each in runs}
    for name in args.compare:
        hint = nearest(name, by_name)
        require(name in by_name, "--compare", "name runs", name, hint)
    rows = side_by_side([by_name[name] for name in dict.fromkeys(args.compare)])
    print(format_table([{name: cut(name, row[name]) for name in row} for row in rows]))
    first, *others = [by_name[name] for name in dict.fromkeys(args.compare)]
    for other in others:
        print(printable(compared(first, other)))
    if args.output:
        write_rows(args.output, rows)
    return 0


def parse(package: str, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of the command line, and those that are left for fit."""
    parser = CommandParser(package, "runs", __doc__)
    parser.add_argument(
        "--root",
        default="checkpoints",
        metavar="DIR|URL",
        help="the folder of the runs, or the address of a mirror",
    )
    parser.add_argument(
        "--sort", metavar="COLUMN", help="sort by a column, such as val/accuracy or fit_seconds"
    )
    parser.add_argument("--compare", nargs="+", metavar="NAME", help="show these runs side by side")
    parser.add_argument(
        "--settings", action="store_true", help="show every column, not only those that fit"
    )
    parser.add_argument(
        "--seeds",
        nargs="?",
        type=int,
        const=0,
        metavar="N",
        help="one line per configuration: mean and std over its seeds; "
        "with N train those first, or go on with them",
    )
    parser.add_argument("--run_name", metavar="NAME", help="of the N runs: NAME-1, NAME-2, ...")
    add_output(parser, what="also write every column: .json or .csv")
    add_output(parser, "--report", (".html",), "draw the runs on one page that needs no network")
    args, fit_arguments = parser.parse_known_args(argv)
    if fit_arguments and not args.seeds:
        parser.error(f"unrecognized arguments: {' '.join(fit_arguments)}")
    return args, fit_arguments


def local_root(root: str) -> Path:
    """The folder of the runs. Of a mirror, what is shown of its runs is brought here first."""
    if not is_address(root):
        return Path(root)
    return fetch_runs(root)


def rows_of(runs: list[SavedRun], args: argparse.Namespace) -> list[Row]:
    """A row for each run, or with ``--seeds`` for each configuration, with every column."""
    if args.seeds is not None:
        return seed_rows(runs)
    settings = shown_settings(runs, differing(runs))
    return [each.row(shown) for each, shown in zip(runs, settings, strict=True)]


def print_tables(runs: list[SavedRun], args: argparse.Namespace) -> None:
    """Print a table for each module: runs of different tasks share hardly a column."""
    width = shutil.get_terminal_size().columns
    groups = by_module(runs)
    hidden = 0
    for place, (module, group) in enumerate(groups.items()):
        if len(groups) > 1:
            print(("\n" if place else "") + printable(module))
        rows = rows_of(group, args)
        if args.sort:
            rows = sort_rows(rows, args.sort)
        # By these columns the runs are judged, and were sorted.
        first = columns_of([run.results for run in group])[:1]
        if args.sort:
            first.append(args.sort)
        shown = rows if args.settings else fitted(rows, width, first)
        hidden += len(columns_of(rows)) - len(columns_of(shown))
        print(format_table(shown))
    if hidden:
        columns = "column does" if hidden == 1 else "columns do"
        print(f"({hidden} more {columns} not fit: --settings, or --output FILE)")
