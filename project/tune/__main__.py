"""Find a learning rate or a batch size for this machine, by short trainings that leave no run behind.

python -m project.tune lr
python -m project.tune batch_size --precision bf16-mixed --output sizes.csv
python -m project.tune batch_size --model.network MLP --memory_limit_gib 2     # as if the device had no more

Takes the flags of project.fit (--config, --model.*, --data.*, --precision, --accelerator ...), see its --help.
"""

import difflib
import math

from project.engine.command import CommandParser, add_output, quick_imports, run, take_word
from project.errors import UserError, nearest, require
from project.tables import check_output, write_rows

WHAT = ("lr", "batch_size")


def main(argv: list[str]) -> int:
    """Tune as ``argv`` says; returns the exit code."""
    parser = CommandParser("project.tune", __doc__)
    parser.add_argument("what", metavar="lr|batch_size", help="what to find")
    add_output(parser)
    add_output(
        parser, "--plot", (".png",), "the picture (default: tune_lr.png or tune_batch_size.png)"
    )
    add = parser.add_argument_group("lr").add_argument
    add("--min_lr", type=float, default=1e-6, help="first learning rate (default: 1e-6)")
    add("--max_lr", type=float, default=1.0, help="last learning rate (default: 1)")
    add("--steps", type=int, default=200, help="optimizer steps between them (default: 200)")
    add = parser.add_argument_group("batch_size").add_argument
    add("--max_batch_size", type=int, help="largest size to try (default: the training set)")
    add(
        "--memory_limit_gib",
        type=float,
        help="memory to stay within (default: all of a GPU's, 60 %% of free RAM)",
    )
    add(
        "--max_step_seconds",
        type=float,
        default=2.0,
        help="try no size whose step takes longer (default: 2)",
    )
    what, rest = take_word(argv, WHAT)
    options, fit_flags = parser.parse_known_args([what, *rest] if what else argv)
    if options.what not in WHAT:
        raise UserError(
            f"tune what? {' or '.join(WHAT)}, got {options.what}.{nearest(str(options.what), WHAT)}"
        )
    for name in ("min_lr", "max_lr", "max_batch_size", "memory_limit_gib", "max_step_seconds"):
        value = getattr(options, name)
        require(value is None or 0 < value < math.inf, f"--{name}", "be above 0", value)
    require(
        options.min_lr < options.max_lr,
        "--min_lr",
        f"be below --max_lr ({options.max_lr:g})",
        options.min_lr,
    )
    require(
        options.steps >= 20, "--steps", "be at least 20", f"{options.steps} (fewer make no curve)"
    )
    for name in (
        word.split("=")[0] for word in fit_flags
    ):  # a misspelt option, which fit would not know
        close = difflib.get_close_matches(
            name, [f"--{option}" for option in vars(options)], n=1, cutoff=0.85
        )
        if close and name != "--max_steps":  # a Trainer flag
            raise UserError(f"unknown option {name}. Did you mean {close[0]}? See --help.")
    options.plot = options.plot or check_output(f"tune_{options.what}.png", (".png",), "--plot")
    options.fit_flags = fit_flags  # repeated in the advice
    with quick_imports():
        from project.engine.cli import configure
        from project.tune.short_trainings import one_device_flags, tune_batch_size, tune_lr
    config = configure(fit_flags, "project.tune")
    tune = tune_lr if options.what == "lr" else tune_batch_size
    rows, facts = tune(config, one_device_flags(config), options)
    if options.output:
        write_rows(options.output, facts if options.output.suffix.lower() == ".json" else rows)
    print(f"picture in {options.plot}")
    return 0


if __name__ == "__main__":
    run(main)
