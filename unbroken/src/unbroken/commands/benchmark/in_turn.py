"""Loops that train in turn, each in a process of its own: a machine's speed may change in
seconds.
"""

import gc
import multiprocessing
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection

from unbroken.cli.cli import configure
from unbroken.commands.benchmark import timing
from unbroken.commands.benchmark.loops_by_hand import BARE, FULL, loops_by_hand
from unbroken.commands.benchmark.real_runs import Epoch, run_epochs
from unbroken.commands.program_of import program_of
from unbroken.errors import UserError
from unbroken.machine import threads
from unbroken.machine.waiting import waiting

# How long a process may take to end by itself.
END_SECONDS = 60


def epochs_in_turn(
    package: str, table: str, loops: Sequence[str], fit_flags: Sequence[str], n: int
) -> dict[str, list[Epoch]]:
    """``n`` epochs of each loop, one after the other, in turn."""
    spawn = multiprocessing.get_context("spawn")
    turns = {}
    with ExitStack() as ends:
        for loop in loops:
            ours, theirs = spawn.Pipe()
            arguments = (theirs, package, loop, fit_flags, n + 1)
            process = spawn.Process(target=take_turns, args=arguments)
            process.start()
            # Else the end of the process would not be seen.
            theirs.close()
            # These are called in the opposite order. The process ends before its next epoch as the
            # connection is closed.
            ends.callback(process.kill)
            ends.callback(process.join, END_SECONDS)
            ends.callback(ours.close)
            turns[loop] = partial(epoch_of, ours)
        results = timing.alternate(table, turns, n + 1)
    # The first epoch warms up.
    return {loop: epochs[1:] for loop, epochs in results.items()}


def epoch_of(turn: Connection) -> Epoch:
    """Let the process at the other end train one epoch; what it refuses is raised here."""
    turn.send(None)
    answer = turn.recv()
    if isinstance(answer, Exception):
        raise answer
    epoch: Epoch = answer
    return epoch


def take_turns(
    turn: Connection, package: str, loop: str, fit_flags: Sequence[str], epochs: int
) -> None:
    """The process of a loop: train an epoch for each message, and send its seconds."""
    # The parent closes the connection when it is interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):
        try:
            config = configure(program_of(package), "benchmark", list(fit_flags))
            if loop in (FULL, BARE):
                start_as_a_command()
                run_epochs(config, epochs, bare=loop == BARE, turn=turn)
            else:
                # The loops by hand wait and allocate as PyTorch does.
                epoch = loops_by_hand(config)[loop]
                for _ in range(epochs):
                    turn.recv()
                    turn.send(epoch())
        except UserError as error:
            turn.send(error)


def start_as_a_command() -> None:
    """Threads, waiting and garbage collector as a command of ours has them."""
    threads.configure()
    waiting.start()
    gc.freeze()
