"""The rank of this process before Lightning knows it, and decisions that rank zero makes for all
ranks.
"""

import atexit
import errno
import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from unbroken.errors import UserError, without_control_characters
from unbroken.lines import write_lines

# Lightning's child ranks inherit what rank zero has decided, as JSON: name → value.
DECISION_VARIABLE = "UNBROKEN_RANK_ZERO_DECISION"
# What this process has decided as rank zero, for that variable.
DECISIONS: dict[str, Any] = {}
# The process id of rank zero, for them.
RANK_ZERO_VARIABLE = "UNBROKEN_RANK_ZERO_PID"
# The variables from which Lightning reads the rank of this process as it is imported.
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
# Variables by which torchrun, SLURM and Lightning tell a process its place. Each is a whole number.
NUMBERED = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NNODES",
    "JSM_NAMESPACE_RANK",
)
# Those of them that count ranks or machines, of which there is one at least
COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES")
# Variables whose mere presence says that a launcher is there
LAUNCHED = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID")
# Digits of such a number
LONGEST_NUMBER = 10
# Names of SLURM jobs in which somebody types.
INTERACTIVE = ("bash", "interactive")
# What writing to a pipe or a terminal that nobody reads any more raises.
NOBODY_READS = (errno.EPIPE, errno.EIO)
# How often ranks that start look whether the others are there.
MEETING_POLL_SECONDS = 0.05


class ThisProcess:
    """What is known of this process beside its environment."""

    # Whether a Trainer trains here without other ranks, whatever the environment says
    is_alone = False


def number_of(variable: str) -> int | None:
    """The number in a launcher's variable; None where it is not set, or empty.

    Raises:
        UserError: It is no whole number, or counts less than one rank.
    """
    value = os.environ.get(variable)
    if not value:
        return None
    is_number = value.isascii() and value.isdigit() and len(value) < LONGEST_NUMBER
    must = "must be a whole number"
    if variable in COUNTS:
        must = "must be a whole number of at least 1"
        is_number = is_number and int(value) > 0
    if not is_number:
        raise UserError(f"the environment variable {variable} {must}, got '{value}'. Unset it.")
    return int(value)


def settle_launcher() -> None:
    """Check what a launcher's variables say, before Lightning reads them, and take empty ones out
    of the environment: they count as unset.

    Raises:
        UserError: What they say is no place of a process.
    """
    for variable in (*NUMBERED, *LAUNCHED):
        if os.environ.get(variable) == "":
            del os.environ[variable]
    for variable in NUMBERED:
        number_of(variable)
    launched_world()


def launched_world() -> tuple[int, int, int]:
    """Rank, world size and ranks per machine as torchrun or SLURM (srun) announce them; (0, 1, 1)
    outside of both.

    Raises:
        UserError: What their variables say is no place of a process.
    """
    rank, world = number_of("RANK"), number_of("WORLD_SIZE")
    if rank is not None and world is not None:
        _check_place("RANK", rank, "WORLD_SIZE", world)
        return rank, world, number_of("LOCAL_WORLD_SIZE") or world
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        lacking = "RANK" if rank is None else "WORLD_SIZE"
        raise UserError(
            f"TORCHELASTIC_RUN_ID is set without {lacking}, which torchrun sets as well. Start the"
            " command with torchrun, or unset TORCHELASTIC_RUN_ID."
        )
    # An interactive shell inside an allocation has these variables, too, but is one process.
    is_interactive = os.environ.get("SLURM_JOB_NAME") in INTERACTIVE
    if os.environ.get("SLURM_STEP_ID") and not is_interactive:
        rank, world = number_of("SLURM_PROCID") or 0, number_of("SLURM_NTASKS") or 1
        _check_place("SLURM_PROCID", rank, "SLURM_NTASKS", world)
        return rank, world, max(1, world // (number_of("SLURM_NNODES") or 1))
    return 0, 1, 1


def _check_place(rank_name: str, rank: int, world_name: str, world: int) -> None:
    """A UserError for a rank that does not exist: the others would wait for ever."""
    if rank >= world:
        raise UserError(
            f"the environment variable {rank_name} must be less than {world_name}, which is"
            f" {world}, got {rank}. Unset both, or start the command with its launcher."
        )


def ignore_rank_without_launcher() -> None:
    """Take a rank out of the environment that no launcher has given to this process, and say so.

    Lightning would take this process for a further rank, and log nothing. A command calls it before
    Lightning is imported; later :func:`take_rank_of_the_trainer` does the rest.
    """
    is_ours = RANK_ZERO_VARIABLE in os.environ or DECISION_VARIABLE in os.environ
    if is_ours or "TORCHELASTIC_RUN_ID" in os.environ or launched_world()[1] > 1:
        return
    given = _ranks_of_the_environment()
    for name in given:
        del os.environ[name]
    _say_what_is_ignored(given)


def take_rank_of_the_trainer(trainer: Any) -> None:
    """Ignore a rank of the environment where a Trainer has found that this process is alone, and
    say so. A script's environment stays as it is.

    Lightning has read the rank as it was imported, and its loggers would log nothing.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    lightnings: Any = rank_zero_only
    is_alone = trainer.world_size == 1 and launched_world()[1] == 1
    if not is_alone or (lightnings.rank == 0 and not is_child()):
        return
    lightnings.rank = 0
    given = _ranks_of_the_environment()
    ThisProcess.is_alone = True
    _say_what_is_ignored(given)


def _ranks_of_the_environment() -> dict[str, str]:
    """The variables that give this process another rank than zero, with their values."""
    return {name: os.environ[name] for name in RANKS if number_of(name)}


def _say_what_is_ignored(given: dict[str, str]) -> None:
    shown = " ".join(f"{name}={value}" for name, value in given.items())
    if shown:
        say(f"{shown} of the environment is ignored: no launcher has started this process.")


def refuse_one_process_of_several_tasks() -> None:
    """A UserError for plain python inside a SLURM job of several tasks: it would wait for the
    others.
    """
    tasks = number_of("SLURM_NTASKS") or 1
    is_interactive = os.environ.get("SLURM_JOB_NAME") in INTERACTIVE
    is_launched = "SLURM_STEP_ID" in os.environ or launched_world()[1] > 1
    if tasks == 1 or is_interactive or is_launched:
        return
    raise UserError(
        f"this SLURM job has {tasks} tasks (SLURM_NTASKS), and python alone is one of them."
        " Write srun before python, or ask for one task: #SBATCH --ntasks=1."
    )


def is_child() -> bool:
    """Whether Lightning's launcher started this process as a further rank of another one."""
    by_another_launcher = launched_world()[1] > 1
    if ThisProcess.is_alone or by_another_launcher:
        return False
    return bool(number_of("LOCAL_RANK"))


def is_rank_zero() -> bool:
    """Whether this process prints and writes files."""
    return not is_child() and launched_world()[0] == 0


def say(*lines: str) -> None:
    """Print lines, on rank zero.

    Where the reader has gone (``... | head``, a closed terminal), the disk is full or the program
    has closed its stdout, they go nowhere, and the run goes on.
    """
    if lines and is_rank_zero():
        try:
            write_lines("\n".join(without_control_characters(list(lines))))
        except OSError as error:
            # A disk may take the next line, a reader that has gone does not come back.
            if error.errno in NOBODY_READS:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except ValueError:
            if not sys.stdout.closed:
                raise


def gather_from_ranks(value: Any, group: Any = None) -> list[Any]:
    """``value`` of every rank, in rank order.

    Every rank must call it; ``group``: default all, as NCCL or gloo.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_from_rank_zero(value: Any) -> Any:
    """Rank zero's ``value``. Every rank must call it."""
    return gather_from_ranks(value)[0]


def decided_by_rank_zero(name: str, decide: Callable[[], Any]) -> Any:
    """``decide()`` of rank zero, known to every rank. The value goes along as JSON, so a Path comes
    as a text. A UserError of rank zero is raised on every rank.

    Ranks that torchrun or SLURM has started meet here, early. Lightning finds the process group and
    uses it. Its child ranks ask for what rank zero has decided under this ``name``.
    """
    if is_child():
        return inherited_decision(name)
    rank, world_size, _ = launched_world()
    if world_size == 1 and number_of("NODE_RANK"):
        how = "Start several machines with torchrun, see docs/scale_out.md."
        raise UserError(f"NODE_RANK is set without a launcher. {how}")
    if world_size == 1:
        refuse_one_process_of_several_tasks()
        decision = decide()
        DECISIONS[name] = decision
        os.environ[DECISION_VARIABLE] = json.dumps(DECISIONS, default=str)
        os.environ[RANK_ZERO_VARIABLE] = str(os.getpid())
        return decision
    meet(rank, world_size)
    decision = None
    try:
        if rank == 0:
            decision = decide()
    except UserError as error:
        decision = error
    decision = gather_from_ranks(decision)[0]
    if isinstance(decision, UserError):
        raise decision
    return decision


def inherited_decision(name: str) -> Any:
    """What rank zero has decided under this name, before it started this process."""
    found = os.environ.get(DECISION_VARIABLE, "")
    try:
        return json.loads(found)[name]
    except (ValueError, LookupError, TypeError):
        what = f"{DECISION_VARIABLE} is what rank 0 tells its ranks, got '{found}'"
        raise UserError(f"{what}. Unset it.") from None


def meet(rank: int, world_size: int) -> None:
    """Make the process group of all ranks, if there is none yet."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if "MASTER_ADDR" not in os.environ:
        from lightning.pytorch.plugins.environments import SLURMEnvironment

        slurm = SLURMEnvironment()
        os.environ["MASTER_ADDR"] = slurm.main_address
        os.environ["MASTER_PORT"] = str(slurm.main_port)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    patience = timedelta(minutes=30)
    store = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = store_of_this_start(rank, world_size, patience)
    dist.init_process_group(
        backend, rank=rank, world_size=world_size, timeout=patience, store=store
    )

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    # NCCL warns of a group that is left behind. Lightning takes down only groups that it has made
    # itself.
    atexit.register(leave)


def store_of_this_start(rank: int, world_size: int, patience: timedelta) -> Any:
    """A part of the store of torchrun's agent that only the ranks of this start know.

    The agent keeps one store for all its restarts (``--max_restarts``). In it are still the
    addresses of ranks that have died, under the keys of those that start now. These would connect
    to them, and fail or wait for ever. ``TORCHELASTIC_RESTART_COUNT`` does not tell the starts
    apart: the agents of several machines count differently.
    """
    import torch.distributed as dist

    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, world_size, is_master=False, timeout=patience)
    end = time.monotonic() + patience.total_seconds()
    name = _tell_name(store, world_size, end) if rank == 0 else _hear_name(store, rank, end)
    return dist.PrefixStore(name, store)


def _tell_name(store: Any, world_size: int, end: float) -> str:
    """On rank zero: make up a name for this start, and tell it to every rank that asks."""
    name = uuid.uuid4().hex
    for rank in range(1, world_size):
        while not store.check([f"{name}/heard/{rank}"]):
            if store.check([f"asks/{rank}"]):
                # It may be that of a rank that has died. Then the new one writes its own soon.
                question = store.get(f"asks/{rank}").decode()
                store.set(f"answer/{question}", name)
            _wait(end)
    return name


def _hear_name(store: Any, rank: int, end: float) -> str:
    """On another rank: ask rank zero for the name of this start."""
    question = uuid.uuid4().hex
    store.set(f"asks/{rank}", question)
    while not store.check([f"answer/{question}"]):
        _wait(end)
    name: str = store.get(f"answer/{question}").decode()
    store.set(f"{name}/heard/{rank}", "")
    return name


def _wait(end: float) -> None:
    if time.monotonic() > end:
        raise UserError("the ranks did not meet: one of them has not started.")
    # Python handles signals in between.
    time.sleep(MEETING_POLL_SECONDS)
