"""The project's commands as real processes, and what two runs have in common."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch
from filelock import FileLock
from lightning.pytorch import Callback
from torch.distributed import TCPStore
from unbroken.results.facts import Summary
from unbroken.run import Job

from tests.fork_server import Forked, can_fork

Process = subprocess.Popen[bytes] | Forked

# What training takes least time with.
TINY = [
    *("--data.source", "sample"),
    *("--data.train_samples", "64", "--data.val_samples", "32", "--data.test_samples", "32"),
    *("--data.batch_size", "32", "--max_epochs", "1"),
    *("--model.network", "MLP", "--model.network.hidden", "[4]", "--accelerator", "cpu"),
    *("--report", "false"),
]
# This run has 75 steps and is over in a second or two.
SMALL = [
    *("--data.source", "sample"),
    *("--data.train_samples", "1600", "--data.val_samples", "200", "--data.test_samples", "200"),
    *("--data.batch_size", "64", "--max_epochs", "3", "--log_every_n_steps", "5"),
    # Most of such a run's time would be that of a larger network.
    *("--model.network", "MLP", "--model.network.hidden", "[32]"),
    # The report is half of such a run's time.
    *("--report", "false"),
]
WHOLE_NETWORK = ["--model.network.hidden", "[256, 128]"]
REPORTED = [*SMALL, *WHOLE_NETWORK]
REPORTED += ["--report", "true"]
# This network has batch normalisation. Every rank gathers its statistics from its own batches.
CONVNET = ["--model.network", "ConvNet", "--model.network.widths", "[4, 8, 8]"]
CPU2 = ["--devices", "2", "--accelerator", "cpu", "--strategy", "ddp"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
# Columns that begin with these words measure this machine, not the training.
TIMED = ("throughput/", "memory/")
# The callbacks whose states measure it
MEASURING = ("RunTimer", "MemoryMonitor")


def command(module: str, *arguments: str) -> list[str]:
    """``python -m numerals.MODULE ...`` as a list of words."""
    return [sys.executable, "-m", f"numerals.{module}", *arguments]


def run(
    module: str, *arguments: str, timeout: float = 180, fresh: bool = False, **where: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command of the project to its end. See :func:`complete` for the arguments."""
    return complete(command(module, *arguments), timeout, fresh, **where)


def complete(
    words: list[str],
    timeout: float = 180,
    fresh: bool = False,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    start_up: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run words to their end, and capture stdout and stderr.

    Args:
        words: The command.
        timeout: Seconds after which it is killed.
        fresh: As for :func:`popen`.
        cwd: Its working folder; this process' own when None.
        env: Its environment; this process' own when None.
        start_up: As for :func:`popen`.

    Raises:
        subprocess.TimeoutExpired: It did not end in time.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = popen(words, out.fileno(), err.fileno(), fresh, cwd, env, start_up)
        try:
            process.wait(timeout)
        except BaseException:
            kill_group(process)
            raise
        assert process.returncode is not None
        return subprocess.CompletedProcess(words, process.returncode, read(out), read(err))


def run_ranks(
    module: str,
    *arguments: str,
    timeout: float = 180,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a module on two ranks to their end. See :func:`start_ranks` for the arguments.

    The exit code is that of the rank that failed first; as under torchrun it ends the other one.
    The output is that of both ranks.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        ranks, store = start_ranks(module, *arguments, files=(out, err), cwd=cwd, env=env)
        try:
            failed_first = wait_for_ranks(ranks, module, timeout)
        finally:
            for rank in ranks:
                kill_group(rank)
            # The ranks meet there, so it must live as long as they do.
            del store
        code = failed_first or next((rank.returncode for rank in ranks if rank.returncode), 0)
        return subprocess.CompletedProcess([module, *arguments], code, read(out), read(err))


def wait_for_ranks(ranks: list[Process], module: str, timeout: float) -> int:
    """Wait until every rank has ended. The first that fails ends the others; returns its code, 0
    where none has failed by itself.
    """
    end = time.monotonic() + timeout
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            for rank in ranks:
                rank.terminate()
        if any(codes) or None not in codes:
            break
        assert time.monotonic() < end, f"{module} did not end on two ranks within {timeout} s"
        time.sleep(0.01)
    for rank in ranks:
        rank.wait(30)
    return next((code for code in codes if code), 0)


def start_ranks(
    module: str,
    *arguments: str,
    files: tuple[IO[bytes], IO[bytes]],
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> tuple[list[Process], TCPStore]:
    """Start two ranks as torchrun starts its workers, but as forks.

    Returns the ranks, and the store in which they meet. Under torchrun the agent holds it.

    Args:
        module: Such as ``fit``. Without a dot it is one of the package. It also gets the flags
            ``--devices 2 --accelerator cpu --strategy ddp``.
        arguments: Its other arguments.
        files: For the output of both ranks, and for their errors.
        cwd: Their working folder; this process' own when None.
        env: Their environment; this process' own when None.
    """
    dotted = module if "." in module else f"numerals.{module}"
    words = [sys.executable, "-m", dotted, *arguments, *CPU2]
    # The store chooses a free port itself, so that none has to be guessed.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = without_decisions(os.environ if env is None else env)
    common |= {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    out, err = files
    ranks = []
    for rank in ("0", "1"):
        environment = {**common, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(popen(words, out.fileno(), err.fileno(), cwd=cwd, env=environment))
    return ranks, store


def without_decisions(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a run in this process has left there for ranks of its own."""
    kept = dict(environment)
    for name in ("UNBROKEN_RANK_ZERO_DECISION", "UNBROKEN_RANK_ZERO_PID", "PL_GLOBAL_SEED"):
        kept.pop(name, None)
    return kept


def read(file: IO[bytes]) -> str:
    """All of an open file."""
    file.seek(0)
    return file.read().decode()


def start(
    words: list[str],
    log: Path,
    fresh: bool = False,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> Process:
    """Start a process that writes into the file ``log``. Other arguments as for :func:`popen`."""
    with open(log, "ab") as file:
        return popen(words, file.fileno(), file.fileno(), fresh, cwd, env)


def popen(
    words: list[str],
    stdout: int,
    stderr: int,
    fresh: bool = False,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    start_up: Path | None = None,
) -> Process:
    """Start a process in a session of its own.

    Where it does the same, the process is a fork of one that has imported torch already.

    Args:
        words: The command.
        stdout: Open file descriptor for its output.
        stderr: The same for its errors.
        fresh: Start a new interpreter, because how it starts is what is tested.
        cwd: Its working folder; this process' own when None.
        env: Its environment; this process' own when None.
        start_up: A folder on its ``PYTHONPATH`` with a ``sitecustomize.py``, if there is one.
    """
    if not fresh and can_fork(words, dict(os.environ) if env is None else env, start_up):
        return Forked(words, stdout, stderr, cwd, env, start_up)
    return subprocess.Popen(
        words,
        stdout=stdout,
        stderr=stderr,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )


@functools.cache
def made_once(
    name: str, *arguments: str, wandb: str = "disabled", on_two_ranks: bool = False
) -> Path:
    """The folder of a finished run. It is trained once for all tests of all pytest processes.

    Tests only read it. What the run printed is in ``output.txt``, two folders above.

    Args:
        name: The run's name.
        arguments: Arguments of ``fit``.
        wandb: The mode of W&B.
        on_two_ranks: Whether it is trained as by :func:`run_ranks`.
    """
    shared = Path(os.environ["TESTS_SHARED_FOLDER"])
    root = shared / f"{name}-{zlib.crc32(repr(arguments).encode())}"
    environment = {**without_decisions(os.environ), "WANDB_MODE": wandb}
    with FileLock(f"{root}.lock"):
        if not (root / "output.txt").exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            run_it = run_ranks if on_two_ranks else run
            done = run_it("fit", *arguments, "--run_name", name, cwd=root, env=environment)
            assert done.returncode == 0, done.stderr
            (root / "output.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    return root / "checkpoints" / name


def add_callbacks(patch: pytest.MonkeyPatch, *callbacks: Callback) -> None:
    """Let the runs of this process have these callbacks, behind all others."""
    patch.setattr(Job, "build", build_with(*callbacks))


def build_with(*callbacks: Callback) -> Any:
    """A ``Job.build`` whose Trainers have these callbacks, behind all others."""
    build = Job.build

    def with_more(job: Job, config: Any, place: Any, extra: Any = ()) -> Any:
        return build(job, config, place, [*extra, *callbacks])

    return with_more


def finished_run() -> Path:
    """A small run on one process, with a report and W&B offline."""
    return made_once("small", *REPORTED, wandb="offline")


def two_rank_run() -> Path:
    """A small run on two processes, with a report and W&B offline.

    Each process takes half of a batch of 64.
    """
    flags = ["--data.batch_size", "32", "--data.test_samples", "199"]
    flags += ["--data.train_samples", "3200"]
    flags += ["--model.schedule", "constant"]
    # Every rank would draw its own shifts.
    flags += ["--data.shift_pixels", "0"]
    return made_once("two", *REPORTED, *flags, wandb="offline", on_two_ranks=True)


def wait_for(text: str, log: Path, process: Process, since: int = 0, timeout: float = 120) -> bool:
    """Wait until a text stands in a log. Returns False where the process ended without it.

    Args:
        text: What is waited for.
        log: The process' output.
        process: Who writes it.
        since: The byte of the log after which the text counts.
        timeout: Seconds.

    Raises:
        TimeoutError: The process goes on without having written it.
    """
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        # This is asked first, so that what a process writes as it ends is read.
        has_ended = process.poll() is not None
        if text in log.read_bytes()[since:].decode(errors="replace"):
            return True
        if has_ended:
            return False
        time.sleep(0.01)
    raise TimeoutError(f"{text!r} did not appear in {log}: {log.read_text()[-2000:]}")


def family(pid: int) -> list[int]:
    """Process ids of a process' children that train: its ranks, and not loaders or W&B."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "numerals.fit" in child.cmdline():
                    found.append(child.pid)
    return found


def kill_group(process: Process) -> None:
    """Kill a process and everything that it started."""
    if sys.platform == "win32":
        # Windows has no groups of processes, so the children are looked up.
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def exit_code(process: Process, log: Path, patience: float = 100) -> int:
    """Wait for the end of a process. One that hangs is killed, and what it wrote is told."""
    try:
        return int(process.wait(timeout=patience))
    except Exception:
        kill_group(process)
        raise AssertionError(log.read_text()[-3000:]) from None


def rows(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without empty cells and without the columns that measure the machine."""
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        return [without_measurements(row) for row in csv.DictReader(file)]


def without_measurements(row: dict[str, str]) -> dict[str, str]:
    """The filled cells of a row that do not depend on the machine's speed."""
    return {name: cell for name, cell in row.items() if cell and not name.startswith(TIMED)}


def summary(folder: Path) -> dict[str, Any]:
    """summary.json."""
    return dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def facts_of_a_short_run(name: str) -> Summary:
    """What the closing lines tell of a run of two steps that took five seconds."""
    return Summary(
        name,
        finished=True,
        device="cpu",
        precision="32-true",
        world_size=1,
        parameters=1,
        epochs=1,
        steps=2,
        fit_seconds=5.0,
        command="fit",
    )


def checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint, read as data."""
    return dict(torch.load(path, weights_only=True))


# What of a checkpoint must be equal in two runs that are the same.
SAME = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch")


def assert_same_run(one: Path, other: Path, ignores: tuple[str, ...] = ()) -> None:
    """Two runs' folders hold bit-identical checkpoints and identical rows of metrics.

    Args:
        one: A run's folder.
        other: Another one's.
        ignores: What may differ in the state besides weights and optimizers, by a part of its name.
    """
    for name in ("last.ckpt", "best.ckpt"):
        ours = checkpoint(one / name)
        theirs = checkpoint(other / name)
        assert differences_in_training(ours, theirs, name) == []
        states = [without_measured(each["run"]["state"]) for each in (ours, theirs)]
        found = differences(*states, f"{name}:state")
        assert [line for line in found if not any(each in line for each in ignores)] == []
    assert rows(one) == rows(other)


def without_measured(state: dict[str, Any], measured: tuple[str, ...] = TIMED) -> dict[str, Any]:
    """A checkpoint's state without the time and memory that monitors measured in its run."""
    kept = {
        part: {name: x for name, x in state[part].items() if not name.startswith(measured)}
        for part in ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    }
    # The outline is a hash of all the rest, also of those names.
    others = {name: x for name, x in state.items() if name != "outline"}
    # Which objects attributes hold is told of those that this process began with. A list that
    # training has replaced by an equal one is no change, and a resumed run begins with it.
    others["ranks"] = [without_objects(rank) for rank in state["ranks"]]
    # So it is with settings of a schedule: of stochastic weight averaging a resumed run begins with
    # those that it sets once it averages. How it steps is seen in the rates.
    others["trainer"] = {
        name: x for name, x in state["trainer"].items() if not name.startswith("schedules.")
    }
    if "inside_epoch" in others:
        inside = others["inside_epoch"]
        inside["state"] = without_measured(inside["state"])
        for name in MEASURING:
            inside["entries"]["callbacks"].pop(name, None)
    return others | kept


def without_objects(rank: dict[str, Any]) -> dict[str, Any]:
    """The state of a rank without which objects its attributes hold."""
    kept = {name: x for name, x in rank["objects"].items() if name != "objects"}
    return rank | {"objects": kept}


def differences_in_training(ours: Any, theirs: Any, name: str) -> list[str]:
    """Where weights, optimizers, schedules and counters of two checkpoints differ."""
    found = []
    for key in SAME:
        found += differences(ours[key], theirs[key], f"{name}:{key}")
    return found


def differences(a: Any, b: Any, where: str) -> list[str]:
    """Where two nested values differ. Tensors must be equal bit for bit."""
    found = []
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            found.append(f"{where}: keys {a.keys() ^ b.keys()}")
        for key in a.keys() & b.keys():
            found += differences(a[key], b[key], f"{where}.{key}")
        return found
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            found.append(f"{where}: lengths")
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            found += differences(x, y, f"{where}[{index}]")
        return found
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.layout != b.layout:
            return [f"{where}: layouts"]
        # Sparse tensors cannot be compared as they are.
        return [] if torch.equal(a.to_dense(), b.to_dense()) else [where]
    return [] if a == b else [where]
