"""Promises 1, 4 and 10 in surroundings that nobody chose: a run goes on, or ends with one line."""

from __future__ import annotations

import fcntl
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.commands import (
    SMALL,
    TINY,
    checkpoint,
    command,
    complete,
    family,
    kill_group,
    run,
    start,
    wait_for,
)

nightly = pytest.mark.nightly


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


def fit(*arguments: str, shell: str = "{}", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``fit`` in a fresh interpreter; ``shell`` is a line around it."""
    line = shell.format(shlex.join(command("fit", *arguments)))
    environment = {**os.environ, **variables}
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, timeout=120)


def assert_one_line(done: subprocess.CompletedProcess[bytes], *parts: str) -> None:
    told = done.stderr.decode(errors="replace")
    assert done.returncode == 2, told
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert all(part in line for part in parts), line
    assert not Path("checkpoints").exists()


LONGER = [
    "--run_name",
    "r",
    "--ckpt_path",
    "last",
    "--max_epochs",
    "2",
]  # it says 1 → 2, with an arrow


@nightly
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_a_character(encoding: str) -> None:
    assert run("fit", *TINY, "--run_name", "r").returncode == 0
    resumed = fit(*LONGER, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert resumed.returncode == 0, resumed.stderr
    assert b"max_epochs: 1 ? 2" in resumed.stdout


def test_a_stream_that_cannot_show_a_character() -> None:
    ascii_only = "import sys; sys.stdout.reconfigure(encoding='ascii', errors='strict')"
    imports = "from numerals.fit import job as fit; from unbroken.cli import start"
    script = f"{ascii_only}; {imports}; start.run(fit.main)"
    assert run("fit", *TINY, "--run_name", "r").returncode == 0
    resumed = complete([sys.executable, "-c", script, *LONGER])
    assert resumed.returncode == 0, resumed.stderr
    assert "max_epochs: 1 ? 2" in resumed.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shell",
    [
        "{} >&- 2>&- <&-",
        *(pytest.param(line, marks=nightly) for line in ("{} >&-", "{} 2>&-", "{} | head -n 1")),
    ],
)
def test_closed_streams(shell: str) -> None:
    done = fit(*TINY, "--run_name", "r", shell=shell)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert Path("checkpoints/r/summary.json").exists()
    for path in Path("checkpoints/r").glob("*.ckpt"):
        checkpoint(path)  # nothing was printed into a file that got the number of stdout


@nightly
def test_a_refusal_with_closed_streams_is_exit_code_2() -> None:
    assert fit(*TINY, "--max_epochs", "x", shell="{} >&- 2>&-").returncode == 2


@nightly
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("fit -h > /dev/full", 1),
        ("fit -h | true", 0),
        ("test --max_epochs x 2> /dev/full", 2),
        ("fit > /dev/full", 0),
    ],
)
def test_what_cannot_be_written_ends_with_our_own_exit_codes(line: str, code: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    name, *words = line.split(" ", 1)
    flags = shlex.join(TINY) if name == "fit" else ""
    shell = f"set -o pipefail; {sys.executable} -m numerals.{name} {flags} {words[0]}"
    done = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert b"Exception" not in done.stderr
    assert b"Traceback" not in done.stderr
    # What is not printed ends no run.
    assert bool(list(Path("checkpoints").glob("*/summary.json"))) == (line == "fit > /dev/full")


def test_the_pictures_of_a_notebook_are_no_concern_of_a_run() -> None:
    environment = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    shown = run("fit", "--print_config", env=environment)
    assert (shown.returncode, shown.stderr) == (0, "")


@nightly
def test_no_proc() -> None:
    hide = ["unshare", "--mount", "bash", "-c"]
    if subprocess.run([*hide, "mount -t tmpfs none /proc"], capture_output=True).returncode:
        pytest.skip("hiding /proc needs the right to mount")
    line = f"mount -t tmpfs none /proc && {shlex.join(command('fit', *TINY, '--run_name', 'r'))}"
    done = subprocess.run([*hide, line], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path("checkpoints/r/summary.json").exists()


JUNK = {
    "RANK": "x",
    "LOCAL_RANK": "-1",
    "WORLD_SIZE": "two",
    "NODE_RANK": "-",
    "MASTER_PORT": "http",
    "SLURM_PROCID": "0x1",
    "SLURM_NTASKS": "4(x2)",
    "WANDB_MODE": "junk",
    "WANDB_FINISH_TIMEOUT": "soon",
}


@pytest.mark.parametrize(
    "name", ["RANK", *(pytest.param(name, marks=nightly) for name in JUNK if name != "RANK")]
)
def test_junk_in_a_variable_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("WANDB"):
        monkeypatch.setenv("WANDB_MODE", "offline")
    assert_one_line(fit(*TINY, **{name: JUNK[name]}), name, JUNK[name])


@nightly
def test_junk_in_our_own_variables() -> None:
    told = fit(*TINY, UNBROKEN_RANK_ZERO_DECISION="x", LOCAL_RANK="1")
    assert_one_line(told, "UNBROKEN_RANK_ZERO_DECISION", "'x'")
    done = fit(
        *TINY, UNBROKEN_RANK_ZERO_DECISION="x", UNBROKEN_OMP_NUM_THREADS="x", OMP_NUM_THREADS="x"
    )
    assert done.returncode == 0, done.stderr


@nightly
@pytest.mark.parametrize("gib", [2, 3, 4, 6])
def test_a_memory_limit_ends_a_run_with_one_line_or_not_at_all(gib: int) -> None:
    done = subprocess.run(
        command("fit", *TINY, "--model.network.hidden", "[20000, 20000]"),
        capture_output=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (gib * 2**30, gib * 2**30)),
    )
    told = done.stderr.decode(errors="replace")
    assert done.returncode in (0, 1, 2), told
    assert "Traceback" not in told, told[-1500:]


def test_a_closed_terminal_saves_the_step(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    process = start(command("fit", *SMALL, "--max_epochs", "1000", "--run_name", "r"), log)
    assert wait_for("train/loss", log, process)
    process.send_signal(signal.SIGHUP)
    began = time.monotonic()
    assert process.wait(30) == 143, log.read_text()[-1000:]
    assert time.monotonic() - began < 10
    assert checkpoint(Path("checkpoints/r/last.ckpt"))["run"]["state"]["place"] in (
        "batch",
        "validation",
        "epoch",
    )
    assert (
        "--run_name r --ckpt_path auto" in log.read_text()
    )  # a log file: nobody sees the terminal


@nightly
@pytest.mark.parametrize(("action", "epochs", "code"), [("IGN", 3, 0), ("DFL", 1000, 143)])
def test_a_terminal_that_is_gone_ends_no_run_that_ignores_it(
    action: str, epochs: int, code: int
) -> None:
    master, slave = os.openpty()

    def take_the_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, getattr(signal, f"SIG_{action}"))

    words = command("fit", *SMALL, "--max_epochs", str(epochs), "--run_name", "r")
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_the_terminal
    )
    os.close(slave)
    told = b""
    while b"epoch 1" not in told:
        told += os.read(master, 1 << 16)
    os.close(master)
    assert process.wait(60) == code
    assert Path("checkpoints/r/last.ckpt").exists()


@nightly
@pytest.mark.timeout(300)
def test_ranks_of_torchrun_end_with_their_agent(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    words += [
        "-m",
        "numerals.fit",
        *SMALL,
        "--max_epochs",
        "1000",
        "--run_name",
        "r",
        "--accelerator",
        "cpu",
    ]
    process = start(words, log, fresh=True)
    try:
        assert wait_for("train/loss", log, process)
        ranks = family(process.pid)
        assert len(ranks) == 2
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        while any(runs(rank) for rank in ranks):
            assert time.monotonic() - began < 20, "the ranks train on"
            time.sleep(0.05)
        assert "Traceback" not in log.read_text()
        assert checkpoint(Path("checkpoints/r/last.ckpt"))["global_step"] > 0
    finally:
        kill_group(process)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Failing(BaseHTTPRequestHandler):
    """Answers every request with 500, or not at all."""

    answers = True

    def do_POST(self) -> None:
        if not self.answers:
            time.sleep(120)
        self.send_response(500)
        self.end_headers()

    do_GET = do_PUT = do_POST  # noqa: N815 - names of http.server

    def log_message(self, *_: object) -> None:
        pass


@nightly
@pytest.mark.parametrize("answers", [True, False], ids=["answering 500", "hanging"])
def test_a_server_of_wandb_that_fails_costs_ten_seconds_at_most(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Server", (Failing,), {"answers": answers}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("WANDB_MODE")
    environ = {
        **os.environ,
        "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "WANDB_API_KEY": "0" * 40,
    }
    log = tmp_path / "log.txt"
    process = start(command("fit", *SMALL, "--run_name", "r"), log, env=environ)
    try:
        assert wait_for("epoch 3/3", log, process)
        began = time.monotonic()
        assert process.wait(60) == 0, log.read_text()[-2000:]
        assert time.monotonic() - began < 10, log.read_text()[-2000:]
        assert "Traceback" not in log.read_text()
    finally:
        server.shutdown()
        shutil.rmtree("checkpoints", ignore_errors=True)


def test_an_error_beside_a_loaders_workers_ends_the_process(workplace: Path) -> None:
    raises = "from lightning.pytorch import Callback\n\n\nclass Breaks(Callback):\n"
    raises += (
        "    def on_validation_batch_start(self, *args):\n        raise ValueError('broken')\n"
    )
    Path("breaks.py").write_text(raises)
    flags = [
        "--data.source",
        "sample",
        "--data.num_workers",
        "2",
        "--trainer.callbacks",
        "breaks.Breaks",
    ]
    words = [
        sys.executable,
        "-m",
        "numerals.fit",
        *flags,
        "--limit_train_batches",
        "3",
        "--max_epochs",
        "2",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parent}:.",
        "WANDB_MODE": "disabled",
    }
    ended = complete(words, timeout=60, env=environment)
    assert (ended.returncode, "ValueError: broken" in ended.stderr) == (1, True), ended.stderr
