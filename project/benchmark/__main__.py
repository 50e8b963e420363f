"""This machine's tables: devices, loaders, memory, overhead, threads, accuracy. Without a name: all of them.

python -m project.benchmark
python -m project.benchmark devices --output devices.json
python -m project.benchmark overhead --model.network MLP --data.batch_size 64
python -m project.benchmark accuracy --config configs/fast.yaml --n 10 --baseline
Flags of project.fit (--data.*, --model.*, --config, Trainer flags) say what is measured.
"""

from __future__ import annotations

import os
from typing import Any


def main(argv: list[str]) -> int:
    """Measure what ``argv`` asks for, print it, and write it where it says."""
    from project.benchmark.flags import TABLES, Settings

    table, options, fit_flags = read_options(argv)
    output, plot = files_to_write(options)
    typed = {k: v for k, v in vars(options).items() if k not in ("output", "plot") and v is not None}
    check(Settings(**typed))
    # the libraries' own remarks on every start and end of a profiler; read when torch is imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from project.benchmark.conditions import conditions, one_line
    from project.benchmark.measure import measure_table
    from project.tables import format_table

    facts = conditions()
    print(one_line(facts), flush=True)
    tables: dict[str, list[dict[str, Any]]] = {}
    for name in [table] if table else TABLES:
        tables[name] = measure_table(name, fit_flags, typed, whole_pass=table is None)
        print(f"\n{name}: {TABLES[name]}\n{format_table(tables[name])}", flush=True)
        save(output, plot, facts, tables)  # after every table: a stopped pass keeps what it has
    return 0


def read_options(argv: list[str]) -> tuple[str | None, Any, list[str]]:
    """The table's name or None, the benchmark's own options, and the rest, which are flags of ``fit``."""
    from project.benchmark.flags import TABLES, add_options
    from project.engine.command import CommandParser, take_word
    from project.errors import UserError, nearest

    table, rest = take_word(argv, TABLES, switches=("--quick", "--baseline"))
    parser = CommandParser(f"project.benchmark{f' {table}' if table else ''}", __doc__)
    add_options(parser, table)
    if table is None and argv and not argv[0].startswith("-"):
        raise UserError(f"TABLE must be one of {', '.join(TABLES)}, got {argv[0]}.{nearest(argv[0], TABLES)}")
    known, fit_flags = parser.parse_known_args(rest)
    return table, known, fit_flags


def files_to_write(options: Any) -> tuple[Any, Any]:
    """``--output`` and ``--plot``, checked before any work; the chart lies beside the output unless named."""
    from project.tables import check_output

    output = check_output(options.output) if options.output else None
    if options.plot:
        return output, check_output(options.plot, (".png",), "--plot")
    return output, check_output(output.with_suffix(".png"), (".png",), "--plot") if output else None


def check(settings: Any) -> None:
    """Refuse counts that measure nothing."""
    from project.errors import UserError

    for name, least in (("n", 1), ("batch_sizes", 1), ("workers", 0)):
        values = getattr(settings, name)
        for value in values if isinstance(values, list) else [values]:
            if value < least:
                raise UserError(f"--{name} must be at least {least}, got {value}.")
    if not 0 < settings.target < 1:
        raise UserError(f"--target must be above 0 and below 1, got {settings.target}. 0.99 is 99 %.")


def save(output: Any, plot: Any, facts: dict[str, Any], tables: dict[str, list[dict[str, Any]]]) -> None:
    """JSON: the conditions once and every table. CSV: every row with its conditions. And the chart."""
    from project.tables import write_rows

    if output is not None and output.suffix.lower() == ".json":
        write_rows(output, {**facts, "tables": tables})
    elif output is not None:
        shared = {key: value for key, value in facts.items() if key not in ("hardware", "versions")}
        shared |= facts["hardware"] | {f"version_{name}": version for name, version in facts["versions"].items()}
        write_rows(output, [{"table": name, **row, **shared} for name, rows in tables.items() for row in rows])
    if plot is not None:
        from project.benchmark.chart import draw

        draw(plot, tables, facts)


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
