"""What measured batch sizes mean: which is fastest, which is enough, and which to use."""

from collections.abc import Sequence
from typing import NamedTuple

from unbroken.commands.tune.steps import Measured

# A gain in speed below this fraction does not count.
WORTH = 0.05
# Optimizer steps per epoch that a recommended size must leave. On 9,000 small images, 4 per epoch
# gave an accuracy of 0.916 after five epochs, and 70 gave 0.983.
LEAST_STEPS = 50


class Advice(NamedTuple):
    """Three of the measured sizes."""

    # The fastest.
    best: Measured
    # The smallest that is nearly as fast: past it, larger ones stop paying.
    enough: Measured
    # The one to use; None where no size that may be recommended fits.
    use: Measured | None


def advise(measured: Sequence[Measured], present: int) -> Advice:
    """Choose from sizes in rising order. ``present`` is the configured one, measured or not."""
    return Advice(
        best=max(measured, key=lambda row: row.samples_per_sec),
        enough=smallest_near_best(measured),
        use=size_to_use(measured, present),
    )


def smallest_near_best(rows: Sequence[Measured]) -> Measured:
    """The smallest size whose speed is within WORTH of the highest."""
    best = max(row.samples_per_sec for row in rows)
    for row in rows:
        if row.samples_per_sec >= (1 - WORTH) * best:
            return row
    raise AssertionError("the fastest row is within any fraction of itself")


def size_to_use(measured: Sequence[Measured], present: int) -> Measured | None:
    """The smallest nearly fastest of the sizes that leave LEAST_STEPS, if it gains anything.

    Where it gains nothing over the configured size, or no more than the measurements vary, that
    one stays.
    """
    now = measured_at(present, measured)
    allowed = [row for row in measured if leaves_enough_steps(row)]
    if not allowed:
        return now
    found = smallest_near_best(allowed)
    if now is None:
        return found
    is_worth = gain_pct(found, now) > 100 * WORTH
    return found if is_worth and is_clear(found, now) else now


def measured_at(size: int, measured: Sequence[Measured]) -> Measured | None:
    """What was measured at a size; None where it was not."""
    for row in measured:
        if row.batch_size == size:
            return row
    return None


def gain_pct(row: Measured, now: Measured) -> float:
    """How much faster a size is than another, in percent."""
    return 100 * (row.samples_per_sec / now.samples_per_sec - 1)


def is_clear(row: Measured, now: Measured) -> bool:
    """Whether a size is faster by more than the speeds of both vary."""
    return gain_pct(row, now) > max(row.spread_pct, now.spread_pct)


def leaves_enough_steps(row: Measured) -> bool:
    """Whether an epoch has LEAST_STEPS optimizer steps with this size, as far as that is known."""
    return row.steps_per_epoch is None or row.steps_per_epoch >= LEAST_STEPS


def advice_lines(
    measured: Sequence[Measured], limited_by: str, present: int, tune_lr: str
) -> list[str]:
    """What the figures mean, what a larger batch costs, and the flags to paste.

    ``tune_lr`` is the command that finds a learning rate. It lacks only the size.
    """
    best, enough, use = advise(measured, present)
    largest = measured[-1].batch_size
    if limited_by == "memory":
        lines = [f"largest batch that fits: {largest:,} ({largest + 1:,} does not)"]
    else:
        lines = [f"largest batch tried: {largest:,}, and it fits ({limited_by})"]
    now = measured_at(present, measured)
    if now is None:
        lines.append(f"now: {present:,}, which was not measured")
    else:
        lines.append(f"now: {present:,} at {now.samples_per_sec:,.0f} samples/s")
    lines.append(f"best throughput: {best.batch_size:,} at {best.samples_per_sec:,.0f} samples/s")
    if enough is not best:
        gain = 100 * (best.samples_per_sec / enough.samples_per_sec - 1)
        only = f"{best.batch_size:,} is only {gain:.1f} % faster"
        lines.append(f"past {enough.batch_size:,} it stops paying: {only}")
    cost = steps_of(use, best)
    costs = "A larger batch is faster per sample but takes fewer optimizer steps"
    lines.append(f"{costs}: {cost}." if cost else f"{costs}.")
    # Where the number of steps is not known, it limits nothing.
    limit = f" that leaves {LEAST_STEPS} of them" if cost else ""
    if use is None:
        return [*lines, f"No size{limit} fits."]
    size = use.batch_size
    if use is now:
        if gain_pct(best, use) > 100 * WORTH and not is_clear(best, use):
            spread = max(best.spread_pct, use.spread_pct)
            seems = f"{best.batch_size:,} seems {gain_pct(best, use):.0f} % faster"
            lines.append(
                f"{seems}, but the measurements vary by {spread:.0f} %."
                " Measure again on an idle machine."
            )
            return [*lines, f"Keep --data.batch_size {size}."]
        keep = f"Keep --data.batch_size {size}: no size{limit} is {100 * WORTH:.0f} % faster."
        return [*lines, keep]
    return [
        *lines,
        "",
        f"  --data.batch_size {size}",
        "",
        "It wants another learning rate:",
        f"  {tune_lr} {size}",
    ]


def steps_of(use: Measured | None, best: Measured) -> str:
    """How many optimizer steps an epoch has at both sizes; empty where that is not known."""
    shown: dict[int, str] = {}
    for row in (use or best, best):
        if row.steps_per_epoch is not None:
            shown[row.batch_size] = f"{row.steps_per_epoch:,} an epoch at {row.batch_size:,}"
    return " and ".join(shown.values())
