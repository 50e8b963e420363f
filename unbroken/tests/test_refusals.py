"""Errors of Lightning and torch that a user can mend are one line; the user's own keep their
traceback.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, get_worker_info
from unbroken.cli import shown_warnings, start
from unbroken.cli.refusals import EXCHANGES, RESTORING, refusals_as_errors
from unbroken.cli.start import exit_code
from unbroken.errors import UserError

from tests import commands
from tests.commands import complete
from tests.plain_module import Regression, rows
from tests.typed_settings import Numbers, Typed


class Dies:
    """A dataset whose worker is killed, as the system does where memory is used up."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


KILLED_WORKER = """
import sys
from torch.utils.data import DataLoader
from unbroken.cli.refusals import EXCHANGES, RESTORING, refusals_as_errors
from unbroken.cli.start import exit_code
from tests.test_refusals import Dies

def main(argv):
    with refusals_as_errors(None, HAS_BEGUN):
        list(DataLoader(Dies(), num_workers=1, multiprocessing_context="fork"))

sys.exit(exit_code(main, []))
"""


def test_a_worker_that_is_killed_while_it_sends_a_batch_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = iter(DataLoader([1, 2]))

    def is_cut_off() -> None:
        raise EOFError

    monkeypatch.setattr(loader, "_next_data", is_cut_off)
    assert exit_code(lambda _: next(loader), []) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: a process that loads data has died (EOFError).")
    assert told.count("\n") == 1


def test_an_error_of_a_dead_worker_while_another_one_is_told_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(error: BaseException) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(start.traceback, "format_exception", interrupted)
    assert start.report(KeyError("x")) == 2
    assert (
        "a process that loads data has died (DataLoader worker (pid 7)" in capsys.readouterr().err
    )


ENDS = """
import os, sys
from unbroken.cli.start import exit_code

def breaks_a_pipe(argv):
    reading, writing = os.pipe()
    os.close(reading)
    os.write(writing, b"x")

def prints(argv):
    for _ in range(100_000):
        print("a line")

def leaves(argv):
    sys.exit("run prepare.py first")

code = exit_code(vars()[sys.argv[1]], [])
os._exit(code)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no /bin/sh")
@pytest.mark.parametrize(
    ("what", "code", "told"),
    [
        ("breaks_a_pipe", 1, "BrokenPipeError"),
        ("prints", 0, ""),
        ("leaves", 1, "run prepare.py first"),
    ],
)
def test_only_a_reader_of_stdout_that_has_ended_is_no_error(
    what: str, code: int, told: str
) -> None:
    command = shlex.join([sys.executable, "-c", ENDS, what])
    line = f"{{ {command}; echo code $? >&2; }} | head -1"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith(f"code {code}\n")
    assert told in done.stderr
    assert ("Traceback" in done.stderr) == (what == "breaks_a_pipe")


def test_a_broken_pipe_is_an_error_where_stdout_is_no_stream_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(_: list[str]) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert exit_code(breaks, []) == 1


MEETS = """
import os, sys
from torch import distributed
from unbroken.cli.start import exit_code

rank = int(sys.argv[1])

def main(argv):
    distributed.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=2)
    distributed.barrier()
    if rank == 0:
        os._exit(143)
    distributed.barrier()

sys.exit(exit_code(main, []))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a file's address has another form there")
def test_the_end_of_another_rank_is_told_in_one_line(tmp_path: Path) -> None:
    ranks = []
    for rank in ("0", "1"):
        words = [sys.executable, "-c", MEETS, rank, str(tmp_path / "store")]
        ranks.append(commands.start(words, tmp_path / f"{rank}.txt"))
    assert [rank.wait(60) for rank in ranks] == [143, 1]
    (line,) = (tmp_path / "1.txt").read_text().splitlines()
    assert line.startswith("error: another process of this run has ended")


@pytest.mark.daily(1)
@pytest.mark.parametrize("has_begun", ["None", "lambda: True", "lambda: False"])
def test_a_killed_worker_is_told_in_one_line(has_begun: str) -> None:
    # In a process of its own: torch raises from a signal handler, wherever the process is then.
    code = KILLED_WORKER.replace("HAS_BEGUN", has_begun)
    done = complete([sys.executable, "-c", code])
    assert done.returncode == 2, done.stderr
    assert "error: a process that loads data has died" in done.stderr
    assert "--data.num_workers" in done.stderr


def raise_as(module: str, error: Exception) -> None:
    """Raise an error from a function of a module of that name."""
    names: dict[str, Any] = {"__name__": module, "error": error}
    exec("def work(): raise error", names)
    names["work"]()


class CannotBeSent:
    """A batch for which there is no room in shared memory."""

    def __reduce__(self) -> Any:
        text = (
            "unable to allocate shared memory(shm) for file </torch_7_1>: No space left on device"
        )
        raise RuntimeError(f"{text} (28)")


UNSENT_BATCH = """
import sys
from torch.utils.data import DataLoader
from unbroken.cli.refusals import EXCHANGES, RESTORING, refusals_as_errors
from unbroken.cli.start import exit_code
from unbroken.loading import exact_form
from tests.test_refusals import CannotBeSent

def main(argv):
    plain = DataLoader([1, 2], num_workers=1, collate_fn=lambda _: CannotBeSent(),
                       multiprocessing_context="fork")
    with refusals_as_errors(None, lambda: True):
        list(exact_form(plain, training=True, seed=0))

sys.exit(exit_code(main, []))
"""


def test_a_batch_that_finds_no_shared_memory_ends_the_run_in_one_line() -> None:
    done = complete([sys.executable, "-c", UNSENT_BATCH], timeout=30)
    assert done.returncode == 2, done.stderr
    assert "error: the processes that load data need more shared memory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's"
        " workers are out of shared memory. Please try to raise your shared memory limit.",
        "unable to allocate shared memory(shm) for file </torch_7_1>: No space left on device (28)",
        "unable to write to file </torch_7_1_0>: No space left on device (28)",
    ],
)
def test_too_little_shared_memory_is_told_with_what_helps(text: str) -> None:
    told = pytest.raises(UserError, match="more shared memory than /dev/shm has")
    with told, refusals_as_errors(None, lambda: True):
        raise_as("torch.utils.data.dataloader", RuntimeError(text))


def test_the_same_text_of_the_users_own_code_keeps_its_traceback() -> None:
    told = pytest.raises(RuntimeError, match="out of shared memory")
    with told, refusals_as_errors(Path("x.ckpt"), lambda: True):
        raise_as("mine", RuntimeError("out of shared memory"))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
class NamesNoArguments(Regression):
    """Gives the batch size of its loader by its place."""

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.net(x)
        return answer

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(8, 0), 4)


def test_a_loader_that_lightning_cannot_predict_with_is_told_what_helps() -> None:
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with (
        pytest.raises(UserError, match="as in DataLoader"),
        refusals_as_errors(None),
    ):
        trainer.predict(NamesNoArguments())


class LeavesOneOut(Regression):
    """Its steps give no gradient to one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def test_a_step_that_leaves_parameters_out_is_told_the_strategy_for_it(workplace: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy="ddp",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    try:
        with (
            pytest.raises(UserError, match="Add --strategy ddp_find_unused_parameters_true"),
            refusals_as_errors(None, lambda: True),
        ):
            trainer.fit(LeavesOneOut())
    finally:
        dist.destroy_process_group()


def test_several_ranks_of_lazy_layers_are_refused_with_what_helps(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with (
            pytest.raises(UserError, match="several ranks cannot train lazy layers"),
            refusals_as_errors(None, lambda: False),
        ):
            DistributedDataParallel(nn.LazyLinear(1))
    finally:
        dist.destroy_process_group()


def test_a_number_of_workers_that_suits_an_idle_machine_is_not_advised_against(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch counts the cores that are free at the moment."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)

    def warned() -> list[str]:
        DataLoader([1], num_workers=2)
        return [str(each.message) for each in found]

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert "suggested max number of worker" in warned()[0]
        found.clear()
        shown_warnings.silence_unfounded_advice()
        assert warned() == []


def test_a_metric_that_nobody_logs_is_told_in_any_phase() -> None:
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[EarlyStopping("val/nowhere")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    told = pytest.raises(UserError, match=r"val/nowhere.*which is not available")
    with told, refusals_as_errors(None, lambda: True):
        trainer.fit(Typed(), Numbers())


@pytest.mark.nightly
def test_a_library_s_warning_is_one_line_without_the_path_of_its_file() -> None:
    code = """
        from unbroken.cli.start import prepare_process, run
        prepare_process("__main__")
        import warnings
        from lightning.pytorch.utilities.rank_zero import rank_zero_warn

        def main(argv):
            warnings.warn("first\\n  line (Triggered internally at /pytorch/aten/x.cpp:12.)")
            rank_zero_warn("second")

        run(main)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("PYTHONWARNINGS", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "warning: first line\nwarning: second\n")


def test_our_own_warning_may_have_several_lines_and_each_is_shown_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_warnings, "SHOWN", set())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown_warnings.show_in_one_line()
        ours = str(shown_warnings.PACKAGE / "data" / "mnist.py")
        warnings.showwarning("one\ntwo", UserWarning, ours, 1)
        warnings.showwarning("one\ntwo", UserWarning, "/elsewhere.py", 1)
        warnings.showwarning("one\ntwo", UserWarning, "/elsewhere.py", 2)  # not shown again
    assert capsys.readouterr().err == "warning: one\ntwo\nwarning: one two\n"


def raised_in(module: str, further: Any = None) -> Any:
    """A function of a module of this name, which calls another one, or raises what ranks raise
    where one of them has died.
    """
    code = "def function():\n    further()\n"
    if further is None:
        code = "def function():\n    raise RuntimeError('Connection closed by peer')\n"
    variables: dict[str, Any] = {"__name__": module, "further": further}
    exec(code, variables)
    return variables["function"]


@pytest.mark.parametrize("kind", [RuntimeError, UserError])
def test_an_exchange_of_ranks_that_fails_says_nothing_of_a_checkpoint(
    kind: type[Exception],
) -> None:
    # An error of a weight's shape is one of the checkpoint, wherever it is loaded.
    where = EXCHANGES if kind is RuntimeError else "torch.nn.modules.module"
    with pytest.raises(kind), refusals_as_errors(Path("last.ckpt"), lambda: False):
        raised_in(RESTORING, raised_in(where))()
