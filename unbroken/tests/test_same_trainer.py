"""A Trainer with ExactCheckpoint is that Trainer: signals, callbacks and words of Lightning's mean
what they mean without it.
"""

from __future__ import annotations

import copy
import os
import signal
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader
from unbroken import ExactCheckpoint
from unbroken.commands.runs.saved_run import SavedRun, find_runs
from unbroken.errors import UserError
from unbroken.machine import threads

from tests.commands import checkpoint
from tests.plain_module import Regression, rows

# Lightning's advice on workers and lengths is not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_train_batches": 6,
}


class Sends(Callback):
    """Sends this process a signal in the third step."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), self.number)


class Predicts(Regression):
    """Notes who handles SIGTERM while it predicts."""

    handler: Any = None

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(8, 1), batch_size=4)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


def trainer_of(keep: ExactCheckpoint, *further: Callback, **flags: Any) -> Trainer:
    return Trainer(callbacks=[keep, *further], **({"max_epochs": 1} | QUIET | flags))


def test_sigterm_saves_calls_the_scripts_handler_and_is_lightnings_exception(
    workplace: Path,
) -> None:
    ran: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ran.append(number))
    keep = ExactCheckpoint("r")
    trainer = trainer_of(keep, Sends(signal.SIGTERM))
    with pytest.raises(SIGTERMException) as stopped:
        trainer.fit(Regression())
    assert stopped.value.code == 143
    assert ran == [signal.SIGTERM]
    assert trainer.received_sigterm
    assert checkpoint(keep.last_path)["global_step"] == 3


def test_what_a_scripts_handler_raises_ends_the_run_after_the_save(workplace: Path) -> None:
    def leave(*_: Any) -> None:
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, leave)
    keep = ExactCheckpoint("r")
    with pytest.raises(SystemExit) as ended:
        trainer_of(keep, Sends(signal.SIGTERM)).fit(Regression())
    assert ended.value.code == 7
    assert checkpoint(keep.last_path)["global_step"] == 3
    assert signal.getsignal(signal.SIGTERM) is leave


def test_lightnings_handlers_are_back_after_a_fit(workplace: Path) -> None:
    trainer = trainer_of(ExactCheckpoint("r"))
    module = Predicts()
    trainer.fit(module)
    trainer.predict(module)
    assert callable(module.handler)
    assert "register_signal_handlers" not in vars(trainer._signal_connector)


def test_nothing_of_ours_stays_among_the_callbacks(workplace: Path) -> None:
    trainer = trainer_of(ExactCheckpoint("r"))
    before = list(trainer.callbacks)  # type: ignore[attr-defined]
    trainer.fit(Regression())
    assert trainer.callbacks == before  # type: ignore[attr-defined]


def test_a_trainer_and_its_callbacks_are_copied_before_and_after_a_fit(workplace: Path) -> None:
    trainer = trainer_of(ExactCheckpoint("r"))
    copy.deepcopy(trainer)
    copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]
    trainer.fit(Regression())
    copy.deepcopy(trainer)
    (copied,) = copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]
    assert copied.best_model_path == str(workplace / "r/best.ckpt")


class TrainsInside(Callback):
    """A plain Trainer in a hook, which gets SIGTERM."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        Trainer(
            max_epochs=1,
            callbacks=[Sends(signal.SIGTERM)],
            enable_checkpointing=False,
            **QUIET,
        ).fit(Regression())


def test_sigterm_for_a_trainer_inside_a_hook_ends_the_script_with_its_code(workplace: Path) -> None:
    with pytest.raises(SIGTERMException) as stopped:
        trainer_of(ExactCheckpoint("r"), TrainsInside()).fit(Regression())
    assert stopped.value.code == 143


def queue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SLURM job of one task; returns the file that notes what ``scontrol`` was asked."""
    asked = folder / "asked"
    scontrol = folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >>{asked}\n')
    scontrol.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    values = {"JOB_ID": "77", "NTASKS": "1", "NTASKS_PER_NODE": "1", "NODELIST": "localhost"}
    values |= {"JOB_NAME": "job", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "STEP_ID": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return asked


@pytest.mark.parametrize("is_asked", [True, False])
def test_slurms_signal_queues_a_script_again_and_it_resumes_without_a_path(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    asked = queue(workplace, monkeypatch)
    plugins = [SLURMEnvironment(auto_requeue=is_asked)]
    keep = ExactCheckpoint("r")
    number = signal.SIGUSR1 if is_asked else signal.SIGTERM
    with pytest.raises(SIGTERMException):
        trainer_of(keep, Sends(number), plugins=plugins).fit(Regression())
    assert checkpoint(keep.last_path)["global_step"] == 3
    if not is_asked:
        assert not asked.exists()
        return
    assert asked.read_text() == "requeue 77\n"
    again = trainer_of(ExactCheckpoint("r"), plugins=plugins)
    steps: list[int] = []
    monkeypatch.setattr(
        Regression, "on_train_batch_start", lambda self, *_: steps.append(self.global_step)
    )
    again.fit(Regression())
    assert steps == [3, 4, 5]


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_last_is_refused_before_anything_is_replaced(workplace: Path, call: str) -> None:
    trainer_of(ExactCheckpoint("r")).fit(Regression())
    before = Path("r/last.ckpt").read_bytes()
    trainer = trainer_of(ExactCheckpoint("r"))
    with pytest.raises(UserError, match=r'ckpt_path="last" finds .*keep\.resume_from'):
        getattr(trainer, call)(Predicts(), ckpt_path="last")
    assert Path("r/last.ckpt").read_bytes() == before
    assert trainer.global_step == 0


def test_best_is_ours(workplace: Path) -> None:
    module = Regression()
    trainer = trainer_of(ExactCheckpoint("r"))
    trainer.fit(module)
    assert trainer.validate(module, ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == str(workplace / "r/best.ckpt")


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp_fork",
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("ddp_notebook", "ddp_spawn")),
    ],
)
def test_ranks_that_are_functions_are_refused_at_the_start(workplace: Path, strategy: str) -> None:
    trainer = trainer_of(ExactCheckpoint("r"), devices=2, strategy=strategy)
    with pytest.raises(Exception, match="ExactCheckpoint does not work where ranks are functions"):
        trainer.fit(Regression())
    assert not Path("r").exists()


class Asked(Callback):
    """Counts how often it is asked what it saves."""

    def __init__(self) -> None:
        self.asked = 0

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        self.asked += 1


def test_what_is_saved_is_asked_for_at_a_save_and_never_else(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Asked()
    saves: list[int] = []
    save = Trainer.save_checkpoint
    monkeypatch.setattr(
        Trainer, "save_checkpoint", lambda *args, **kwargs: (saves.append(1), save(*args, **kwargs))
    )
    trainer_of(ExactCheckpoint("r"), counts, max_epochs=3).fit(Regression())
    assert counts.asked == len(saves) > 2


def test_a_scripts_run_that_has_ended_is_listed_as_finished(workplace: Path) -> None:
    trainer_of(ExactCheckpoint("ended")).fit(Regression())
    with pytest.raises(SIGTERMException):
        trainer_of(ExactCheckpoint("stopped"), Sends(signal.SIGTERM)).fit(Regression())
    assert {run.name: run.state for run in find_runs(workplace)} == {
        "ended": "finished",
        "stopped": "interrupted",
    }
    # One that was to train on, and is stopped, has not ended.
    longer = trainer_of(ExactCheckpoint("ended"), StopsSecondEpoch(), max_epochs=2)
    with pytest.raises(SIGTERMException):
        longer.fit(Regression(), ckpt_path="ended/last.ckpt")
    assert SavedRun(workplace / "ended").state == "interrupted"


class StopsSecondEpoch(Callback):
    """Sends this process SIGTERM in the second epoch."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class NamesThreads(Callback):
    """Notes the names of the threads of this process."""

    names: frozenset[str] = frozenset()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.names = frozenset(each.name for each in threading.enumerate())


@pytest.mark.skipif(sys.platform != "linux", reason="threads are watched on Linux alone")
def test_a_script_watches_its_waiting_threads_as_long_as_it_trains(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    names = NamesThreads()
    trainer_of(ExactCheckpoint("r"), names).fit(Regression())
    assert "waiting" in names.names
    watching = [each for each in threading.enumerate() if each.name == "waiting"]
    for thread in watching:
        thread.join(5)
    assert not any(thread.is_alive() for thread in watching)


def test_a_script_in_a_container_computes_with_as_many_threads_as_it_has_cores(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "available_cores", lambda: 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        trainer_of(ExactCheckpoint("r")).fit(Regression())
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("argument", [{"enable_checkpointing": False}, {"barebones": True}])
def test_a_trainer_that_is_to_save_nothing_is_refused_with_our_name(
    workplace: Path, argument: dict[str, Any]
) -> None:
    keep = ExactCheckpoint("r")
    with pytest.raises(UserError, match="leave out what ExactCheckpoint is for"):
        Trainer(callbacks=[keep], accelerator="cpu", **argument)
    Trainer(accelerator="cpu", **argument)
