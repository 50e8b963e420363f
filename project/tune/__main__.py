"""Find a learning rate or a batch size for this machine, by short real trainings that touch no run.

python -m project.tune lr
python -m project.tune batch_size --precision bf16-mixed --output sizes.csv
python -m project.tune batch_size --model.network MLP --memory_limit_gib 2     # as if the device had no more

Takes the flags of project.fit (--config, --model.*, --data.*, --precision, --accelerator ...), see its --help.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from project.engine.cli import ProjectCLI


WHAT = ("lr", "batch_size")


def main(argv: list[str]) -> int:
    """Tune as ``argv`` says; returns the exit code."""
    from project.engine.command import quick_imports, take_word
    from project.errors import UserError, nearest
    from project.tables import check_output

    parser = make_parser()
    what, rest = take_word(argv, WHAT)
    options, fit_flags = parser.parse_known_args([what, *rest] if what else argv)
    if options.what not in WHAT:
        raise UserError(f"tune what? {' or '.join(WHAT)}, got {options.what}.{nearest(str(options.what), WHAT)}")
    check_numbers(options)
    output = check_output(options.output) if options.output else None
    plot = check_output(options.plot or f"tune_{options.what}.png", (".png",), "--plot")
    refuse_unknown(parser, fit_flags)

    with quick_imports():
        from project.engine.cli import ProjectCLI

    cli = ProjectCLI(fit_flags, "project.tune")
    flags = one_device_flags(cli)
    run = tune_lr if options.what == "lr" else tune_batch_size
    return run(cli, flags, options, output, plot)


def make_parser() -> argparse.ArgumentParser:
    """The options that are not ``fit``'s."""
    from project.engine.command import CommandParser, add_output

    parser = CommandParser("project.tune", __doc__)
    parser.add_argument("what", metavar="lr|batch_size", help="what to find")
    add_output(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="the picture (default: tune_lr.png or tune_batch_size.png)")
    lr, size = parser.add_argument_group("lr"), parser.add_argument_group("batch_size")
    lr.add_argument("--min_lr", type=float, default=1e-6, help="first learning rate (default: 1e-6)")
    lr.add_argument("--max_lr", type=float, default=1.0, help="last learning rate (default: 1)")
    lr.add_argument("--steps", type=int, default=200, help="optimizer steps between them (default: 200)")
    size.add_argument("--max_batch_size", type=int, help="largest size to try (default: the training set)")
    size.add_argument(
        "--memory_limit_gib",
        type=float,
        help="device memory to stay within (default: all of a GPU's, 60 %% of free RAM)",
    )
    size.add_argument(
        "--max_step_seconds", type=float, default=2.0, help="try no size whose step takes longer (default: 2)"
    )
    return parser


def check_numbers(options: argparse.Namespace) -> None:
    """Raise a :class:`UserError` for a number that measures nothing."""
    from project.errors import UserError

    for name in ("min_lr", "max_lr", "max_batch_size", "memory_limit_gib", "max_step_seconds"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be above 0, got {value}.")
    if options.min_lr >= options.max_lr:
        raise UserError(f"--min_lr must be below --max_lr ({options.max_lr:g}), got {options.min_lr:g}.")
    if options.steps < 20:
        raise UserError(f"--steps must be at least 20, got {options.steps}. Fewer make no curve.")


def refuse_unknown(parser: argparse.ArgumentParser, fit_flags: list[str]) -> None:
    """Raise a :class:`UserError` for an option that is one of tune's misspelt; ``fit``'s parser would not know it."""
    import difflib

    from project.errors import UserError

    ours = [option for option in parser._option_string_actions if option.startswith("--")]
    for word in fit_flags:
        name = word.split("=")[0]
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.85) if name.startswith("--") else []
        if close and name != "--max_steps":  # a Trainer flag
            raise UserError(f"unknown option {name}. Did you mean {close[0]}? See --help.")


def one_device_flags(cli: ProjectCLI) -> dict[str, Any]:
    """The Trainer's arguments for one process on one device.

    Raises:
        UserError: Several devices, machines or processes were asked for.
    """
    from project.engine.ranks import launched_world
    from project.engine.trainer import trainer_flags
    from project.errors import UserError

    alone = "tune measures one process on one device; the size it finds is per device."
    if launched_world()[1] > 1:
        raise UserError(f"{alone} Start it without torchrun or srun, then fit with what it found.")
    asked = cli.config_init.trainer
    several = (asked.devices not in ("auto", "1", 1, -1, "-1")) and not _is_one_device(asked.devices)
    if several:
        raise UserError(f"--devices must be 1, got {asked.devices}: {alone}")
    if asked.num_nodes > 1:
        raise UserError(f"--num_nodes must be 1, got {asked.num_nodes}: {alone}")
    if asked.strategy != "auto":
        raise UserError(f"--strategy must be left away, got {asked.strategy}: {alone}")
    if not _is_one_device(asked.devices):
        asked.devices = 1
    return trainer_flags(cli)


def _is_one_device(devices: Any) -> bool:
    """Whether ``--devices`` names a single device by its index: ``[2]``, ``2,``."""
    words = [str(word) for word in devices] if isinstance(devices, (list, tuple)) else str(devices).split(",")
    listed = isinstance(devices, (list, tuple)) or "," in str(devices)
    return listed and len([word for word in words if word.strip()]) == 1


def tune_lr(cli: ProjectCLI, flags: dict[str, Any], options: Any, output: Path | None, plot: Path) -> int:
    """The learning-rate finder."""
    from project.tables import format_table, write_rows
    from project.tune.learning_rate import advice_lines, draw_range_test, range_test

    current = float(cli.model.lr)
    tell(f"training {options.steps} steps at rates from {options.min_lr:g} to {options.max_lr:g}")
    test = range_test(cli, flags, options.min_lr, options.max_lr, options.steps)
    rows = test.rows()
    print(format_table(rows[:: max(1, len(rows) // 20)]))
    print("\n" + "\n".join(advice_lines(test, current)))
    draw_range_test(plot, test, current, describe(cli, flags))
    if output:
        facts = {"suggested_lr": test.suggestion, "lowest_loss_lr": test.lowest, "curve": rows}
        write_rows(output, facts if output.suffix.lower() == ".json" else rows)
    print(f"curve in {plot}")
    return 0


def tune_batch_size(cli: ProjectCLI, flags: dict[str, Any], options: Any, output: Path | None, plot: Path) -> int:
    """The batch-size finder, then the sweep over the sizes that fit."""
    from project.tables import format_table, write_rows
    from project.tune.batch_size import advice_lines, draw_batch_sizes, find_and_sweep, table_rows

    current = cli.datamodule.batch_size
    search, measured, advice = find_and_sweep(
        cli, flags, options.max_batch_size, options.memory_limit_gib, options.max_step_seconds, tell
    )
    rows = table_rows(measured, advice)
    print(format_table(rows))
    print("\n" + "\n".join(advice_lines(search, advice, current, cli.datamodule.num_samples("train"))))
    draw_batch_sizes(plot, measured, search, advice, describe(cli, flags))
    if output:
        facts = {
            "largest_batch_size": search.largest,
            "limited_by": search.limited_by,
            "best_throughput_batch_size": advice.best,
            "enough_batch_size": advice.enough,
            "sizes": rows,
        }
        write_rows(output, facts if output.suffix.lower() == ".json" else rows)
    print(f"picture in {plot}")
    return 0


def tell(text: str) -> None:
    """Progress, on stderr: one line that is overwritten on a terminal, lines in a log file."""
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr)
    sys.stderr.flush()


def describe(cli: ProjectCLI, flags: dict[str, Any]) -> str:
    """Network, optimizer, precision and device in one line, for a picture's title."""
    from project.hardware import accelerators, cpu

    on_cpu = flags["accelerator"] == "cpu" or not (rows := accelerators())
    facts = cpu()
    device = f"{facts['name']}, {facts['cores']} cores" if on_cpu else rows[0]["name"]
    network = type(cli.model.network).__name__
    return f"{network}, {cli.model.hparams.get('optimizer')}, {flags['precision'] or '32-true'} on {device}"


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
