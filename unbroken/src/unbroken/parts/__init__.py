"""What a checkpoint holds beyond Lightning's own: one class for each thing.

Lightning saves weights, optimizers, schedules, the states of callbacks and of the data module, and
the counters of its loops. An exact resume needs more. :func:`all_parts` is the list of what
more a checkpoint of this project holds. Each part has ``take(trainer)`` and ``give_back(trainer,
value)`` one below the other. A part of your own, for state that your code keeps, is a subclass of
:class:`Part` that you give to ``ExactCheckpoint(..., parts=[...])``.
"""

from collections.abc import Sequence

from unbroken.parts.chain import BitsInMemory, Chain, OpenWindow
from unbroken.parts.generators import RandomGenerators
from unbroken.parts.hyperparameters import StartingHyperparameters
from unbroken.parts.loaders import BatchSizes, LoaderPositions
from unbroken.parts.loops import EarlyStop, ValidatedBatches, WasValidated
from unbroken.parts.metrics import CallbackMetrics, LoggedSums, MetricStates, ModuleSums
from unbroken.parts.module import (
    EvalModes,
    FrozenParameters,
    Gradients,
    PlainBuffers,
    UntrackedStatistics,
)
from unbroken.parts.part import Part
from unbroken.parts.users_objects import UsersObjects


def all_parts(
    followed: Part,
    was_validated: WasValidated,
    positions: LoaderPositions,
    buffers: PlainBuffers,
    hyperparameters: StartingHyperparameters,
    objects: UsersObjects,
    open_window: OpenWindow,
    chain: Chain,
    bits_in_memory: BitsInMemory,
    further: Sequence[Part] = (),
) -> list[Part]:
    """Every part, in the order in which they are taken and given back.

    Args:
        followed: Whether validations log the metric that is followed. Others ask these nine
            parts, or tell them something, so that the caller makes them.
        was_validated: See above.
        positions: See above.
        buffers: See above.
        hyperparameters: See above.
        objects: See above.
        open_window: See above.
        chain: See above.
        bits_in_memory: See above.
        further: The user's own.
    """
    return [
        # A module's own sums come first: to ask for them may add uncounted batches to its metrics.
        ModuleSums(),
        MetricStates(),
        LoggedSums(),
        CallbackMetrics(),
        ValidatedBatches(),
        was_validated,
        followed,
        positions,
        BatchSizes(positions),
        buffers,
        Gradients(),
        FrozenParameters(),
        EvalModes(),
        UntrackedStatistics(),
        hyperparameters,
        EarlyStop(),
        objects,
        open_window,
        chain,
        bits_in_memory,
        *further,
        # The generators come last: to give back another part may draw a random number.
        RandomGenerators(),
    ]
