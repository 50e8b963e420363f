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

import torch
from filelock import FileLock
from torch.distributed import TCPStore

from tests.fork_server import Forked, can_fork

Process = subprocess.Popen[bytes] | Forked

# feature: mnist
# A run of about 100 steps that is over in a second or two
SMALL = [
    *("--data.source", "sample", "--data.train_samples", "3200", "--data.val_samples", "200"),
    *(
        "--data.test_samples",
        "200",
        "--data.batch_size",
        "64",
        "--max_epochs",
        "3",
        "--log_every_n_steps",
        "5",
    ),
    *("--model.network", "MLP"),
    # the report is half of such a run's time
    *("--report", "false"),  # feature: report
]
REPORTED = [*SMALL]
REPORTED += ["--report", "true"]  # feature: report
# end feature: mnist
# With batch normalisation, whose running statistics every rank gathers from its own batches
CONVNET = ["--model.network", "ConvNet", "--model.network.widths", "[4, 8, 8]"]  # feature: images
CPU2 = ["--devices", "2", "--accelerator", "cpu", "--strategy", "ddp"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
TIMED = ("throughput/", "memory/")  # columns that measure this machine, not the training


def command(module: str, *arguments: str) -> list[str]:
    """``python -m project.MODULE ...`` as a list of words."""
    return [sys.executable, "-m", f"project.{module}", *arguments]


def run(
    module: str, *arguments: str, timeout: float = 180, fresh: bool = False, **where: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in the current directory; stdout and stderr are captured. See
    :func:`complete`.
    """
    return complete(command(module, *arguments), timeout, fresh, **where)


def complete(
    words: list[str],
    timeout: float = 180,
    fresh: bool = False,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run words to their end; stdout and stderr are captured. ``fresh`` as for :func:`popen`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = popen(words, out.fileno(), err.fileno(), fresh, cwd, env)
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
    """Run a module on two ranks to their end: see :func:`start_ranks`, and there for the arguments.

    The exit code is that of a rank that failed; as under torchrun it ends the other one. Output is
    that of both ranks.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        ranks, store = start_ranks(module, *arguments, files=(out, err), cwd=cwd, env=env)
        try:
            end = time.monotonic() + timeout
            while not (failed := any(rank.poll() for rank in ranks)) and None in [
                rank.returncode for rank in ranks
            ]:
                assert time.monotonic() < end, (
                    f"{module} did not end on two ranks within {timeout} s"
                )
                time.sleep(0.01)
            for rank in ranks:
                if failed:
                    rank.terminate()
                rank.wait(30)
        finally:
            for rank in ranks:
                kill_group(rank)
            del store
        code = next((rank.returncode for rank in ranks if rank.returncode), 0)
        return subprocess.CompletedProcess([module, *arguments], code, read(out), read(err))


def start_ranks(
    module: str,
    *arguments: str,
    files: tuple[IO[bytes], IO[bytes]],
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> tuple[list[Process], TCPStore]:
    """Start two ranks as torchrun starts its workers, but as forks; and where they meet, as
    torchrun's do in torchrun.

    Args:
        module: Such as ``fit``, of the package unless dotted; it is told ``--devices 2`` and
            ``--accelerator cpu``.
        arguments: What it is told besides.
        files: For the output of both, and their errors.
        cwd: Their working folder; this process' own when None.
        env: Their environment; this process' own when None.
    """
    words = [
        sys.executable,
        "-m",
        module if "." in module else f"project.{module}",
        *arguments,
        *CPU2,
    ]
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # no free port has to be guessed
    common = without_decisions(os.environ if env is None else env)
    common |= {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    common |= {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    out, err = files
    ranks = [
        popen(
            words,
            out.fileno(),
            err.fileno(),
            cwd=cwd,
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    return ranks, store


def without_decisions(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a run in this process has left for the ranks that it might have
    started.
    """
    return {
        k: v
        for k, v in environment.items()
        if k not in ("PROJECT_RANK_ZERO_DECISION", "PL_GLOBAL_SEED")
    }


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
    """Start a process in a session of its own, with its output in ``log``. ``fresh`` as for
    :func:`popen`.
    """
    with open(log, "ab") as file:
        return popen(words, file.fileno(), file.fileno(), fresh, cwd, env)


def popen(
    words: list[str],
    stdout: int,
    stderr: int,
    fresh: bool = False,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> Process:
    """A process in a session of its own: a fork that has imported torch already where that is the
    same.

    Args:
        words: The command.
        stdout: Open file descriptor for its output.
        stderr: The same for its errors.
        fresh: Start a new interpreter, because how it starts is what is tested.
        cwd: Its working folder; this process' own when None.
        env: Its environment; this process' own when None.
    """
    if not fresh and can_fork(words, dict(os.environ) if env is None else env):
        return Forked(words, stdout, stderr, cwd, env)
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
    name: str, *arguments: str, wandb: str = "disabled", launcher: tuple[str, ...] = ()
) -> Path:
    """The folder of a finished run, trained once for all tests of all pytest processes. Read only.

    What it printed is in ``output.txt``, two folders above. ``launcher`` is what Python runs the
    command with.
    """
    root = (
        Path(os.environ["TESTS_SHARED_FOLDER"]) / f"{name}-{zlib.crc32(repr(arguments).encode())}"
    )
    environment = {**without_decisions(os.environ), "WANDB_MODE": wandb}
    with FileLock(f"{root}.lock"):
        folder = root / "checkpoints" / name
        if not (root / "output.txt").exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            words = [sys.executable, *launcher, *command("fit", *arguments, "--run_name", name)[1:]]
            done = complete(words, cwd=root, env=environment)
            assert done.returncode == 0, done.stderr
            (root / "output.txt").write_text(done.stdout + done.stderr)
    return folder


# feature: mnist
def finished_run() -> Path:
    """A small run on one process, with a report and W&B offline."""
    return made_once("small", *REPORTED, wandb="offline")


def two_rank_run() -> Path:
    """A small run of torchrun on two processes, with a report and W&B offline; each takes half of a
    batch of 64.
    """
    flags = [
        "--data.batch_size",
        "32",
        "--data.test_samples",
        "199",
        "--model.schedule",
        "constant",
    ]
    flags += ["--data.shift_pixels", "0"]  # every rank draws its own
    return made_once("two", *REPORTED, *flags, *CPU2, wandb="offline", launcher=TORCHRUN)


# end feature: mnist


def wait_for(text: str, log: Path, process: Process, since: int = 0, timeout: float = 120) -> bool:
    """Wait until ``text`` stands in ``log`` after byte ``since``; False where the process ended
    without it.
    """
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if text in log.read_bytes()[since:].decode(errors="replace"):
            return True
        if process.poll() is not None:
            return text in log.read_bytes()[since:].decode(errors="replace")
        time.sleep(0.01)
    raise TimeoutError(f"{text!r} did not appear in {log}: {log.read_text()[-2000:]}")


def family(pid: int) -> list[int]:
    """Process ids of a process's descendants that train (its ranks), not of loaders or wandb."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == pid and b"project.fit" in words:
                found.append(int(entry.name))
    return found


def kill_group(process: Process) -> None:
    """SIGKILL to everything a process started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without the columns that measure the machine."""
    with open(folder / "metrics.csv", newline="") as file:
        return [
            {k: v for k, v in row.items() if v and not k.startswith(TIMED)}
            for row in csv.DictReader(file)
        ]


def summary(folder: Path) -> dict[str, Any]:
    """summary.json."""
    return dict(json.loads((folder / "summary.json").read_text()))


def checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint, read as data."""
    return dict(torch.load(path, weights_only=True))


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs' folders hold bit-identical weights, optimizer states and generators, and identical
    metric rows.
    """
    for name in ("last.ckpt", "best.ckpt"):
        a, b = checkpoint(one / name), checkpoint(other / name)
        for key in (
            "state_dict",
            "optimizer_states",
            "lr_schedulers",
            "loops",
            "global_step",
            "epoch",
        ):
            assert differences(a[key], b[key], f"{name}:{key}") == []
        states = [without_measured(each["run"]["state"]) for each in (a, b)]
        assert differences(*states, f"{name}:state") == []
    assert rows(one) == rows(other)


def without_measured(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's state without what no two runs have alike: the time and memory that monitors measured."""
    logged = state["callback_metrics"]
    kept = {
        name: x for name, x in logged.items() if not name.startswith(("throughput/", "memory/"))
    }
    # The outline is a hash of all the rest, also of those names.
    others = {name: x for name, x in state.items() if name != "outline"}
    if "inside_epoch" in others:
        inside = others["inside_epoch"]
        inside["state"] = without_measured(inside["state"])
        inside["entries"]["callbacks"].pop("RunTimer", None)
    return others | {"callback_metrics": kept}


def differences(a: Any, b: Any, where: str) -> list[str]:
    """Where two nested values differ; tensors must be equal bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{where}: keys {a.keys() ^ b.keys()}"] if a.keys() != b.keys() else []
        return found + [
            line
            for key in a.keys() & b.keys()
            for line in differences(a[key], b[key], f"{where}.{key}")
        ]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        found = [f"{where}: lengths"] if len(a) != len(b) else []
        pairs = enumerate(zip(a, b, strict=False))
        return found + [line for i, (x, y) in pairs for line in differences(x, y, f"{where}[{i}]")]
    same = (
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
    )
    return [] if same else [where]
