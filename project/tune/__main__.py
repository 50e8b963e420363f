"""Find a learning rate or a batch size for this machine, by short real trainings that touch no run.

python -m project.tune lr
python -m project.tune batch_size --precision bf16-mixed --output sizes.csv
python -m project.tune batch_size --model.network MLP --memory_limit_gib 2     # as if the device had no more

Takes the flags of project.fit (--config, --model.*, --data.*, --precision, --accelerator ...), see its --help.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from project.engine.command import CommandParser, add_output, quick_imports, run, take_word
from project.errors import UserError, nearest
from project.tables import check_output, format_table, write_rows

if TYPE_CHECKING:
    from project.engine.cli import Configuration

WHAT = ("lr", "batch_size")


def main(argv: list[str]) -> int:
    """Tune as ``argv`` says; returns the exit code."""
    what, rest = take_word(argv, WHAT)
    options, fit_flags = make_parser().parse_known_args([what, *rest] if what else argv)
    if options.what not in WHAT:
        raise UserError(f"tune what? {' or '.join(WHAT)}, got {options.what}.{nearest(str(options.what), WHAT)}")
    check_numbers(options)
    output = check_output(options.output) if options.output else None
    plot = check_output(options.plot or f"tune_{options.what}.png", (".png",), "--plot")
    refuse_misspelt(list(vars(options)), fit_flags)
    with quick_imports():
        from project.engine.cli import configure
    config = configure(fit_flags, "project.tune")
    flags = one_device_flags(config)
    if options.what == "lr":
        rows, facts = tune_lr(config, flags, options, plot)
    else:
        rows, facts = tune_batch_size(config, flags, options, plot, fit_flags)
    if output:
        write_rows(output, facts if output.suffix.lower() == ".json" else rows)
    print(f"picture in {plot}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The options that are not ``fit``'s."""
    parser = CommandParser("project.tune", __doc__)
    parser.add_argument("what", metavar="lr|batch_size", help="what to find")
    add_output(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="the picture (default: tune_lr.png or tune_batch_size.png)")
    lr, size = parser.add_argument_group("lr"), parser.add_argument_group("batch_size")
    lr.add_argument("--min_lr", type=float, default=1e-6, help="first learning rate (default: 1e-6)")
    lr.add_argument("--max_lr", type=float, default=1.0, help="last learning rate (default: 1)")
    lr.add_argument("--steps", type=int, default=200, help="optimizer steps between them (default: 200)")
    size.add_argument("--max_batch_size", type=int, help="largest size to try (default: the training set)")
    limit = "device memory to stay within (default: all of a GPU's, 60 %% of free RAM)"
    size.add_argument("--memory_limit_gib", type=float, help=limit)
    limit = "try no size whose step takes longer (default: 2)"
    size.add_argument("--max_step_seconds", type=float, default=2.0, help=limit)
    return parser


def check_numbers(options: argparse.Namespace) -> None:
    """Raise a :class:`UserError` for a number that measures nothing."""
    for name in ("min_lr", "max_lr", "max_batch_size", "memory_limit_gib", "max_step_seconds"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name} must be above 0, got {value}.")
    if options.min_lr >= options.max_lr:
        raise UserError(f"--min_lr must be below --max_lr ({options.max_lr:g}), got {options.min_lr:g}.")
    if options.steps < 20:
        raise UserError(f"--steps must be at least 20, got {options.steps}. Fewer make no curve.")


def refuse_misspelt(ours: list[str], fit_flags: list[str]) -> None:
    """Raise a :class:`UserError` for a misspelt option of tune's own; ``fit``'s parser would not know it."""
    for word in fit_flags:
        name = word.split("=")[0]
        close = difflib.get_close_matches(name, [f"--{option}" for option in ours], n=1, cutoff=0.85)
        if close and name != "--max_steps":  # a Trainer flag
            raise UserError(f"unknown option {name}. Did you mean {close[0]}? See --help.")


def one_device_flags(config: Configuration) -> dict[str, Any]:
    """The Trainer's arguments for one process on one device.

    Raises:
        UserError: Several devices or processes were asked for, or the module steps its optimizers itself.
    """
    from project.engine.ranks import launched_world
    from project.engine.trainer import trainer_flags

    asked = config.trainer
    devices, nodes, strategy = str(asked["devices"]), asked["num_nodes"], asked["strategy"]
    is_one = re.fullmatch(r"auto|-1|1|\d+,|\[\d+\]", devices)  # 2, and [2] name a device by its index
    if not is_one or nodes > 1 or strategy != "auto" or launched_world()[1] > 1:
        raise UserError(
            "tune measures one process on one device, and what it finds is per device: leave --devices, --num_nodes, "
            f"--strategy, torchrun and srun away, got --devices {devices} --num_nodes {nodes} --strategy {strategy}."
        )
    if not config.module.automatic_optimization:
        name = type(config.module).__name__
        raise UserError(f"tune needs Lightning's automatic optimization, and {name} steps its optimizers itself.")
    if devices in ("auto", "-1"):
        asked["devices"] = 1
    return trainer_flags(config)


def tune_lr(config: Configuration, flags: dict[str, Any], options: Any, plot: Path) -> tuple[list[Any], dict[str, Any]]:
    """Find a learning rate. Returns the rows of the curve, and all facts."""
    from project.tune.learning_rate import advice_lines, draw_range_test, range_test

    tell(f"training {options.steps} steps at rates from {options.min_lr:g} to {options.max_lr:g}\n")
    test = range_test(config, flags, options.min_lr, options.max_lr, options.steps)
    rows = test.rows()
    print(format_table(rows[:: max(1, len(rows) // 20)]))
    is_flag = "lr" in (config.resolved["model"].get("init_args") or {})
    print("\n" + "\n".join(advice_lines(test, "--model.lr" if is_flag else "learning rate")))
    draw_range_test(plot, test, title(config, flags))
    return rows, {"suggested_lr": test.suggestion, "lowest_loss_lr": test.lowest, "curve": rows}


def tune_batch_size(
    config: Configuration, flags: dict[str, Any], options: Any, plot: Path, fit_flags: list[str]
) -> tuple[list[Any], dict[str, Any]]:
    """Find batch sizes. Returns a row per size, and all facts."""
    from project.tune import batch_size as sizes
    from project.tune.short_training import TrainingSteps

    present = getattr(config.datamodule, "batch_size", None)
    if not isinstance(present, int):
        raise UserError("tune batch_size needs a data module whose loader follows an attribute batch_size.")
    steps = TrainingSteps(config, flags, options.memory_limit_gib)
    search, measured = sizes.find_and_time(steps, options.max_batch_size, options.max_step_seconds, tell)
    advice = sizes.advise(measured, present)
    rows = sizes.table_rows(measured, advice)
    print(format_table(rows))
    tune_lr = shlex.join(["python", "-m", "project.tune", "lr", *fit_flags, "--data.batch_size"])
    print("\n" + "\n".join(sizes.advice_lines(search, advice, present, tune_lr)))
    sizes.draw_batch_sizes(plot, measured, search, advice, title(config, flags))
    return rows, {
        "largest_batch_size": search.largest,
        "limited_by": search.limited_by,
        "best_throughput_batch_size": advice.best.batch_size,
        "enough_batch_size": advice.enough.batch_size,
        "recommended_batch_size": advice.use.batch_size if advice.use else None,
        "sizes": rows,
    }


def tell(text: str) -> None:
    """Progress, on stderr: one line that is overwritten on a terminal, lines in a log file."""
    on_terminal = sys.stderr.isatty()
    print(f"\r\x1b[K{text}" if on_terminal else text, end="" if on_terminal else "\n", file=sys.stderr, flush=True)


def title(config: Configuration, flags: dict[str, Any]) -> str:
    """Network, optimizer, precision and device in one line, for a picture."""
    from project.hardware import accelerators, cpu

    on_cpu = flags["accelerator"] == "cpu" or not (rows := accelerators())
    device = f"{cpu()['name']}, {cpu()['cores']} cores" if on_cpu else rows[0]["name"]
    network = type(getattr(config.module, "network", config.module)).__name__
    optimizer = config.module.hparams.get("optimizer")
    parts = [network, optimizer if isinstance(optimizer, str) else None, flags["precision"] or "32-true"]
    return f"{', '.join(part for part in parts if part)} on {device}"


if __name__ == "__main__":
    run(main)
