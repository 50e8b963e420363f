"""List, compare and average the runs of checkpoints/.

python -m project.runs
python -m project.runs --sort val/accuracy
python -m project.runs --seeds --output seeds.csv      # mean and standard deviation over the seeds of a configuration
python -m project.runs --seeds 5 --run_name slow --model.lr 0.01   # train five first; other options are those of fit

Reads each run's summary.json, config.yaml and metrics.csv.
"""

import contextlib
import csv
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from project import tables
from project.engine.command import CommandParser, add_output
from project.errors import UserError, nearest, require

Row = dict[str, Any]
SEED = "seed_everything"
# Settings that do not tell configurations apart: where a run and its data lie
PLACES = ("run_name", "ckpt_path", "config", "trainer.default_root_dir", "data.root")
FILES = (
    "config.yaml",
    "summary.json",
    "metrics.csv",
    "last.ckpt",
)  # a run's folder has at least one of them
# Of configurations, legible on white and on black; further ones have the same colours, dashed  # feature: report
COLOURS = (
    "#4c8bf5",
    "#e8710a",
    "#1e9e5a",
    "#c2379a",
    "#8a6de9",
    "#b8860b",
    "#d93025",
    "#12a4af",
)  # feature: report
NOT_DRAWN = (
    "epoch",
    "test/",
    "throughput/",
    "memory/",
    "optimizer/",
)  # columns of metrics.csv  # feature: report


class Run:
    """What a run's folder says of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        config = {
            k: v
            for k, v in tables.flat(mapping_in(folder / "config.yaml")).items()
            if k not in PLACES
        }
        # {"model.class_path": "a.B", "model.lr": 1} as {"model.lr": 1, "model": "B"}
        kinds = {
            name: str(config.pop(name)).rpartition(".")[2]
            for name in [*config]
            if name.endswith(".class_path")
        }
        self.settings = config | {
            name.removesuffix(".class_path"): kind for name, kind in kinds.items()
        }
        self.summary = mapping_in(folder / "summary.json")
        self.state = "finished" if self.summary.get("finished") else "interrupted"
        with contextlib.suppress(OSError), open(folder / ".lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # a process holds it
                self.state = "running"
        best, numbers = (
            self.summary.get("monitor"),
            {k: v for k, v in self.summary.items() if tables.is_number(v)},
        )
        self.results = {
            name: value
            for name, value in numbers.items()
            if name == best or name.startswith("test/")
        }

    def row(self, differing: list[str]) -> Row:
        """The run as a line of the list."""
        written = max(
            path.stat().st_mtime for name in FILES if (path := self.folder / name).exists()
        )
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        settings = {name: self.settings.get(name) for name in differing}
        took = {name: self.summary.get(name) for name in ("epochs", "fit_seconds")}
        return {
            "name": self.name,
            "date": date,
            "state": self.state,
            **settings,
            **self.results,
            **took,
        }


def main(argv: list[str]) -> int:
    """List, compare or draw runs as ``argv`` says."""
    parser = CommandParser("project.runs", __doc__)
    parser.add_argument(
        "--root", type=Path, default="checkpoints", metavar="DIR", help="the folder of the runs"
    )
    parser.add_argument(
        "--sort", metavar="COLUMN", help="sort by a column, such as val/accuracy or fit_seconds"
    )
    seeds = "one line per configuration: mean and std over its seeds; with N train those first, or go on with them"
    parser.add_argument("--seeds", nargs="?", type=int, const=0, metavar="N", help=seeds)
    parser.add_argument("--run_name", metavar="NAME", help="of the N runs: NAME-1, NAME-2, ...")
    add_output(parser)
    add_output(
        parser, "--report", (".html",), "draw the runs on one page that needs no network"
    )  # feature: report
    args, fit_arguments = parser.parse_known_args(argv)
    if fit_arguments and not args.seeds:
        parser.error(f"unrecognized arguments: {' '.join(fit_arguments)}")

    names = train(args.seeds or 0, args.run_name, args.root, fit_arguments)
    folders = sorted(
        path for path in args.root.glob("*") if path.is_dir() and not path.is_symlink()
    )
    found = [folder for folder in folders if any((folder / name).exists() for name in FILES)]
    require(
        found,
        "--root",
        "hold runs",
        f"{args.root}, where there is none",
        " Train one: python -m project.fit",
    )
    runs = [Run(folder) for folder in found if not names or folder.name in names]
    settings = differing(runs)
    rows = seed_rows(runs) if args.seeds is not None else [run.row(settings) for run in runs]
    if args.sort:
        known = tables.columns_of(rows)
        require(
            args.sort in known,
            "--sort",
            f"be a column ({', '.join(known)})",
            args.sort,
            nearest(args.sort, known),
        )
        values = [
            row.get(args.sort) for row in rows
        ]  # numbers first, then text, then what is missing
        keys = [
            (0, v, "") if tables.is_number(v) else (2 if v is None else 1, 0, str(v))
            for v in values
        ]
        rows = [row for _, row in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[0])]
    print(tables.format_table(rows))
    if args.output:
        tables.write_rows(args.output, rows)
    if args.report:  # feature: report
        tables.write_atomically(render(runs), args.report)
        print(f"report in {args.report}")
    return 0


def train(seeds: int, name: str | None, root: Path, fit_arguments: list[str]) -> list[str]:
    """Train or resume a run of each seed from 1 until one fails or is stopped; returns their names."""
    if bool(seeds) != bool(name) or seeds < 0:
        raise UserError(
            "--seeds N, at least 1, and --run_name NAME go together: they train the runs NAME-1 to NAME-N."
        )
    names = [f"{name}-{seed}" for seed in range(1, seeds + 1)]
    for seed, each in enumerate(names, 1):
        own = {
            "run_name": each,
            "seed_everything": seed,
            "default_root_dir": root,
            "ckpt_path": "auto",
        }
        words = [
            sys.executable,
            "-m",
            f"{__package__}.fit",
            *fit_arguments,
            *(f"--{key}={own[key]}" for key in own),
        ]
        process = subprocess.Popen(words, env={"WANDB_RUN_GROUP": str(name), **os.environ})
        try:
            if code := process.wait():
                raise SystemExit(code)
        finally:
            process.terminate()  # a clean stop, where this process is stopped
            process.wait()
    return names


def mapping_in(path: Path) -> Row:
    """A YAML or JSON file's mapping; empty where the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tables.load_yaml(text)
        return content if isinstance(content, dict) else {}
    return {}


def differing(runs: list[Run]) -> list[str]:
    """Names of the settings that are not the same in all runs."""
    names = tables.columns_of([run.settings for run in runs])
    return [
        name
        for name in names
        if any(run.settings.get(name) != runs[0].settings.get(name) for run in runs)
    ]


def by_configuration(runs: list[Run]) -> list[tuple[Row, list[Run]]]:
    """Groups of runs that differ only in the seed and the run's place, each with its settings that others have not."""
    names = [name for name in differing(runs) if name != SEED]
    groups: dict[str, tuple[Row, list[Run]]] = {}
    for run in runs:
        settings = {name: run.settings.get(name) for name in names}
        groups.setdefault(json.dumps(settings, default=str), (settings, []))[1].append(run)
    return list(groups.values())


def seed_rows(runs: list[Run]) -> list[Row]:
    """One row per configuration: its runs; means and standard deviations (of a sample) over the finished ones."""
    rows = []
    for settings, group in by_configuration(runs):
        done = [run for run in group if run.state == "finished"]
        row = {"runs": " ".join(run.name for run in group), "finished": len(done), **settings}
        finished: list[Row] = [
            {**run.results, "fit_seconds": run.summary.get("fit_seconds")} for run in done
        ]
        for metric in tables.columns_of(finished):
            values = [found[metric] for found in finished if tables.is_number(found.get(metric))]
            spread = statistics.stdev(values) if len(values) > 1 else None
            row |= {metric: statistics.fmean(values), f"{metric} std": spread} if values else {}
        rows.append(row)
    return rows


def render(runs: list[Run]) -> str:  # feature: report
    """The page that compares runs: tables, and a chart per metric with a line per run, coloured by configuration."""
    from project.engine.summary import Series, read_series
    from project.report import draw, fill_page

    names = differing(runs)
    lines: list[
        tuple[Run, dict[str, str], dict[str, Series]]
    ] = []  # a run, its colour and dashes, its curves
    for index, (_, group) in enumerate(by_configuration(runs)):
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "linestyle": ("-", "--", ":")[index // len(COLOURS) % 3],
        }
        for run in group:
            curves: dict[str, Series] = {}
            with contextlib.suppress(
                OSError, ArithmeticError, ValueError, KeyError, TypeError, csv.Error
            ):  # damaged
                curves = read_series(run.folder / "metrics.csv", int(run.summary.get("epochs", 0)))
            lines.append((run, style, curves))

    def paint(ax: Any, metric: str) -> None:
        for _, style, curves in lines:
            if series := curves.get(metric):
                marker = (
                    "o" if len(series) < 2 else None
                )  # a single value would not be seen as a line
                ax.plot(*zip(*series, strict=True), **style, marker=marker, linewidth=1.1)
        ax.set_xlabel("optimizer step")

    logged = {
        metric for *_, curves in lines for metric in curves if not metric.startswith(NOT_DRAWN)
    }
    charts = [(name, draw(f"chart {n}", paint, name)) for n, name in enumerate(sorted(logged))]
    tests = [
        {"name": run.name, **{k: v for k, v in run.results.items() if k[:5] == "test/"}}
        for run in runs
    ]
    settings = [{"": name, **{run.name: run.settings.get(name) for run in runs}} for name in names]
    shown = {
        "Runs": [run.row(names) for run in runs],
        "Mean and standard deviation over seeds": seed_rows(runs),
    }
    shown |= {"Settings that differ": settings, "Test results": tests}
    facts = {
        "tables": shown,
        "lines": lines,
        "charts": charts,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    # every text of a run is escaped; the charts, which are not, hold only numbers
    return fill_page("runs.html.j2", **facts, columns=tables.columns_of, cell=tables.format_cell)


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
