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


def launched_world() -> tuple[int, int, int]:
    """Rank, world size and ranks per machine as torchrun or SLURM (srun) announce them; (0, 1, 1)
    outside of both.
    """
    environ = os.environ
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    by_variables = "RANK" in environ and "WORLD_SIZE" in environ
    if by_torchrun or by_variables:
        world = int(environ["WORLD_SIZE"])
        return int(environ["RANK"]), world, int(environ.get("LOCAL_WORLD_SIZE", world))
    # An interactive shell inside an allocation has these variables, too, but is one process.
    is_interactive = environ.get("SLURM_JOB_NAME") in INTERACTIVE
    if "SLURM_STEP_ID" in environ and not is_interactive:
        world = int(environ.get("SLURM_NTASKS", 1))
        nodes = int(environ.get("SLURM_NNODES", 1))
        return int(environ.get("SLURM_PROCID", 0)), world, max(1, world // nodes)
    return 0, 1, 1


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
    return {name: os.environ[name] for name in RANKS if os.environ.get(name, "0") != "0"}


def _say_what_is_ignored(given: dict[str, str]) -> None:
    shown = " ".join(f"{name}={value}" for name, value in given.items())
    if shown:
        say(f"{shown} of the environment is ignored: no launcher has started this process.")


def refuse_one_process_of_several_tasks() -> None:
    """A UserError for plain python inside a SLURM job of several tasks: it would wait for the
    others.
    """
    tasks = os.environ.get("SLURM_NTASKS", "1")
    is_interactive = os.environ.get("SLURM_JOB_NAME") in INTERACTIVE
    is_launched = "SLURM_STEP_ID" in os.environ or launched_world()[1] > 1
    if tasks == "1" or is_interactive or is_launched:
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
    return os.environ.get("LOCAL_RANK", "0") != "0"


def is_rank_zero() -> bool:
    """Whether this process prints and writes files."""
    return not is_child() and launched_world()[0] == 0


def say(*lines: str) -> None:
    """Print lines, on rank zero.

    Where the reader has gone (``... | head``, a closed terminal) they go nowhere, and the run goes
    on.
    """
    if lines and is_rank_zero():
        try:
            write_lines("\n".join(without_control_characters(list(lines))))
        except OSError as error:
            if error.errno not in NOBODY_READS:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    if world_size == 1 and os.environ.get("NODE_RANK", "0") != "0":
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
