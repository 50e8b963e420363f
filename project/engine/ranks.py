"""The rank of this process before Lightning knows it, and decisions that rank 0 makes for all ranks."""

import atexit
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from project.errors import UserError

DECISION_VARIABLE = (
    "PROJECT_RANK_ZERO_DECISION"  # Lightning's child ranks inherit what rank 0 decided
)


def launched_world() -> tuple[int, int, int]:
    """Rank, world size and ranks per machine as torchrun or SLURM (srun) announce them; (0, 1, 1) outside of both."""
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" in environ or ("RANK" in environ and "WORLD_SIZE" in environ):
        world = int(environ["WORLD_SIZE"])
        return int(environ["RANK"]), world, int(environ.get("LOCAL_WORLD_SIZE", world))
    # an interactive shell inside an allocation has these variables, too, but is one process
    if "SLURM_STEP_ID" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        world = int(environ.get("SLURM_NTASKS", 1))
        return (
            int(environ.get("SLURM_PROCID", 0)),
            world,
            max(1, world // int(environ.get("SLURM_NNODES", 1))),
        )
    return 0, 1, 1


def is_child() -> bool:
    """Whether Lightning's launcher started this process as a further rank of another one."""
    return DECISION_VARIABLE in os.environ and os.environ.get("LOCAL_RANK", "0") != "0"


def is_rank_zero() -> bool:
    """Whether this process prints and writes files."""
    return not is_child() and launched_world()[0] == 0


def say(*lines: str) -> None:
    """Print lines, on rank 0. Where the reader has gone (``... | head``) they go nowhere, and the run goes on."""
    if lines and is_rank_zero():
        try:
            print(*lines, sep="\n", flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def of_all_ranks(value: Any, group: Any = None) -> list[Any]:
    """``value`` of every rank, in rank order. Every rank must call it; ``group``: default all, as NCCL or gloo."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def decided_by_rank_zero(decide: Callable[[], Any]) -> Any:
    """``decide()`` of rank 0, known to every rank: JSON, whose paths may become text, or the UserError raised. Ranks
    started by torchrun or SLURM meet here, early; Lightning finds the process group and uses it.
    """
    if is_child():
        try:
            return json.loads(os.environ[DECISION_VARIABLE])
        except ValueError:
            found = os.environ[DECISION_VARIABLE]
            raise UserError(
                f"{DECISION_VARIABLE} is what rank 0 tells its ranks, got '{found}'. Unset it."
            ) from None
    rank, world_size, _ = launched_world()
    if world_size == 1 and os.environ.get("NODE_RANK", "0") != "0":
        raise UserError(
            "NODE_RANK is set without a launcher. Start several machines with torchrun, see the README."
        )
    if world_size == 1:
        decision = decide()
        os.environ[DECISION_VARIABLE] = json.dumps(decision, default=str)
        return decision
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        if "MASTER_ADDR" not in os.environ:
            from lightning.pytorch.plugins.environments import SLURMEnvironment

            slurm = SLURMEnvironment()
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = (
                slurm.main_address,
                str(slurm.main_port),
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, rank=rank, world_size=world_size, timeout=timedelta(minutes=30)
        )
        # NCCL warns of a group that is left behind; Lightning takes down only groups that it has made itself
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    try:
        decision = decide() if rank == 0 else None
    except UserError as error:
        decision = error
    decision = of_all_ranks(decision)[0]
    if isinstance(decision, UserError):
        raise decision
    return decision
