"""Find a learning rate or a batch size for this machine, by short trainings that leave no run.

python -m NAME.tune lr
python -m NAME.tune batch_size --precision bf16-mixed --output sizes.csv
python -m NAME.tune batch_size --model.network MLP --memory_limit_gib 2

The last line searches as if the device had no more memory than 2 GiB. The command takes the flags
of NAME.fit (--config, --model.*, --data.*, --precision, --accelerator ...), see its --help.
"""

import difflib
import math
from argparse import Namespace
from collections.abc import Sequence

from unbroken.cli.parser import CommandParser, add_output, take_word
from unbroken.cli.start import quick_imports
from unbroken.errors import UserError, nearest, require
from unbroken.tables import MARK_OF_PICTURE, check_output, refuse_file_of_others, write_rows

WHAT = ("lr", "batch_size")
ABOVE_ZERO = ("min_lr", "max_lr", "max_batch_size", "memory_limit_gib", "max_step_seconds")
# A range test with fewer steps makes no curve.
FEWEST_STEPS = 20


def main(package: str, argv: list[str]) -> int:
    """Tune as ``argv`` says; returns the exit code."""
    options = read_options(package, argv)
    with quick_imports():
        from unbroken.cli.cli import configure
        from unbroken.commands.program_of import program_of
        from unbroken.commands.tune.batch_size import tune_batch_size
        from unbroken.commands.tune.learning_rate import tune_lr
        from unbroken.commands.tune.short_training import one_device_flags
    config = configure(program_of(package), "tune", options.fit_flags)
    flags = one_device_flags(config)
    if options.what == "lr":
        rows, facts = tune_lr(config, flags, options)
    else:
        rows, facts = tune_batch_size(config, flags, options)
    if options.output:
        is_json = options.output.suffix.lower() == ".json"
        write_rows(options.output, facts if is_json else rows)
    print(f"picture in {options.plot}")
    return 0


def make_parser(package: str) -> CommandParser:
    """The options of both searches."""
    parser = CommandParser(package, "tune", __doc__)
    parser.add_argument("what", metavar="lr|batch_size", help="what to find")
    add_output(parser)
    default = "the picture (default: tune_lr.png or tune_batch_size.png)"
    add_output(parser, "--plot", (".png",), default)
    add = parser.add_argument_group("lr").add_argument
    add("--min_lr", type=float, default=1e-6, help="first learning rate (default: 1e-6)")
    add("--max_lr", type=float, default=1.0, help="last learning rate (default: 1)")
    add("--steps", type=int, default=200, help="optimizer steps between them (default: 200)")
    add = parser.add_argument_group("batch_size").add_argument
    add("--max_batch_size", type=int, help="largest size to try (default: the training set)")
    # argparse reads %% as one percent sign.
    memory = "memory to stay within (default: all of a GPU's, 60 %% of free RAM)"
    add("--memory_limit_gib", type=float, help=memory)
    seconds = "try no size whose step takes longer (default: 2)"
    add("--max_step_seconds", type=float, default=2.0, help=seconds)
    return parser


def read_options(package: str, argv: list[str]) -> Namespace:
    """The options of ``argv``, with those of ``fit`` in ``fit_flags``; a UserError for bad
    values.
    """
    parser = make_parser(package)
    what, rest = take_word(argv, WHAT)
    # The word may stand anywhere among the flags.
    words = [what, *rest] if what else argv
    options, fit_flags = parser.parse_known_args(words)
    if options.what not in WHAT:
        hint = nearest(str(options.what), WHAT)
        raise UserError(f"tune what? {' or '.join(WHAT)}, got {options.what}.{hint}")
    check_values(options)
    check_spelling(fit_flags, options)
    if not options.plot:
        options.plot = check_output(f"tune_{options.what}.png", (".png",), "--plot")
        refuse_file_of_others(options.plot, MARK_OF_PICTURE, "--plot")
    # They are repeated in the advice.
    options.fit_flags = fit_flags
    return options


def check_values(options: Namespace) -> None:
    """A UserError for a number that makes no sense."""
    for name in ABOVE_ZERO:
        value = getattr(options, name)
        require(value is None or 0 < value < math.inf, f"--{name}", "be above 0", value)
    is_rising = options.min_lr < options.max_lr
    require(is_rising, "--min_lr", f"be below --max_lr ({options.max_lr:g})", options.min_lr)
    got = f"{options.steps} (fewer make no curve)"
    require(options.steps >= FEWEST_STEPS, "--steps", f"be at least {FEWEST_STEPS}", got)


def check_spelling(fit_flags: Sequence[str], options: Namespace) -> None:
    """A UserError for a misspelt option of ours, which ``fit`` would not know."""
    ours = [f"--{name}" for name in vars(options)]
    for word in fit_flags:
        flag = word.partition("=")[0]
        close = difflib.get_close_matches(flag, ours, n=1, cutoff=0.85)
        # --max_steps is a flag of the Trainer.
        if close and flag != "--max_steps":
            raise UserError(f"unknown option {flag}. Did you mean {close[0]}? See --help.")
