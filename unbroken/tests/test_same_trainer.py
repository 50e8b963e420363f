"""A Trainer with ExactCheckpoint is that Trainer: signals, callbacks and words of Lightning's mean
what they mean without it.
"""

from __future__ import annotations

import copy
import operator
import os
import pickle
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from unbroken import ExactCheckpoint
from unbroken.commands.runs.saved_run import SavedRun, find_runs
from unbroken.errors import UserError
from unbroken.loading import exact_form
from unbroken.machine import threads
from unbroken.stopping import ranks

from tests.commands import assert_same_run, checkpoint, run_ranks
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
    """Sends this process signals in the third step."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            for number in self.numbers:
                os.kill(os.getpid(), number)


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


class FailsThen(Sends):
    """Raises an error in the step in which it has sent a signal."""

    def on_train_batch_start(self, trainer: Trainer, *further: Any) -> None:
        super().on_train_batch_start(trainer, *further)
        if trainer.global_step == 2:
            raise RuntimeError("failed")


def test_a_script_that_catches_an_error_is_told_of_the_signal_before_it(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forgotten = "SIGTERM: an error ends the run, and it is not asked to stop any more."
    with pytest.raises(RuntimeError, match="failed"):
        trainer_of(ExactCheckpoint("r"), FailsThen(signal.SIGTERM)).fit(Regression())
    assert forgotten in capsys.readouterr().out
    # The next training is not asked to stop, and one that stops does not tell it.
    trainer_of(ExactCheckpoint("r2")).fit(Regression())
    with pytest.raises(SIGTERMException):
        trainer_of(ExactCheckpoint("r3"), Sends(signal.SIGTERM)).fit(Regression())
    assert forgotten not in capsys.readouterr().out


class InterruptsALine:
    """Sends Ctrl-C at the ``number``-th line that a script's end runs in the files of the callback
    and its signals: from the callback's ``teardown`` on. Given to ``sys.settrace``.
    """

    FILES = ("exact_checkpoint.py", "ending.py", "signals.py")

    def __init__(self, number: int) -> None:
        self.left = number
        self.is_at_the_end = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(self.FILES):
            return None
        if code.co_name == "teardown":
            self.is_at_the_end = True
        if event == "line" and self.is_at_the_end:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)
        return self


# With each line of the end: some 90 trainings.
@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_signal_is_lost_as_a_scripts_training_ends(workplace: Path, step: int) -> None:
    module = Regression()
    codes = set()
    for number in range(1, 1000, step):
        interrupts = InterruptsALine(number)
        trainer = trainer_of(ExactCheckpoint(f"r{number}"), limit_train_batches=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            sys.settrace(interrupts)
            trainer.fit(module)
        except SystemExit as error:
            codes.add(error.code)
        else:
            # It has ended before that line.
            assert interrupts.left > 0
            break
        finally:
            sys.settrace(None)
        assert checkpoint(Path(f"r{number}/last.ckpt"))["global_step"] == 1
    # Ours; and Lightning's for Ctrl-C, which the script has again for the last few lines. Where not
    # each line is tried, these may be left out.
    assert codes - {1} == {130}
    assert 1 in codes or step > 1


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


class Copies(Callback):
    """Copies all callbacks while they train."""

    copied: list[Callback]

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.copied = []
        self.copied = copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]


def test_callbacks_that_a_hook_copies_train_another_trainer(workplace: Path) -> None:
    copies = Copies()
    first = trainer_of(ExactCheckpoint("r"), copies)
    first.fit(Regression())
    second = Trainer(callbacks=copies.copied, **(QUIET | {"max_epochs": 2}))
    second.fit(Regression(), ckpt_path=second.checkpoint_callback.resume_from)  # type: ignore[union-attr]
    assert (first.global_step, second.global_step) == (6, 12)


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


@pytest.mark.parametrize(
    ("numbers", "is_asked"),
    [
        ([signal.SIGUSR1], True),
        # A step may last until the time limit comes.
        ([signal.SIGUSR1, signal.SIGTERM], True),
        ([signal.SIGTERM], False),
    ],
)
def test_slurms_signal_queues_a_script_again_and_it_resumes_without_a_path(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, numbers: list[int], is_asked: bool
) -> None:
    asked = queue(workplace, monkeypatch)
    plugins = [SLURMEnvironment(auto_requeue=is_asked)]
    keep = ExactCheckpoint("r")
    with pytest.raises(SIGTERMException):
        trainer_of(keep, Sends(*numbers), plugins=plugins).fit(Regression())
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


def test_last_of_the_users_own_model_checkpoint_is_found(workplace: Path) -> None:
    def make(epochs: int) -> Trainer:
        theirs = ModelCheckpoint("theirs", save_last=True)
        return trainer_of(ExactCheckpoint("r"), theirs, max_epochs=epochs)

    trainer = make(1)
    # A script that always says so trains anew the first time.
    trainer.fit(Regression(), ckpt_path="last")
    assert trainer.global_step == 6
    trainer.validate(ckpt_path="last", verbose=False)
    assert trainer.ckpt_path == str(workplace / "theirs/last.ckpt")
    longer = make(2)
    longer.fit(Regression(), ckpt_path="last")
    assert longer.ckpt_path == trainer.ckpt_path
    assert longer.global_step == 12
    shutil.rmtree("theirs")
    before = Path("r/last.ckpt").read_bytes()
    with pytest.raises(UserError, match='ckpt_path="last" finds checkpoints of a ModelCheckpoint'):
        make(3).fit(Regression(), ckpt_path="last")
    assert Path("r/last.ckpt").read_bytes() == before


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


def test_a_script_whose_run_is_saved_ends_well_without_its_digests(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("r/digests.csv").mkdir(parents=True)
    keep = ExactCheckpoint("r")
    trainer_of(keep).fit(Regression())
    assert checkpoint(keep.last_path)["global_step"] == 6
    assert "digests.csv could not be saved" in capsys.readouterr().out


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


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_a_script_with_a_rank_that_no_launcher_has_given_logs_and_saves(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    # Lightning has read it as it was imported.
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(ranks.ThisProcess, "is_alone", False)
    keep = ExactCheckpoint("r")
    trainer_of(keep, logger=CSVLogger("log"), log_every_n_steps=1).fit(Regression())
    line = f"{name}=1 of the environment is ignored: no launcher has started this process."
    assert line in capsys.readouterr().out.splitlines()
    assert keep.last_path.exists()
    assert list(Path("log").rglob("metrics.csv"))
    # It is the script's own.
    assert os.environ[name] == "1"


@pytest.mark.parametrize("argument", [{"enable_checkpointing": False}, {"barebones": True}])
def test_a_trainer_that_is_to_save_nothing_is_refused_with_our_name(
    workplace: Path, argument: dict[str, Any]
) -> None:
    keep = ExactCheckpoint("r")
    with pytest.raises(UserError, match="leave out what ExactCheckpoint is for"):
        Trainer(callbacks=[keep], accelerator="cpu", **argument)
    Trainer(accelerator="cpu", **argument)


class NoState:
    """A schedule that declares a state, and has none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...

    def state_dict(self) -> None: ...

    def load_state_dict(self, state: None) -> None: ...


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        return [optimizer], [NoState(optimizer)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


@pytest.mark.parametrize("changed", [False, True])
def test_a_schedule_whose_state_is_none_trains_and_resumes(workplace: Path, changed: bool) -> None:
    for epochs in (1, 2):
        keep = ExactCheckpoint("r", changed=changed)
        trainer = trainer_of(keep, max_epochs=epochs)
        trainer.fit(Scheduled(), ckpt_path=keep.resume_from)
        assert trainer.global_step == 6 * epochs


# The live loader: what the user's code finds in trainer.train_dataloader


class Indices(Dataset[Tensor]):
    """Sample ``i`` is ``[i]``."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Curriculum(Sampler[int]):
    """The easy samples, or all of them: an attribute says which."""

    def __init__(self) -> None:
        self.difficulty = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(range(24) if self.difficulty else [*range(12), *range(12)])


class Shorter(DataLoader[Any]):
    """Says how long an epoch is, and has a method and a property."""

    level = 1

    def __len__(self) -> int:
        return super().__len__() // 2

    @property
    def doubled(self) -> int:
        return 2 * self.level

    def harder(self) -> int:
        self.level += 1
        return self.level


class OwnLoader:
    """Inherits from nothing of PyTorch's."""

    sign = 1

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((2, 1), float(self.sign * batch)) for batch in range(3))


class Stateful(OwnLoader):
    """Knows where it is."""

    position = 0

    def __iter__(self) -> Iterator[Tensor]:
        for batch in range(self.position % 3, 3):
            self.position = batch + 1
            yield torch.full((2, 1), float(batch))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class StatefulAndLocked(Stateful):
    """Cannot be copied, so its state is not tried."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Negates(DataLoader[Any]):
    """Does more to each batch, in the way of PyTorch Geometric's loaders of neighbours."""

    def _get_iterator(self) -> Any:
        return map(torch.neg, super()._get_iterator())


class Endless(IterableDataset[Tensor]):
    """A stream that each worker reads to its end."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(number)]) for number in range(12))


def negated(samples: list[Tensor]) -> Tensor:
    return -torch.stack(samples)


def set_size_by_epoch(loader: Any, epoch: int) -> None:
    loader.batch_sampler.batch_size = (2, 4, 5)[epoch]


def set_size_once(loader: Any, epoch: int) -> None:
    if epoch == 1:
        loader.batch_sampler.batch_size = 4


def double_size(loader: Any, epoch: int) -> None:
    loader.batch_sampler.batch_size *= 2


def drop_last(loader: Any, epoch: int) -> None:
    loader.batch_sampler.batch_size = 5
    loader.batch_sampler.drop_last = epoch > 0


def set_difficulty(loader: Any, epoch: int) -> None:
    loader.sampler.difficulty = int(epoch > 0)


def set_collate(loader: Any, epoch: int) -> None:
    loader.collate_fn = negated if epoch > 0 else torch.stack


def set_sampler(loader: Any, epoch: int) -> None:
    if epoch > 0:
        loader.batch_sampler.sampler = range(23, -1, -1)


def set_sign(loader: Any, epoch: int) -> None:
    loader.sign = 1 - 2 * epoch


def set_own_object(loader: Any, epoch: int) -> None:
    """The user keeps the loader that he made, and changes that one."""
    made["loader"].collate_fn = negated if epoch > 0 else torch.stack


# The loader that the test has made last.
made: dict[str, Any] = {}


class Reads(LightningModule):
    """Changes its loader as an epoch begins, and trains on what it reads.

    Args:
        change: Called with the live loader and the epoch.
        moment: The hook in which it is called.
    """

    def __init__(
        self, change: Callable[[Any, int], None] | None, moment: str = "on_train_epoch_start"
    ) -> None:
        super().__init__()
        self.change = change
        self.moment = moment
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def change_at(self, moment: str) -> None:
        if self.change is not None and moment == self.moment:
            self.change(self.trainer.train_dataloader, self.current_epoch)

    def on_train_epoch_start(self) -> None:
        self.change_at("on_train_epoch_start")

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            self.change_at("second batch")

    def on_train_epoch_end(self) -> None:
        self.change_at("on_train_epoch_end")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch / 24).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Killed(Exception):
    """Ends a run, and nothing is saved any more."""


class Seen(Callback):
    """Notes all batches, and kills the run before one of an epoch."""

    def __init__(self, dies_in: tuple[int, int] | None = None) -> None:
        self.batches: list[tuple[int, list[float]]] = []
        self.dies_in = dies_in

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, place: int) -> None:
        if (trainer.current_epoch, place) == self.dies_in:
            raise Killed
        self.batches.append((trainer.current_epoch, batch[:, 0].tolist()))


def read_by(
    module: Reads,
    make: Callable[[], Any],
    keep: ExactCheckpoint | None,
    dies_in: tuple[int, int] | None = None,
    **flags: Any,
) -> list[tuple[int, list[float]]]:
    """Train for three epochs, on from the checkpoint if there is one; returns the batches."""
    seen = Seen(dies_in)
    callbacks = [seen] if keep is None else [seen, keep]
    further = {"enable_checkpointing": keep is not None, "max_epochs": 3, **flags}
    trainer = Trainer(callbacks=callbacks, **(QUIET | {"limit_train_batches": 1.0} | further))
    made["loader"] = make()
    with suppress(Killed):
        trainer.fit(module, made["loader"], ckpt_path=keep and keep.resume_from)
    return seen.batches


def plain_loader(workers: int = 0, kind: type[DataLoader[Any]] = DataLoader, **how: Any) -> Any:
    return kind(Indices(), num_workers=workers, **({"batch_size": 2} | how))


CHANGES: dict[str, tuple[Any, Any]] = {
    "its own length": (None, lambda workers: plain_loader(workers, Shorter)),
    "size by epoch": (set_size_by_epoch, plain_loader),
    "drop_last": (drop_last, lambda workers: plain_loader(workers, batch_size=5)),
    "sampler": (set_difficulty, lambda workers: plain_loader(workers, sampler=Curriculum())),
    "another sampler": (set_sampler, plain_loader),
    "collate_fn": (set_collate, plain_loader),
    "the user's own object": (set_own_object, plain_loader),
    "an own loader": (set_sign, lambda _: OwnLoader()),
    "an own iterator": (None, lambda workers: plain_loader(workers, Negates)),
    "a stream": (set_size_by_epoch, lambda n: DataLoader(Endless(), 2, num_workers=n)),
}


# Of these no checkpoint holds what it was changed to.
NOT_KEPT = ("another sampler", "collate_fn", "the user's own object", "an own loader")


@pytest.mark.daily(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_in_a_live_loader_counts_as_in_a_plain_trainer(
    workplace: Path, capsys: pytest.CaptureFixture[str], what: str, workers: int
) -> None:
    change, make = CHANGES[what]
    plain = read_by(Reads(change), lambda: make(workers), None)
    capsys.readouterr()
    kept = read_by(Reads(change), lambda: make(workers), ExactCheckpoint("r"))
    assert kept == plain
    said = capsys.readouterr().out.count("was changed in training: a resumed run has it only if")
    assert said == (what in NOT_KEPT)
    assert change is None or len({tuple(batch) for _, batch in plain}) > 3


def test_what_lightning_writes_into_a_loader_is_no_change_of_the_users(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As seed_everything(workers=True) leaves it
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    read_by(Reads(None), lambda: DataLoader(Endless(), 2), ExactCheckpoint("r"), max_epochs=1)
    assert made["loader"].worker_init_fn is not None
    assert "was changed in training" not in capsys.readouterr().out


def test_a_live_loader_is_one_of_the_users_class_with_its_methods_and_attributes(
    workplace: Path,
) -> None:
    told: list[Any] = []

    def look(loader: Any, epoch: int) -> None:
        told.extend([isinstance(loader, Shorter), type(loader).__name__, len(loader)])
        told.extend([loader.harder(), loader.doubled, type(loader.sampler).__name__])
        loader.note = epoch
        # A copy is the user's own again.
        told.append(type(copy.deepcopy(loader)) is Shorter)

    read_by(Reads(look), lambda: plain_loader(0, Shorter), ExactCheckpoint("r"), max_epochs=1)
    assert told == [True, "Shorter", 6, 2, 4, "SequentialSampler", True]
    loader = made["loader"]
    assert (loader.level, loader.note) == (2, 0)
    assert vars(loader).keys() == vars(plain_loader(0, Shorter)).keys() | {"level", "note"}
    assert [len(batch) for batch in loader] == [2] * 12


def test_a_hook_that_failed_in_an_earlier_cell_changes_nothing_in_later_loaders(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(Reads):
        def train_dataloader(self) -> Any:
            raise ValueError("not yet")

    methods = [DataLoader.__init__, DataLoader.__setattr__, BatchSampler.__init__]
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            Trainer(**QUIET).fit(Fails(None))
    assert "__old__init__" in vars(DataLoader)
    pickled: list[bytes] = []

    def keep(loader: Any, epoch: int) -> None:
        pickled.append(pickle.dumps(loader))

    read_by(Reads(keep), plain_loader, ExactCheckpoint("r"), max_epochs=1)
    assert pickled
    assert [DataLoader.__init__, DataLoader.__setattr__, BatchSampler.__init__] == methods
    assert "__old__init__" not in vars(DataLoader)
    assert "may not be exact" not in capsys.readouterr().out


@pytest.mark.parametrize("make", [OwnLoader, Stateful, lambda: plain_loader(0, Negates)])
def test_a_live_loader_without_an_exact_form_is_an_instance_of_the_users_class(
    workplace: Path, make: Callable[[], Any]
) -> None:
    told: list[bool] = []

    def look(loader: Any, epoch: int) -> None:
        # A copy is the user's own again, whose class is no other.
        told.extend([isinstance(loader, type(made["loader"])), isinstance(loader, Curriculum)])
        told.append(type(copy.deepcopy(loader)) is type(made["loader"]))

    read_by(Reads(look), make, ExactCheckpoint("r"), max_epochs=1)
    assert told == [True, False, True]


@pytest.mark.parametrize("make", [plain_loader, OwnLoader])
def test_behind_a_run_the_trainer_has_the_users_own_loaders(
    workplace: Path, make: Callable[[], Any]
) -> None:
    class Evaluates(Reads):
        def validation_step(self, *_: Any, dataloader_idx: int = 0) -> None: ...

        test_step = validation_step

    module = Evaluates(None)
    trainer = trainer_of(ExactCheckpoint("r"))
    first, second, third = make(), make(), make()
    trainer.fit(module, first, [second, third])
    assert trainer.train_dataloader is first
    assert all(map(operator.is_, trainer.val_dataloaders, (second, third)))
    trainer.test(module, second)
    assert trainer.test_dataloaders is second
    trainer.validate(module, third)
    assert trainer.val_dataloaders is third


@pytest.mark.parametrize("make", [plain_loader, OwnLoader])
def test_what_a_pickle_holds_of_a_live_loader_is_the_users_own(
    workplace: Path, make: Callable[[], Any]
) -> None:
    kinds: list[type] = []

    def look(loader: Any, epoch: int) -> None:
        kinds.append(type(pickle.loads(pickle.dumps(loader))))

    read_by(Reads(look), make, ExactCheckpoint("r"), max_epochs=1)
    assert kinds == [type(make())]


class SavesItself(Callback):
    """Lets Lightning write a checkpoint in a hook."""

    def __init__(self, hook: str, step: int) -> None:
        self.saves_at = (hook, step)

    def _save_in(self, trainer: Trainer, hook: str) -> None:
        if self.saves_at == (hook, trainer.global_step):
            trainer.save_checkpoint("theirs.ckpt")

    def on_train_batch_end(self, trainer: Trainer, *further: Any) -> None:
        self._save_in(trainer, "on_train_batch_end")

    def on_train_epoch_end(self, trainer: Trainer, *further: Any) -> None:
        self._save_in(trainer, "on_train_epoch_end")


@pytest.mark.daily(3)
@pytest.mark.parametrize("was_plain", [False, True])
@pytest.mark.parametrize("make", [Stateful, StatefulAndLocked])
@pytest.mark.parametrize(("hook", "step"), [("on_train_batch_end", 4), ("on_train_epoch_end", 3)])
def test_a_loader_goes_on_from_its_state_in_a_checkpoint_that_lightning_has_written(
    workplace: Path, hook: str, step: int, make: Callable[[], Any], was_plain: bool
) -> None:
    flags: dict[str, Any] = QUIET | {"limit_train_batches": 1.0, "max_epochs": 3}
    seen = Seen()
    first = [] if was_plain else [ExactCheckpoint("first")]
    Trainer(callbacks=[seen, SavesItself(hook, step), *first], **flags).fit(Reads(None), make())
    again = Seen()
    second = Trainer(callbacks=[again, ExactCheckpoint("second")], **flags)
    second.fit(Reads(None), make(), ckpt_path="theirs.ckpt")
    assert len(seen.batches) == 9
    assert again.batches == seen.batches[step:]


def test_no_class_is_announced_to_the_users_own_classes() -> None:
    announced: list[str] = []

    class Registered(DataLoader[Any]):
        def __init_subclass__(cls, *, name: str) -> None:
            announced.append(name)

    assert isinstance(exact_form(plain_loader(0, Registered), True, 0), Registered)
    assert announced == []


# What is changed, in which moment, and of which loader.
SCHEDULES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "size by epoch": (set_size_by_epoch, "on_train_epoch_start", {"shuffle": True}),
    "size once": (set_size_once, "on_train_epoch_start", {"shuffle": True}),
    "size doubled": (double_size, "on_train_epoch_start", {"shuffle": True, "workers": 2}),
    "size at the end": (set_size_once, "on_train_epoch_end", {"shuffle": True}),
    "size inside": (double_size, "second batch", {"shuffle": True}),
    "difficulty": (set_difficulty, "on_train_epoch_start", {"sampler": True}),
    "collate_fn": (set_collate, "on_train_epoch_start", {"shuffle": True}),
}
# The epoch and the batch before which the run dies: an epoch's first, and others.
KILLS = [(0, 3), (1, 2), (2, 0), (2, 1)]
OF_EVERY_DAY = [
    ("size by epoch", (2, 1)),
    ("size at the end", (2, 0)),
    ("size doubled", (2, 1)),
    ("size inside", (1, 2)),
    ("difficulty", (1, 2)),
    ("collate_fn", (2, 0)),
]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("schedule", "dies_in"),
    [
        pytest.param(*case, marks=() if case in OF_EVERY_DAY else pytest.mark.nightly)
        for case in product(SCHEDULES, KILLS)
    ],
)
def test_a_run_that_changes_its_loader_resumes_exactly(
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    schedule: str,
    dies_in: tuple[int, int],
) -> None:
    change, moment, options = SCHEDULES[schedule]

    def make() -> Any:
        own = {"sampler": Curriculum()} if "sampler" in options else {}
        return plain_loader(**{**options, **own})

    def train(folder: str, dies_in: tuple[int, int] | None = None) -> tuple[Any, Any]:
        module = Reads(change, moment)
        torch.manual_seed(3)
        # The last batches of an epoch make a step of their own: Lightning must know the last one.
        keep = ExactCheckpoint(folder, every="1")
        batches = read_by(module, make, keep, dies_in, accumulate_grad_batches=2)
        return batches, module.state_dict()

    whole, weights = train("whole")
    killed, _ = train("r", dies_in)
    assert 0 < len(killed) < len(whole)
    capsys.readouterr()
    rest, resumed = train("r")
    assert rest == whole[-len(rest) :]
    assert len(killed) + len(rest) - len(whole) in (0, 1)
    assert all(map(torch.equal, weights.values(), resumed.values()))
    assert "instead of" not in capsys.readouterr().out


class DrawsAsToldTheEpoch(Sampler[int]):
    """Lightning calls its ``set_epoch``, in a resumed run once more."""

    def __len__(self) -> int:
        return 24

    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(24).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Noisy(Reads):
    """Draws in its steps from the generator that the sampler draws from."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(dropout(batch / 24 + 1, 0.3)).square().mean()


@pytest.mark.daily(1)
@pytest.mark.parametrize("dies_in", [(1, 3), (2, 0)])
def test_what_a_sampler_draws_as_it_is_told_the_epoch_shifts_no_generator(
    workplace: Path, dies_in: tuple[int, int]
) -> None:
    def train(folder: str, dies_in: tuple[int, int] | None = None) -> tuple[Any, Any]:
        module = Noisy(None)
        torch.manual_seed(3)
        keep = ExactCheckpoint(folder, every="1")
        make = partial(plain_loader, sampler=DrawsAsToldTheEpoch())
        return read_by(module, make, keep, dies_in), module.state_dict()

    whole, weights = train("whole")
    train("r", dies_in)
    rest, resumed = train("r")
    assert rest == whole[-len(rest) :]
    assert all(map(torch.equal, weights.values(), resumed.values()))


class GrowsBatches(Regression):
    """A batch size by the epoch, set in the loader that the Trainer reads."""

    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        loader.batch_sampler.batch_size = 4 * 2**self.current_epoch


@pytest.mark.nightly
def test_two_ranks_whose_batches_grow_are_killed_and_go_on_bit_identically(
    workplace: Path,
) -> None:
    flags = ["--model", "tests.test_same_trainer.GrowsBatches", "--data", "null"]
    flags += ["--max_epochs", "3", "--accumulate_grad_batches", "3", "--checkpoint_every", "2"]
    flags += ["--logger", "false", "--monitors", "none", "--accelerator", "cpu"]
    flags += ["--report", "false"]
    reference = run_ranks("fit", *flags, "--run_name", "reference")
    assert reference.returncode == 0, reference.stderr
    # Epochs of 25, 13 and 7 batches are 9, 5 and 3 steps.
    ended = checkpoint(Path("checkpoints/reference/last.ckpt"))
    assert ended["global_step"] == 17
    assert run_ranks("tests.interrupted", "15", "SIGKILL", *flags, "--run_name", "r").returncode
    assert checkpoint(Path("checkpoints/r/last.ckpt"))["global_step"] in (14, 15)
    resumed = run_ranks("fit", "--run_name", "r", "--ckpt_path", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/r"))
