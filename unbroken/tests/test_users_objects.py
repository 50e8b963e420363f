"""What the user's objects hold comes back wherever it is held, or is told at a save."""

from __future__ import annotations

import copy
import enum
import io
import itertools
import random
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from unbroken import ExactCheckpoint
from unbroken.checkpoint.following import Best
from unbroken.checkpoint.not_exact import what_is_not_exact
from unbroken.monitors import LogLastStep
from unbroken.parts.held import held_by_users
from unbroken.parts.trainer_settings import TrainerSettings
from unbroken.parts.users_objects import UsersObjects
from unbroken.storage.savable import made_plain

from tests.plain_module import Regression


class Average:
    """Averages weights, as an object of a package that is no layer."""

    # Of no module that is imported: so its class is not the user's own.
    __module__ = "averages.of_somebody"

    def __init__(self, decay: float = 0.5) -> None:
        self.decay = decay
        self.value = torch.zeros(2)

    def update(self, value: float) -> None:
        self.value = self.value * self.decay + value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Engine:
    """Holds an object with a state, and has none itself."""

    __module__ = "averages.of_somebody"

    def __init__(self) -> None:
        self.accountant = Average()
        self.scale = 1.0


class Module(LightningModule):
    """Holds objects of a package at many places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.averages = [Average(), {"slow": Average()}]
        self.engine = Engine()
        self.own = torch.optim.Adam(self.net.parameters(), 0.1)
        self.boost = 3.0


class Teaches(Callback):
    """Holds a teacher and an average."""

    def __init__(self) -> None:
        self.teacher = nn.Linear(1, 1)
        self.average = Average()


class Other(Teaches):
    """Another callback that does so."""


def trainer_of(module: LightningModule, *callbacks: Callback) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[*callbacks]
    )
    trainer.strategy.connect(module)
    module.trainer = trainer
    return trainer


def begun(trainer: Trainer, undeclared: bool = True) -> UsersObjects:
    """The part, as a training begins."""
    part = UsersObjects(undeclared)
    part.fit_starts(trainer)
    part.begin(trainer)
    return part


def saved(part: UsersObjects, trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds."""
    value: dict[str, Any] = made_plain(part.take(trainer), "objects")
    return value


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said."""
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_declared_state_comes_back_wherever_it_is_held() -> None:
    before = trainer_of(Module(), Teaches())
    before.datamodule = LightningDataModule()  # type: ignore[attr-defined]
    before.datamodule.pool = SimpleNamespace(average=Average())  # type: ignore[attr-defined]
    part = begun(before)
    module: Any = before.lightning_module
    module.averages[0].update(1.0)
    module.averages[1]["slow"].update(2.0)
    module.engine.accountant.update(3.0)
    before.callbacks[0].average.update(4.0)  # type: ignore[attr-defined]
    before.datamodule.pool.average.update(5.0)  # type: ignore[attr-defined]
    module.net(torch.ones(1, 2)).sum().backward()
    module.own.step()
    value = saved(part, before)
    assert set(value["declared"]) == {
        *("module.averages.0", "module.averages.1.slow", "module.engine.accountant"),
        *("module.own", "callbacks.Teaches.0.average", "data.pool.average"),
    }

    after = trainer_of(Module(), Teaches())
    after.datamodule = LightningDataModule()  # type: ignore[attr-defined]
    after.datamodule.pool = SimpleNamespace(average=Average())  # type: ignore[attr-defined]
    begun(after).give_back(after, value)
    there: Any = after.lightning_module
    found = [
        there.averages[0],
        there.averages[1]["slow"],
        there.engine.accountant,
        after.callbacks[0].average,  # type: ignore[attr-defined]
        after.datamodule.pool.average,  # type: ignore[attr-defined]
    ]
    assert [each.value[0].item() for each in found] == [1.0, 2.0, 3.0, 4.0, 5.0]
    moments = [each["exp_avg"] for each in there.own.state.values()]
    assert len(moments) == 2
    assert torch.equal(moments[0], next(iter(module.own.state.values()))["exp_avg"])


def test_a_name_does_not_depend_on_which_other_callbacks_take_part() -> None:
    before = trainer_of(Module(), Other(), Teaches())
    part = begun(before)
    callback: Any = before.callbacks[1]  # type: ignore[attr-defined]
    with torch.no_grad():
        callback.teacher.weight.fill_(7.0)
    callback.average.update(4.0)
    value = saved(part, before)

    after = trainer_of(Module(), Teaches())
    begun(after).give_back(after, value)
    callback = after.callbacks[0]  # type: ignore[attr-defined]
    assert callback.teacher.weight.item() == 7.0
    assert callback.average.value[0] == 4.0


def test_what_two_hold_comes_back_where_one_of_them_is_left_out() -> None:
    shared = Average()
    one = Other()
    two = Teaches()
    two.average = one.average = shared
    two.teacher = one.teacher
    before = trainer_of(Module(), one, two)
    part = begun(before)
    shared.update(4.0)
    with torch.no_grad():
        one.teacher.weight.fill_(7.0)
    value = saved(part, before)

    after = trainer_of(Module(), Teaches())
    begun(after).give_back(after, value)
    callback: Any = after.callbacks[0]  # type: ignore[attr-defined]
    assert callback.average.value[0] == 4.0
    assert callback.teacher.weight.item() == 7.0


def test_what_lightning_or_a_loader_keeps_is_not_taken_twice() -> None:
    class Keeps(Callback):
        def __init__(self, optimizer: Any, dataset: Any) -> None:
            self.optimizer = optimizer
            self.dataset = dataset

        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    class Counts(TensorDataset):
        def state_dict(self) -> dict[str, Any]:
            return {"place": 3}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    module = Module()
    dataset = Counts(torch.zeros(4))
    trainer = trainer_of(module, Keeps(module.own, dataset))
    trainer.strategy.optimizers = [module.own]
    trainer.fit_loop._combined_loader = SimpleNamespace(  # type: ignore[assignment]
        iterables=DataLoader(dataset)
    )
    names = held_by_users(trainer).declared
    assert set(names) == {
        "module.averages.0",
        "module.averages.1.slow",
        "module.engine.accountant",
    }


def test_an_entry_that_is_no_plain_data_is_left_out_and_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = Module()
    trainer = trainer_of(module)
    module.averages = [OddState()]
    part = begun(trainer)
    value = saved(part, trainer)
    assert value["declared"]["module.averages.0"] == {"count": 2}
    assert "the state of module.averages.0.graph is not kept" in told(capsys)
    saved(part, trainer)
    assert told(capsys) == ""


class OddState:
    """Has a state with an object in it."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 2, "graph": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_an_attribute_that_training_has_deleted_is_deleted_again() -> None:
    before = trainer_of(Module())
    part = begun(before)
    del before.lightning_module.boost
    value = saved(part, before)
    after = trainer_of(Module())
    again = begun(after)
    again.give_back(after, value)
    assert not hasattr(after.lightning_module, "boost")
    assert saved(again, after)["attributes"] == value["attributes"], "the next resume needs it"


class Scaler:
    """Counts in an object of a package, without a state."""

    __module__ = "scalers.of_somebody"

    def __init__(self) -> None:
        self.seen = 0
        self.sums = torch.zeros(2)


def test_what_changes_in_an_object_of_a_package_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    module = Module()
    module.helper = SimpleNamespace(scaler=Scaler(), still=Scaler())
    trainer = trainer_of(module)
    part = begun(trainer)
    saved(part, trainer)
    assert told(capsys) == ""
    module.helper.scaler.sums += 1
    saved(part, trainer)
    text = told(capsys)
    assert "module.helper.scaler changes in training" in text
    assert "its class is Scaler" in text
    assert "still" not in text


class Pool(Dataset[Any]):
    """Grows while training."""

    def __init__(self) -> None:
        self.rows = [1.0]

    def __getitem__(self, index: int) -> float:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


def test_a_data_set_that_grows_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    module = Module()
    module.pool = Pool()
    trainer = trainer_of(module)
    part = begun(trainer)
    saved(part, trainer)
    assert told(capsys) == ""
    module.pool.rows.append(2.0)
    saved(part, trainer)
    assert "module.pool changes in training" in told(capsys)


class Watches(Callback):
    """Changes its attributes in many ways."""

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[float] = []
        self.best: float | None = None
        self.epoch = 0
        self.begun = 0.0
        self.file: Any = None
        self.still = 1
        self.scaler = Scaler()

    def on_train_epoch_start(self, *_: Any) -> None:
        # A resumed run sets it again.
        self.epoch += 1

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps += 1
        self.losses.append(1.0)
        self.best = 0.5
        self.begun = time.perf_counter()
        self.file = self.file or io.StringIO()
        self.scaler.sums += 1
        trainer.train_dataloader.dataset.taken += 1


class WatchesAndSaves(Watches):
    """Speaks for itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class Rows(Dataset[Any]):
    """Rows of numbers that count what a callback tells them, and keep what they have made."""

    def __init__(self) -> None:
        self.taken = 0
        self.made: dict[int, Any] = {}
        self.length: int | None = None

    def __getitem__(self, index: int) -> Any:
        return self.made.setdefault(index, torch.ones(2))

    def __len__(self) -> int:
        self.length = 8
        return self.length


class Learns(Module):
    """Trains on rows that only its loader holds."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).mean()
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), 4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


@pytest.mark.parametrize("callback", [Watches, WatchesAndSaves])
def test_what_callbacks_and_data_sets_keep_in_attributes_is_told_at_the_first_save(
    callback: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback(), ExactCheckpoint(tmp_path)],
    )
    trainer.fit(Learns())
    lines = [line for line in told(capsys).splitlines() if "begins anew" in line]
    expected = [
        "a resumed run begins anew with train_dataloader.dataset.taken, which changes in training"
        " and which a checkpoint does not hold (its class is int). Let a sample be a function of"
        " its key and the epoch alone."
    ]
    if callback is Watches:
        expected.insert(
            0,
            "a resumed run begins anew with callbacks.Watches.0.steps, which changes in training"
            " and which a checkpoint does not hold (its class is int; best, losses as well). Give"
            " it in the callback's state_dict, and take it back in its load_state_dict.",
        )
    assert lines == expected


class Patient(EarlyStopping):
    """Counts, beside what Lightning's class has and saves."""

    checks = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.checks += 1


class Keeps(ModelCheckpoint):
    """Has nothing of its own."""


class Averages(WeightAveraging):
    """Averages after each epoch."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


def test_of_a_class_derived_from_lightnings_only_what_it_adds_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = Patient("train_loss", check_on_train_epoch_end=True, check_finite=False)
    keep = Keeps(tmp_path / "own", monitor="train_loss", save_top_k=2)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=3,
        limit_train_batches=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[stop, keep, Averages(), ExactCheckpoint(tmp_path / "run")],
    )
    trainer.fit(Regression())
    assert keep.best_k_models
    lines = [line for line in told(capsys).splitlines() if "begins anew" in line]
    assert lines == [
        "a resumed run begins anew with callbacks.Patient.0.checks, which changes in training and"
        " which a checkpoint does not hold (its class is int). Give it in the callback's"
        " state_dict, and take it back in its load_state_dict."
    ]


def test_a_compiled_teacher_comes_back() -> None:
    # Here, because the help of a command imports the modules of all classes that a file defines.
    class Compiled(nn.Linear):
        """Is of a class like that of a compiled module."""

        __module__ = "torch._dynamo.somewhere"

    values = []
    for is_changed in (True, False):
        module = Module()
        module.teachers = [Compiled(1, 1)]
        trainer = trainer_of(module)
        part = begun(trainer)
        if is_changed:
            with torch.no_grad():
                module.teachers[0].weight.fill_(7.0)
            values.append(saved(part, trainer))
    part.give_back(trainer, values[0])
    assert module.teachers[0].weight.item() == 7.0


def test_half_of_a_packages_state_is_not_kept() -> None:
    class OfPackage(Module):
        __module__ = "scalers.of_somebody"

        def __init__(self) -> None:
            super().__init__()
            self.scaler: Any = Scaler()

    module = OfPackage()
    trainer = trainer_of(module)
    part = begun(trainer)
    module.boost = 4.0
    assert saved(part, trainer)["attributes"] == {"module.boost": 4.0}
    module.scaler.seen += 1
    assert saved(part, trainer)["attributes"] == {}, "the scaler cannot be kept"


def test_a_module_that_training_makes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    module = Module()
    trainer = trainer_of(module)
    part = begun(trainer)
    object.__setattr__(module, "teacher", copy.deepcopy(module.net))
    saved(part, trainer)
    text = told(capsys)
    assert "training has made module.teacher" in text
    assert "on_load_checkpoint" in text


class Counting(torch.optim.SGD):
    """Counts steps and keeps slow weights in attributes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1, momentum=0.9)
        self.count = 0
        self.slow = [[torch.zeros(2)]]
        self.inner = torch.optim.SGD(self.param_groups)
        self.inner.param_groups = self.param_groups


def test_what_an_optimizer_keeps_beside_its_state_dict_comes_back() -> None:
    before = trainer_of(Module())
    optimizer: Any = Counting([nn.Parameter(torch.ones(2))])
    before.strategy.optimizers = [optimizer]
    part = begun(before)
    optimizer.count = 5
    optimizer.slow[0][0] += 2
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.inner.step()
    value = saved(part, before)

    after = trainer_of(Module())
    there: Any = Counting([nn.Parameter(torch.ones(2))])
    after.strategy.optimizers = [there]
    again = begun(after)
    # Lightning loads the optimizer's own state, which gives it new groups.
    there.load_state_dict(optimizer.state_dict())
    again.give_back(after, value)
    assert there.count == 5
    assert there.slow[0][0].tolist() == [2, 2]
    (state,) = there.inner.state.values()
    assert state["momentum_buffer"].tolist() == [1, 1]
    assert there.inner.param_groups is there.param_groups, "a schedule sets the rates of both"


def test_undeclared_state_can_be_left_out_and_is_told_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = Module()
    trainer = trainer_of(module, Teaches())
    part = begun(trainer, undeclared=False)
    module.boost = 4.0
    module.averages[0].update(1.0)  # type: ignore[attr-defined]
    value = saved(part, trainer)
    assert set(value) == {"declared", "set_by_epochs"}
    assert value["declared"]["module.averages.0"]["value"].tolist() == [1, 1]
    assert "module.boost changes in training, and undeclared=False" in told(capsys)


def test_weights_and_optimizers_that_training_changes_are_told_at_the_first_save(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = Module()
    trainer = trainer_of(module)
    trainer.strategy.optimizers = [torch.optim.SGD(module.net.parameters(), 0.1)]
    part = begun(trainer)
    module.head = nn.Linear(2, 1, bias=False)
    module.net.weight = nn.Parameter(torch.ones(3, 2))
    saved(part, trainer)
    text = told(capsys)
    assert "head.weight is new, net.weight has gone from (1, 2) to (3, 2)" in text
    assert "on_load_checkpoint" in text
    assert "another checkpoint" not in text
    trainer.optimizers[0].add_param_group({"params": list(module.head.parameters())})
    saved(part, trainer)
    text = told(capsys)
    assert "from SGD (groups of 2 parameters) to SGD (groups of 2, 1 parameters)" in text
    saved(part, trainer)
    assert told(capsys) == "", "each is told once"


def test_a_communication_hook_with_a_state_is_told() -> None:
    trainer = trainer_of(Module())
    assert not what_is_not_exact(trainer)
    trainer.strategy._ddp_comm_state = SimpleNamespace(errors=[])  # type: ignore[attr-defined]
    (line,) = what_is_not_exact(trainer)
    assert "communication hook" in line


def nightly(value: Any) -> Any:
    """A value of a test that is tried at night alone."""
    return pytest.param(value, marks=pytest.mark.nightly)


class Killed(Exception):
    """Ends a run in the middle of an epoch."""


class Warm(LRScheduler):
    """Holds another schedule, and has no state_dict of its own."""

    def __init__(self, optimizer: Any, then: Any) -> None:
        self.then = then
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [rate / 10 for rate in self.base_lrs]  # type: ignore[list-item]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < 3:
            super().step()
        else:
            self.then.step()


class Stages(LightningModule):
    """Has a schedule in a schedule, and loaders that follow its attributes."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.stage = 1
        self.killed_at = killed_at
        self.read: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.killed_at == self.global_step:
            raise Killed
        self.read.append(batch[0].flatten().tolist())
        return self.net(batch[0]).pow(2).mean()

    def on_train_epoch_end(self) -> None:
        self.stage += 1

    def train_dataloader(self) -> Any:
        rows = TensorDataset(torch.arange(4.0 * self.stage)[:, None])
        return DataLoader(rows, 2, shuffle=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        warm = Warm(optimizer, CosineAnnealingLR(optimizer, 10))
        return [optimizer], [{"scheduler": warm, "interval": "step"}]


def trained(folder: Path, module: Any, *others: Callback, **options: Any) -> Any:
    """The module, trained for three epochs."""
    torch.manual_seed(0)
    random.seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    keep = ExactCheckpoint(folder, every="1")
    settings = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, **options}
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*others, keep],
        **settings,
    )
    trainer.fit(module, ckpt_path=keep.resume_from)
    return module


def with_and_without_a_kill(
    make: Any, killed_at: int, folder: Path, **options: Any
) -> tuple[Any, Any]:
    """A module that was trained undisturbed, and one whose run was killed and resumed."""
    undisturbed = trained(folder / "undisturbed", make(), **options)
    with pytest.raises(Killed):
        trained(folder / "killed", make(killed_at), **options)
    return undisturbed, trained(folder / "killed", make(), **options)


@pytest.mark.daily(1)
@pytest.mark.parametrize("killed_at", [2, 4, 9])
def test_a_schedule_in_a_schedule_and_loaders_that_follow_attributes_resume_exactly(
    killed_at: int, tmp_path: Path
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", Stages())
    with pytest.raises(Killed):
        trained(tmp_path / "killed", Stages(killed_at))
    resumed = trained(tmp_path / "killed", Stages())
    assert resumed.read == undisturbed.read
    for mine, theirs in itertools.zip_longest(resumed.parameters(), undisturbed.parameters()):
        assert torch.equal(mine, theirs)


class Memory:
    """What an agent has seen. Samples are drawn from it."""

    def __init__(self) -> None:
        self.seen: deque[float] = deque(maxlen=12)

    def draw(self) -> float:
        return random.choice(self.seen)


class Replay(IterableDataset[Any]):
    """A stream of what a memory holds."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(10):
            yield torch.tensor([self.memory.draw()])


class Agent(LightningModule):
    """Feeds the stream that it learns from."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.killed_at = killed_at
        self.memory = Memory()
        self.memory.seen.extend(range(6))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.killed_at == self.global_step:
            raise Killed
        self.memory.seen.append(float(self.global_step + 100))
        return self.net(batch / 100).pow(2).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(Replay(self.memory), 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


@pytest.mark.parametrize("killed_at", [5, 7, 13])
def test_a_stream_that_the_module_feeds_goes_on_from_what_the_memory_held(
    killed_at: int, tmp_path: Path
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", Agent())
    with pytest.raises(Killed):
        trained(tmp_path / "killed", Agent(killed_at))
    resumed = trained(tmp_path / "killed", Agent())
    assert resumed.memory.seen == undisturbed.memory.seen
    for mine, theirs in itertools.zip_longest(resumed.parameters(), undisturbed.parameters()):
        assert torch.equal(mine, theirs)


class Changes(Callback):
    """Changes settings of the Trainer once, after its first epoch."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch:
            return
        for name, value in self.settings.items():
            is_of_epochs = name == "max_epochs"
            setattr(trainer.fit_loop if is_of_epochs else trainer, name, value)


class Plain(LightningModule):
    """Reads eight rows, two at a time, and is killed where it is asked to be."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.killed_at = killed_at
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.killed_at == self.batches:
            raise Killed
        self.batches += 1
        return self.net(batch[0].to(self.dtype)).pow(2).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(8.0)[:, None] / 8), 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


@pytest.mark.daily(1)
@pytest.mark.parametrize("killed_at", [5, 9, 13])
def test_settings_of_the_trainer_that_training_has_changed_come_back(
    killed_at: int, tmp_path: Path
) -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "max_epochs": 4}
    undisturbed = trained(tmp_path / "undisturbed", Plain(), Changes(**settings))
    with pytest.raises(Killed):
        trained(tmp_path / "killed", Plain(killed_at), Changes(**settings))
    resumed = trained(tmp_path / "killed", Plain(), Changes(**settings))
    assert undisturbed.batches == resumed.batches == 16
    for mine, theirs in itertools.zip_longest(resumed.parameters(), undisturbed.parameters()):
        assert torch.equal(mine, theirs)


def test_a_setting_of_the_trainer_that_is_typed_anew_wins_over_what_training_has_changed(
    tmp_path: Path,
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, Plain(9), Changes(accumulate_grad_batches=2, max_epochs=4))
    resumed = trained(tmp_path, Plain(), max_epochs=5, accumulate_grad_batches=4)
    assert resumed.trainer.max_epochs == 5
    assert resumed.trainer.accumulate_grad_batches == 4


class WithMasters(torch.optim.Optimizer):
    """Keeps sums in 16 bits, and weights in 32, whatever the module has."""

    def __init__(self, parameters: Any, rate: float) -> None:
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            master = state.setdefault("master", parameter.float())
            sums = state.setdefault("sums", [torch.zeros_like(parameter, dtype=torch.bfloat16)])
            sums[0].mul_(0.9).add_(parameter.grad.bfloat16())
            master.add_(sums[0].float(), alpha=-self.param_groups[0]["lr"] / 3)
            parameter.copy_(master)
        return loss


class Masters(Plain):
    """Has such an optimizer."""

    def configure_optimizers(self) -> Any:
        return WithMasters(self.parameters(), 0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_state_of_an_optimizer_keeps_the_type_it_was_saved_with(
    precision: str, tmp_path: Path
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", Masters(), precision=precision)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", Masters(5), precision=precision)
    resumed = trained(tmp_path / "killed", Masters(), precision=precision)
    states = [each.optimizers().optimizer.state.values() for each in (resumed, undisturbed)]
    for mine, theirs in zip(*states, strict=True):
        assert mine["master"].dtype == torch.float32
        assert mine["sums"][0].dtype == torch.bfloat16
        assert torch.equal(mine["master"], theirs["master"])
        assert torch.equal(mine["sums"][0], theirs["sums"][0])


def test_a_state_of_an_optimizer_has_torchs_type_where_the_weights_have_another(
    tmp_path: Path,
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, Plain(5), precision="bf16-true")
    resumed = trained(tmp_path, Plain(), precision="32-true")
    for state in resumed.optimizers().optimizer.state.values():
        assert state["momentum_buffer"].dtype == torch.float32


def test_validations_by_the_clock_are_said_to_come_at_other_steps() -> None:
    trainer = trainer_of(Plain())
    assert not what_is_not_exact(trainer)
    clocked = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        val_check_interval="00:00:01:00",
    )
    (line,) = what_is_not_exact(clocked)
    assert "validations come at other steps" in line


class Adapter(Plain):
    """Trains a layer behind a frozen network, and saves that layer alone."""

    leaves_out: tuple[str, ...] = ("base",)

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.base = nn.BatchNorm1d(1).requires_grad_(False)
        self.strict_loading = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([self.base(batch[0])], batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        for name in [each for each in weights if each.startswith(self.leaves_out)]:
            del weights[name]


class SlimAdapter(Adapter):
    """Does so by its state dict."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        weights: dict[str, Any] = super().state_dict(*arguments, **named)
        return {name: each for name, each in weights.items() if not name.startswith("base")}


@pytest.mark.parametrize("kind", [Adapter, SlimAdapter])
def test_statistics_of_a_frozen_network_that_the_module_does_not_save_come_back(
    kind: type[Adapter], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", kind())
    assert "not be exact" not in told(capsys), "no parameter has changed"
    with pytest.raises(Killed):
        trained(tmp_path / "killed", kind(5))
    resumed = trained(tmp_path / "killed", kind())
    assert torch.equal(resumed.base.running_var, undisturbed.base.running_var)
    assert resumed.base.num_batches_tracked == 12
    assert torch.equal(resumed.net.weight, undisturbed.net.weight)


def test_weights_that_are_trained_and_not_saved_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adapter, "leaves_out", ("net",))
    trained(tmp_path, Adapter())
    assert told(capsys).count("training changes net.bias and 1 more") == 1


class Split(Plain):
    """Trains on the rows of a split."""

    def __init__(self, rows: list[int], killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.rows = rows

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(TensorDataset(torch.arange(16.0)[:, None] / 16), self.rows), 2)


class Cached(Dataset[Any]):
    """Keeps what it has read."""

    def __init__(self) -> None:
        self.cache: list[Any] = [None] * 8

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if self.cache[index] is None:
            self.cache[index] = torch.tensor([index / 8])
        return [self.cache[index]]


class ReadsCached(Plain):
    """Reads such a data set."""

    def train_dataloader(self) -> Any:
        return DataLoader(Cached(), 2)


def test_a_split_that_is_another_one_at_a_resume_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, Split([*range(8)], killed_at=5))
    with pytest.raises(Killed):
        trained(tmp_path, Split([*range(8)], killed_at=7))
    assert "other samples" not in told(capsys)
    trained(tmp_path, Split([*range(4, 12)]))
    assert "Subset holds other samples than at the save" in told(capsys)


def test_a_data_set_that_keeps_what_it_has_read_holds_no_other_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for killed_at in (2, 5, 7):
        with pytest.raises(Killed):
            trained(tmp_path, ReadsCached(killed_at))
    trained(tmp_path, ReadsCached())
    assert "other samples" not in told(capsys)


class Mining(Plain):
    """Draws those rows more often that it has learnt least."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = self.trainer.train_dataloader.sampler.weights
        weights[(batch[0].flatten() * 8).long()] *= 5

    def train_dataloader(self) -> Any:
        rows = TensorDataset(torch.arange(8.0)[:, None] / 8)
        return DataLoader(rows, 2, sampler=self.made_sampler())

    def made_sampler(self) -> Any:
        return WeightedRandomSampler(torch.ones(8), 8)


class MiningWithItsOwn(Mining):
    """Holds the weights, too."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.weights = torch.ones(8, dtype=torch.float64)

    def made_sampler(self) -> Any:
        sampler = WeightedRandomSampler(self.weights, 8)
        assert sampler.weights is self.weights
        return sampler


class Weights(WeightedRandomSampler):
    """Says what it keeps."""

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


class MiningWithAState(Mining):
    def made_sampler(self) -> Any:
        return Weights(torch.ones(8), 8)


class MiningWithAHeldState(Mining):
    """Holds a sampler with a state, which is kept in two places."""

    def made_sampler(self) -> Any:
        self.sampler = Weights(torch.ones(8), 8)
        return self.sampler


class Narrowing(Mining):
    """Leaves rows out that it has learnt, in a list."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        indices = self.trainer.train_dataloader.sampler.indices
        indices[batch_idx] = indices[-1 - batch_idx]

    def made_sampler(self) -> Any:
        return SubsetRandomSampler([*range(8)])


class Fewer(Narrowing):
    """Reads fewer rows from the next epoch on, and says so inside this one."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.batches == 2:
            self.trainer.train_dataloader.sampler.indices = [*range(6)]


class Kinds(Mining):
    """Puts indices of another kind in the place of the first ones."""

    kinds: Any = (range(8), [*range(7, -1, -1)])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.batches == 6:
            self.trainer.train_dataloader.sampler.indices = copy.copy(self.kinds[1])

    def made_sampler(self) -> Any:
        return SubsetRandomSampler(copy.copy(self.kinds[0]))


class Arrays(Kinds):
    kinds = (np.arange(8), np.arange(6)[::-1])


class Tensors(Kinds):
    kinds = (torch.arange(8), torch.arange(8).flip(0))


class ReadOnly(Kinds):
    """The array of the start cannot be written to."""

    kinds = (np.arange(8), np.arange(8)[::-1])

    def made_sampler(self) -> Any:
        indices = np.arange(8)
        indices.flags.writeable = False
        return SubsetRandomSampler(indices)  # type: ignore[arg-type]


class MiningInValidations(Mining):
    """A validation inside the epoch sets the weights, and may be the one that is stopped."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.killed_at == self.batches and not self.trainer.sanity_checking:
            signal.raise_signal(signal.SIGTERM)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            weights = torch.arange(1.0, 9.0) ** (1 + self.batches)
            self.trainer.train_dataloader.sampler.weights = weights / weights.sum()

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(2, 1)), 1)


@pytest.mark.daily(1)
@pytest.mark.parametrize("stopped_at", [2, 4, 6])
def test_an_order_is_drawn_before_a_validation_that_a_run_resumes_in_may_change_it(
    stopped_at: int, tmp_path: Path
) -> None:
    options = {"reload_dataloaders_every_n_epochs": 0, "val_check_interval": 2}
    undisturbed = trained(tmp_path / "undisturbed", MiningInValidations(), **options)
    with pytest.raises(SystemExit):
        trained(tmp_path / "stopped", MiningInValidations(stopped_at), **options)
    resumed = trained(tmp_path / "stopped", MiningInValidations(), **options)
    assert torch.equal(resumed.net.weight, undisturbed.net.weight)


class Stream:
    """Has a state and no length."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.done < 8:
            self.done += 1
            yield torch.tensor([[self.done / 8]])
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class MiningBesideAStream(Mining):
    """Lightning reads these loaders before the hooks of a start."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["rows"], batch_idx) * (1 + batch["stream"].sum())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = self.trainer.train_dataloader["rows"].sampler.weights
        weights[(batch["rows"][0].flatten() * 8).long()] *= 5

    def train_dataloader(self) -> Any:
        loaders = {"rows": super().train_dataloader(), "stream": Stream()}
        return CombinedLoader(loaders, "min_size")


@pytest.mark.daily(1)
@pytest.mark.parametrize("killed_at", [2, 6, 9])
def test_an_order_beside_a_stream_is_drawn_once(killed_at: int, tmp_path: Path) -> None:
    options = {"reload_dataloaders_every_n_epochs": 0, "max_epochs": 4}
    undisturbed, resumed = with_and_without_a_kill(
        MiningBesideAStream, killed_at, tmp_path, **options
    )
    assert torch.equal(resumed.net.weight, undisturbed.net.weight)


class Splits(Mining):
    """Splits the rows at random at each start."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def made_sampler(self) -> Any:
        return SubsetRandomSampler(np.random.default_rng().permutation(8)[:6].tolist())


def test_a_split_by_samplers_that_is_drawn_anew_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"reload_dataloaders_every_n_epochs": 0}
    with pytest.raises(Killed):
        trained(tmp_path, Splits(4), **options)
    trained(tmp_path, Splits(), **options)
    assert "SubsetRandomSampler was made with other indices than before the save" in told(capsys)


class GrowsInside(Plain):
    """Trains on data that grow inside an epoch."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.pool = [[torch.tensor([n / 8])] for n in range(8)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.pool.append([torch.tensor([1.0])])

    def train_dataloader(self) -> Any:
        return DataLoader(self.pool, 2, shuffle=True)  # type: ignore[arg-type]


def test_data_that_have_grown_since_the_epoch_began_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"reload_dataloaders_every_n_epochs": 0, "max_epochs": 1}
    with pytest.raises(Killed):
        trained(tmp_path, GrowsInside(2), **options)
    trained(tmp_path, GrowsInside(), **options)
    assert "began with 8 samples, and is drawn again from 10: the resume is not" in told(capsys)


class Yields(Sampler[int]):
    """Its state is its place in the pass, as that of torchdata's StatefulDistributedSampler."""

    def __init__(self) -> None:
        self.yielded = 0
        self.next_yielded: int | None = None

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.next_yielded = self.next_yielded or 0, None
        for key in range(self.yielded, 8):
            self.yielded += 1
            yield key

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_yielded = state["yielded"]


class Counted(Mining):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def made_sampler(self) -> Any:
        return Yields()


class DrawsItself(Sampler[int]):
    """Has a generator of its own, and no state."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(8).tolist())

    def set_epoch(self, epoch: int) -> None: ...


class ByItsOwnGenerator(Counted):
    def made_sampler(self) -> Any:
        return DrawsItself()


class DrawsOfTorch(Sampler[int]):
    """Has a generator of torch's, by a name that is not that of torch's own samplers."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=self.draw).tolist())


class DrawsAsItsEpochIsSet(DrawsOfTorch):
    """Lightning calls ``set_epoch`` once more in a resumed run."""

    order: Sequence[int] = ()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(8, generator=self.draw).tolist()


class SavesWhatItDraws(DrawsAsItsEpochIsSet):
    def state_dict(self) -> dict[str, Any]:
        return {"draw": self.draw.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draw.set_state(state["draw"])


class ByAGeneratorOfTorch(Counted):
    def made_sampler(self) -> Any:
        return DrawsOfTorch()


class ByTheEpochThatIsSet(Counted):
    def made_sampler(self) -> Any:
        return DrawsAsItsEpochIsSet()


class ByTheStateOfADraw(Counted):
    def made_sampler(self) -> Any:
        return SavesWhatItDraws()


class WithTheModulesGenerator(Counted):
    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.draw = torch.Generator().manual_seed(1)

    def made_sampler(self) -> Any:
        sampler = DrawsAsItsEpochIsSet()
        sampler.draw = self.draw
        return sampler


class MiningByEpochs(Mining):
    """Replaces the weights as an epoch ends."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_train_epoch_end(self) -> None:
        sampler = self.trainer.train_dataloader.sampler
        sampler.weights = sampler.weights * torch.arange(1.0, 9.0)


@pytest.mark.daily(1)
@pytest.mark.parametrize("killed_at", [2, 6, *map(nightly, (4, 9, 11))])
@pytest.mark.parametrize(
    "kind",
    [
        Mining,
        MiningWithItsOwn,
        MiningWithAState,
        MiningWithAHeldState,
        Narrowing,
        Fewer,
        Kinds,
        Arrays,
        Tensors,
        ReadOnly,
        Counted,
        ByItsOwnGenerator,
        ByAGeneratorOfTorch,
        ByTheEpochThatIsSet,
        ByTheStateOfADraw,
        WithTheModulesGenerator,
        MiningByEpochs,
    ],
)
def test_an_order_is_drawn_again_from_what_its_sampler_held_as_the_pass_began(
    kind: type[Mining], killed_at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"reload_dataloaders_every_n_epochs": 0, "max_epochs": 4}
    undisturbed = trained(tmp_path / "undisturbed", kind(), **options)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", kind(killed_at), **options)
    # Twice, because the resumed run is saved inside the same epoch.
    with suppress(Killed):
        trained(tmp_path / "killed", kind(killed_at + 1), **options)
    resumed = trained(tmp_path / "killed", kind(), **options)
    assert torch.equal(resumed.net.weight, undisturbed.net.weight)
    assert resumed.batches == undisturbed.batches
    assert "sampler" not in told(capsys)


class Chances(Sampler[int]):
    """A sampler of one's own."""

    def __init__(self) -> None:
        self.weights = torch.ones(8)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, 8).tolist())


class MiningByChances(Mining):
    def made_sampler(self) -> Any:
        return Chances()


class MiningThatSaves(MiningByChances):
    """Saves the weights itself."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.trainer.train_dataloader.sampler.weights


def test_a_sampler_of_ones_own_that_training_changes_is_told_with_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"reload_dataloaders_every_n_epochs": 0}
    trained(tmp_path / "told", MiningByChances(), **options)
    assert told(capsys).count("train_dataloader.sampler.weights, which changes in training") == 1
    trained(tmp_path / "saves", MiningThatSaves(), **options)
    assert "which changes in training" not in told(capsys)


class Scaled(Plain):
    """Scales its loss by something that it keeps."""

    def scale(self, batch: Any) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scale = self.scale(batch)
        return super().training_step(batch, batch_idx) * (1 + scale)


NUMBER = 0
MARKS: list[int] = []
PAIR = [1, 2]
SETTINGS: dict[str, Any] = {"beta": 1.0, "inner": {"calls": 0}}
CACHE: dict[int, float] = {}


class HelpersCount:
    count = 0
    by_kind: ClassVar = {"calls": 0}


def helper() -> float:
    helper.calls += 0.1  # type: ignore[attr-defined]
    return helper.calls  # type: ignore[attr-defined]


helper.calls = 0.0  # type: ignore[attr-defined]


class ByAGlobalNumber(Scaled):
    def scale(self, batch: Any) -> Any:
        global NUMBER
        NUMBER += 1
        return NUMBER


class ByAGlobalList(Scaled):
    def scale(self, batch: Any) -> Any:
        MARKS.append(1)
        return len(MARKS)


class ByAnEntryOfAGlobalList(Scaled):
    def scale(self, batch: Any) -> Any:
        PAIR[0] += 1
        return PAIR[0]


class ByAGlobalDictionary(Scaled):
    def scale(self, batch: Any) -> Any:
        SETTINGS["beta"] *= 0.9
        return SETTINGS["beta"]


class ByADictionaryInOne(Scaled):
    def scale(self, batch: Any) -> Any:
        SETTINGS["inner"]["calls"] += 1
        return SETTINGS["inner"]["calls"]


class ByAHelpersDictionary(Scaled):
    def scale(self, batch: Any) -> Any:
        HelpersCount.by_kind["calls"] += 1
        return HelpersCount.by_kind["calls"]


class FillsAGlobalCache(Scaled):
    def scale(self, batch: Any) -> Any:
        return CACHE.setdefault(self.global_step, 1.0)


class ByItsClass(Scaled):
    count = 0

    def scale(self, batch: Any) -> Any:
        type(self).count += 1
        return self.count


class ByAHelpersClass(Scaled):
    def scale(self, batch: Any) -> Any:
        HelpersCount.count += 1
        return HelpersCount.count


class ByAFunction(Scaled):
    def scale(self, batch: Any) -> Any:
        return helper()


class ByADefault(Scaled):
    def scale(self, batch: Any, seen: list[int] = []) -> Any:  # noqa: B006
        seen.append(1)
        return len(seen)


def counting() -> Any:
    """A function that counts its calls."""
    calls = 0

    def count(*_: Any) -> float:
        nonlocal calls
        calls += 1
        return 1 / calls

    return count


class ByAClosure(Scaled):
    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.called = partial(counting(), 1)

    def scale(self, batch: Any) -> Any:
        return self.called()


class ByASchedule(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, counting())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CountsAsAHook:
    """Is registered as a hook of a layer."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * (1 + 0.1 * self.calls)


class ByAHookOfALayer(Plain):
    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.net.register_forward_hook(CountsAsAHook())


class ByAHookOfAWeight(Plain):
    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        scale = counting()
        self.net.weight.register_hook(lambda gradient: gradient * scale())


class ByAHookOfAnOptimizer(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(partial(sets_the_rate, [0]))
        return optimizer


def sets_the_rate(calls: list[int], optimizer: Any, *_: Any) -> None:
    calls.append(1)
    optimizer.param_groups[0]["lr"] = 0.1 / len(calls)


class ByAnAttributeOfAWeight(Scaled):
    def scale(self, batch: Any) -> Any:
        self.net.weight.calls = getattr(self.net.weight, "calls", 0) + 1
        return self.net.weight.calls


class SavesItsGlobalNumber(ByAGlobalNumber):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["number"] = NUMBER


@pytest.mark.daily(8)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ByAGlobalNumber, f"{__name__}.NUMBER"),
        (ByAGlobalList, f"{__name__}.MARKS"),
        (ByAnEntryOfAGlobalList, f"{__name__}.PAIR"),
        (ByAGlobalDictionary, f"{__name__}.SETTINGS.beta"),
        (ByADictionaryInOne, f"{__name__}.SETTINGS.inner"),
        (ByAHelpersDictionary, f"{__name__}.HelpersCount.by_kind"),
        (ByItsClass, f"{__name__}.ByItsClass.count"),
        (ByAHelpersClass, f"{__name__}.HelpersCount.count"),
        (ByAFunction, f"{__name__}.helper.calls"),
        (ByADefault, f"{__name__}.ByADefault.scale.seen"),
        (ByAClosure, "module.called.func.calls"),
        (ByASchedule, "schedules.0.lr_lambdas.0.calls"),
        (ByAHookOfALayer, "module.net.forward_hooks.0"),
        (ByAHookOfAWeight, "module.net.weight.backward_hooks.0.scale.calls"),
        (ByAHookOfAnOptimizer, "optimizers.0.optimizer_step_pre_hooks.0.0"),
        (ByAnAttributeOfAWeight, "module.net.weight.calls"),
    ],
)
def test_what_code_keeps_beside_objects_and_changes_is_told(
    kind: type[Plain], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, kind(), max_epochs=1)
    # Nothing else is told, such as what another test has changed.
    assert told(capsys).count(" begins anew with ") == 1
    trained(tmp_path / "again", kind(), max_epochs=1)
    # Torch numbers all hooks of a process.
    said = re.sub(r"_hooks\.\d+", "_hooks.0", told(capsys))
    assert f"begins anew with {name}, which changes in training" in said


class ChangesHyperparameters(Scaled):
    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def scale(self, batch: Any) -> Any:
        self.hparams["beta"] *= 0.9
        return self.hparams["beta"]


class Settings(dict[str, float]):
    calls = 0


class ByADictionaryOfItsOwn(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def scale(self, batch: Any) -> Any:
        self.settings.calls += 1
        return self.settings.calls


@pytest.mark.parametrize(
    ("make", "name"),
    [(ChangesHyperparameters, "module._hparams"), (ByADictionaryOfItsOwn, "module.settings")],
)
def test_a_dictionary_of_a_class_is_told_where_it_changes(
    make: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, make(), max_epochs=1)
    assert f"{name} changes in training, and a checkpoint does not hold it" in told(capsys)


def test_what_code_keeps_beside_objects_is_left_to_who_saves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, SavesItsGlobalNumber(), max_epochs=1)
    assert "begins anew with" not in told(capsys)


class ItsOwnIterator(IterableDataset[Any]):
    """A stream with a state, which goes on itself when it is asked for the next sample."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        self.place %= 16
        return self

    def __next__(self) -> Any:
        if self.place == 16:
            raise StopIteration
        self.place += 1
        return [torch.full((1,), float(self.place))]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class ReadsAStream(Plain):
    def train_dataloader(self) -> Any:
        return DataLoader(ItsOwnIterator(), 4)


def test_a_stream_that_is_its_own_iterator_is_the_loaders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, ReadsAStream(), max_epochs=2, reload_dataloaders_every_n_epochs=0)
    assert "begins anew with" not in told(capsys)


def test_a_cache_in_a_global_variable_may_grow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, FillsAGlobalCache(), max_epochs=1)
    assert CACHE
    assert "begins anew with" not in told(capsys)


class MakesAGenerator(Scaled):
    """Makes it in the first step."""

    rng: Any = None

    def scale(self, batch: Any) -> Any:
        if self.rng is None:
            self.rng = torch.Generator().manual_seed(0)
        return torch.rand((), generator=self.rng)


class MakesOneOfNumPys(MakesAGenerator):
    def scale(self, batch: Any) -> Any:
        if self.rng is None:
            self.rng = np.random.default_rng(0)
        return self.rng.random()


class MakesOneOfPythons(MakesAGenerator):
    def scale(self, batch: Any) -> Any:
        if self.rng is None:
            self.rng = random.Random(0)
        return self.rng.random()


class SharesABuffer(Scaled):
    """Has a buffer, not persistent, that is the memory of a weight."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.register_buffer("same", self.net.weight.detach(), persistent=False)

    def scale(self, batch: Any) -> Any:
        return float(self.same.abs().mean())


class AveragesBuffers(Scaled):
    """Replaces buffers that begin as the memory of the weights."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.register_buffer("average", self.net.weight.data, persistent=False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average = self.average * 0.9 + self.net.weight.data * 0.1

    def scale(self, batch: Any) -> Any:
        return float(self.average.abs().mean())


class SharesTwoBuffers(Scaled):
    """Has one tensor as two buffers."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        same = torch.ones(3)
        self.register_buffer("one", same, persistent=False)
        self.net.register_buffer("other", same, persistent=False)

    def scale(self, batch: Any) -> Any:
        self.net.other.mul_(0.99)
        return self.one.sum()


class ItsOwnNumbers(Iterator[float]):
    count = 0

    def __next__(self) -> float:
        self.count += 1
        return 1 / self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class ReplacesAGenerator(Scaled):
    """By one that draws other bits, in each epoch."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.rng = np.random.default_rng(0)

    def on_train_epoch_end(self) -> None:
        self.rng = np.random.Generator(np.random.MT19937(self.current_epoch))

    def scale(self, batch: Any) -> Any:
        return self.rng.random()


class AsksAnIterator(Scaled):
    """Keeps one with a state."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.stream = ItsOwnNumbers()

    def scale(self, batch: Any) -> Any:
        return next(self.stream)


class HasAGeneratorInItsClass(Scaled):
    rng = np.random.default_rng(3)

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.rng.bit_generator.state = np.random.default_rng(3).bit_generator.state

    def scale(self, batch: Any) -> Any:
        return self.rng.random()


class AccumulatesByHand(Plain):
    """Adds up gradients of weights that it holds in a list, and an optimizer alone has."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.automatic_optimization = False
        self.critic = [torch.full((1,), 0.5, requires_grad=True)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * self.critic[0].pow(2).sum()
        self.manual_backward(loss)
        if self.batches % 3 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.critic], 0.1)


class LooksAtBatches(Mining):
    """Looks at some batches of the training inside an epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 1:
            for _ in itertools.islice(self.trainer.train_dataloader, 2):
                pass


class Slides(Mining):
    """Reads rows of a window that slides on in each epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_train_epoch_end(self) -> None:
        first = (self.current_epoch + 1) % 4
        self.trainer.train_dataloader.sampler.indices = range(first, first + 4)

    def made_sampler(self) -> Any:
        return SubsetRandomSampler(range(4))


class ChangesALayer(Scaled):
    """Changes a tuple that a layer of torch's keeps."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.pool = nn.AdaptiveAvgPool1d((2,))

    def scale(self, batch: Any) -> Any:
        if self.batches % 3 == 2:
            self.pool.output_size = (1 + self.batches % 2,)
        return self.pool(batch[0].reshape(1, 1, -1)).max()


class KeepsLosses(Scaled):
    """Keeps a window of losses, each a tensor, in a queue."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.losses: deque[torch.Tensor] = deque(maxlen=100)

    def scale(self, batch: Any) -> Any:
        self.losses.append(batch[0].mean().detach())
        return sum(self.losses)


class ClipsAll(Plain):
    """Clips with the gradients of weights that no optimizer has, and zeroes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.net.bias], 0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class AssignsABuffer(Scaled):
    """Puts other tensors in the place of buffers, as an epoch starts and as training does."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.register_buffer("beta", torch.tensor(0.0))
        self.register_buffer("mean", torch.tensor(0.0))

    def on_train_start(self) -> None:
        self.mean = torch.tensor(0.5)

    def on_train_epoch_start(self) -> None:
        self.beta = self.beta + 0.25

    def scale(self, batch: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean()
        return self.beta + self.mean


class Swaps(Plain):
    """Validates with another layer at the name of the trained one, and is stopped there."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.other = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches += 1
        return (self.net(batch[0]) * 2 + self.other(batch[0]) + 0.1).pow(2).mean()

    def swap(self) -> None:
        self.net, self.other = self.other, self.net

    def on_validation_start(self) -> None:
        self.swap()

    def on_validation_end(self) -> None:
        self.swap()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.killed_at == self.batches and not self.trainer.sanity_checking:
            signal.raise_signal(signal.SIGTERM)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(2, 1)), 1)


def test_a_stop_in_a_validation_saves_layers_at_their_own_names(tmp_path: Path) -> None:
    options = {"val_check_interval": 2}
    undisturbed = trained(tmp_path / "undisturbed", Swaps(), **options)
    with pytest.raises(SystemExit):
        trained(tmp_path / "stopped", Swaps(6), **options)
    resumed = trained(tmp_path / "stopped", Swaps(), **options)
    for mine, theirs in zip(resumed.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class SetsToZero(torch.optim.Adam):
    """Sets gradients to 0, as optimizers did before torch 2."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class UsesALayerAtTimes(Plain):
    """Its second layer has a gradient in every third step. The steps between move it on."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.further = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.further(batch[0]).mean() if self.batches % 3 == 2 else loss

    def configure_optimizers(self) -> Any:
        return SetsToZero(self.parameters(), 0.01)


class Stage(enum.Flag):
    """What training does."""

    NOISE = 1
    CLIP = 2
    LATE = 4


class SetsFlags(Scaled):
    """Sets more and more flags."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.stage = Stage.NOISE

    def scale(self, batch: Any) -> Any:
        if self.batches == 2:
            self.stage |= Stage.CLIP
        if self.batches == 12:
            self.stage |= Stage.LATE
        return self.stage.value


class ByAMethodOfPythons(Scaled):
    """Holds a generator by a method that is written in C."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.draw = random.Random(5).random

    def scale(self, batch: Any) -> Any:
        return self.draw()


class Around:
    """Says that it is an optimizer, and passes on to the one inside."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.steps = 0
        self.state_dict = inside.state_dict
        self.load_state_dict = inside.load_state_dict
        self.zero_grad = inside.zero_grad

    @property
    def __class__(self) -> Any:
        return torch.optim.Optimizer

    defaults = property(lambda self: self.inside.defaults)
    state = property(lambda self: self.inside.state)
    param_groups = property(lambda self: self.inside.param_groups)

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        loss = self.inside.step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(1 - 0.01 * self.steps)
        return loss


class StepsAWrapper(Plain):
    def configure_optimizers(self) -> Any:
        return Around(super().configure_optimizers())


class Slow(torch.optim.Optimizer):
    """Has the groups and the states of the optimizer inside, and takes every third step back in
    part.
    """

    def __init__(self, inside: Any) -> None:
        super().__init__(inside.param_groups[0]["params"], inside.defaults)
        self.inside = inside
        self.param_groups = inside.param_groups
        self.state = inside.state

    def step(self, closure: Any = None) -> Any:
        loss = self.inside.step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(self.state[parameter]["momentum_buffer"], alpha=0.05)
        return loss


class StepsTheOneInside(Plain):
    def configure_optimizers(self) -> Any:
        return Slow(super().configure_optimizers())


class CountsCalls(nn.Linear):
    """A teacher that counts how often it is asked."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class AsksATeacher(Scaled):
    """Holds it in a list, where it is no part of the module."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.teachers = [CountsCalls(1, 1)]

    def scale(self, batch: Any) -> Any:
        self.teachers[0](batch[0])
        return 1 / self.teachers[0].calls


class TogglesForTwoBatches(Plain):
    """Trains one of two layers at a time, by hand."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.automatic_optimization = False
        self.further = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        layers = (self.net, self.further)
        return [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in layers]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        # Batch 18, before which a run is killed each day, is the second of its pair.
        pair, number = divmod(self.batches + 1, 2)
        optimizer = optimizers[pair % 2]
        if number == 0:
            self.toggle_optimizer(optimizer)
        loss = super().training_step(batch, batch_idx) + self.further(batch[0]).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if number == 1:
            self.untoggle_optimizer(optimizer)


@pytest.mark.daily(1)
@pytest.mark.parametrize("killed_at", [18, *map(nightly, (3, 6))])
@pytest.mark.parametrize(
    "kind",
    [
        MakesAGenerator,
        MakesOneOfNumPys,
        MakesOneOfPythons,
        SharesABuffer,
        AveragesBuffers,
        SharesTwoBuffers,
        ReplacesAGenerator,
        AsksAnIterator,
        HasAGeneratorInItsClass,
        AccumulatesByHand,
        ChangesALayer,
        KeepsLosses,
        ClipsAll,
        UsesALayerAtTimes,
        AssignsABuffer,
        SetsFlags,
        ByAMethodOfPythons,
        StepsAWrapper,
        StepsTheOneInside,
        AsksATeacher,
        TogglesForTwoBatches,
    ],
)
def test_what_training_makes_shares_or_changes_comes_back(
    kind: type[Plain], killed_at: int, tmp_path: Path
) -> None:
    undisturbed, resumed = with_and_without_a_kill(kind, killed_at, tmp_path, max_epochs=6)
    for mine, theirs in zip(resumed.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.daily(1)
@pytest.mark.parametrize("killed_at", [6, *map(nightly, (3, 14))])
@pytest.mark.parametrize("kind", [LooksAtBatches, Slides])
def test_a_pass_begins_once_whoever_looks_at_its_batches_and_ranges_are_kept(
    kind: type[Mining], killed_at: int, tmp_path: Path
) -> None:
    options = {"max_epochs": 8, "reload_dataloaders_every_n_epochs": 0}
    undisturbed, resumed = with_and_without_a_kill(kind, killed_at, tmp_path, **options)
    assert torch.equal(resumed.net.weight, undisturbed.net.weight)


class MyRandom(random.Random):
    """A generator whose class nobody knows."""


class MakesOneOfItsOwn(MakesAGenerator):
    def scale(self, batch: Any) -> Any:
        if self.rng is None:
            self.rng = MyRandom(0)
        return self.rng.random()


class Rotates(Plain):
    """Validates other rows each time."""

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_validation_epoch_end(self) -> None:
        sampler = self.trainer.val_dataloaders.sampler
        sampler.indices = [(index + 1) % 8 for index in sampler.indices]

    def val_dataloader(self) -> Any:
        rows = TensorDataset(torch.arange(8.0)[:, None] / 8)
        return DataLoader(rows, 2, sampler=SubsetRandomSampler([0, 1]))


def test_what_cannot_be_made_or_is_not_kept_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path / "own", MakesOneOfItsOwn(6))
    trained(tmp_path / "own", MakesOneOfItsOwn())
    assert "module.rng was a MyRandom, which cannot be made here" in told(capsys)
    trained(tmp_path / "rotates", Rotates(), reload_dataloaders_every_n_epochs=0)
    assert "val_dataloaders.sampler.indices, which changes in training" in told(capsys)


class OfASubclass(torch.Tensor):
    """A tensor of a class of the user's own."""


def holding(value: Any) -> Plain:
    module = Plain()
    module.value = value
    return module


def in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).as_subclass(OfASubclass),
        lambda: [torch.ones(2).as_subclass(OfASubclass)],
        lambda: torch.quantize_per_tensor(torch.ones(2000), 0.1, 0, torch.qint8),
        lambda: [torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)],
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        lambda: torch.ones(2).to_mkldnn(),
        lambda: torch.ones(2000, dtype=torch.complex64).conj().imag,
        in_itself,
        lambda: deep(1500),
        lambda: 10**5000,
    ],
)
@pytest.mark.filterwarnings("ignore:.*[Nn]ested|.*sparse|.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.quantize:DeprecationWarning")
def test_an_attribute_of_any_kind_ends_no_run(make: Any, tmp_path: Path) -> None:
    module = holding(make())
    trained(tmp_path, module, max_epochs=1)
    assert module.batches == 4
    again = holding(make())
    trained(tmp_path, again, max_epochs=2)
    assert again.batches == 8


class Script(ModuleType):
    """A script of the user's, with a generator in a global variable."""

    draws = np.random.default_rng(0)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script("script_of_the_users")
    made.__file__ = str(tmp_path / "script_of_the_users.py")
    vars(made)["draws"] = Script.draws
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


class NoisyRows(Dataset[Any]):
    """Draws from the script's generator."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return [torch.tensor([index / 8 + Script.draws.random()], dtype=torch.float32)]


class DrawsFromTheScripts(Plain):
    """Draws from it as well, in its steps."""

    def __init__(self, workers: int, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.workers = workers
        Script.draws.bit_generator.state = np.random.default_rng(0).bit_generator.state

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1 + Script.draws.random())

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyRows(), 2, num_workers=self.workers)


@pytest.mark.daily(1)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("killed_at", [4, 6])
def test_a_generator_in_a_global_variable_of_the_users_own_files_is_kept(
    workers: int,
    killed_at: int,
    script: Script,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", DrawsFromTheScripts(workers))
    expected = Script.draws.random()
    with pytest.raises(Killed):
        trained(tmp_path / "killed", DrawsFromTheScripts(workers, killed_at))
    resumed = trained(tmp_path / "killed", DrawsFromTheScripts(workers))
    assert torch.equal(resumed.net.weight, undisturbed.net.weight)
    assert Script.draws.random() == expected
    assert "other samples" not in told(capsys)


def test_what_a_step_draws_from_a_generator_in_a_global_variable_is_as_without_the_engine(
    script: Script,
) -> None:
    """To fetch a batch neither moves nor seeds it."""

    class Draws(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            drawn.append(Script.draws.random())
            return super().training_step(batch, batch_idx)

    drawn: list[float] = []
    generator = np.random.default_rng(3)
    Script.draws.bit_generator.state = generator.bit_generator.state
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=1,
        enable_progress_bar=False,
        callbacks=[ExactCheckpoint(None)],
    )
    trainer.fit(Draws(), DataLoader(NoisyRows(), 2))
    assert drawn == [generator.random() for _ in range(4)]


class Shifted(Dataset[Any]):
    """Adds the epoch to each row."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return [torch.tensor([index / 8 + self.epoch])]


class Shifts(Plain):
    """Tells such a data set the epoch."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.rows = Shifted()
        self.persistent = persistent

    def on_train_epoch_start(self) -> None:
        self.rows.epoch = self.current_epoch

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 2, num_workers=1, persistent_workers=self.persistent)


@pytest.mark.parametrize("persistent", [True, False])
def test_what_workers_that_outlive_an_epoch_do_not_see_is_told(
    persistent: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, Shifts(persistent), reload_dataloaders_every_n_epochs=0)
    text = told(capsys)
    assert text.count("module.rows.epoch changes in training") == int(persistent)
    assert text.count("With persistent_workers=False all see it") == int(persistent)


def test_a_schedule_that_averaged_weights_bring_is_no_change_that_a_resume_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, Plain(), StochasticWeightAveraging(0.01, swa_epoch_start=1))
    text = told(capsys)
    assert "resumes from its last epoch's end" in text
    assert "training has changed the schedules" not in text


def test_what_a_callback_of_the_library_changes_is_not_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    callback = LogLastStep()
    vars(callback)["steps"] = 0
    trainer = trainer_of(Module(), callback)
    part = begun(trainer)
    vars(callback)["steps"] = 50
    saved(part, trainer)
    assert told(capsys) == ""


def test_what_a_callback_puts_back_is_no_setting_that_training_has_changed() -> None:
    part = TrainerSettings()
    callback = LogLastStep()
    trainer = trainer_of(Plain(), callback)
    part.fit_starts(trainer)
    part.begin(trainer)
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
    callback.on_train_batch_end(trainer, Plain(), None, None, 0)
    assert trainer.log_every_n_steps == 1  # type: ignore[attr-defined]
    assert part.take(trainer) == {}


def test_how_often_is_logged_and_tested_comes_back(tmp_path: Path) -> None:
    settings = {"log_every_n_steps": 3, "limit_test_batches": 2}
    with pytest.raises(Killed):
        trained(tmp_path, Plain(5), Changes(**settings), LogLastStep())
    resumed = trained(tmp_path, Plain(), Changes(**settings), LogLastStep())
    assert {name: getattr(resumed.trainer, name) for name in settings} == settings


class Grows(Plain):
    """Trains on four rows more in each epoch and validates twice in each. In the last one it lets
    the Trainer validate after each batch.
    """

    def train_dataloader(self) -> Any:
        rows = 4 * (self.trainer.current_epoch + 2)
        return DataLoader(TensorDataset(torch.arange(float(rows))[:, None] / rows), 2)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2, 1)), 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).sum())

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 2:
            self.trainer.val_check_batch = 1


def test_what_lightning_computes_from_the_length_of_new_loaders_is_no_change(
    tmp_path: Path,
) -> None:
    changed = {}
    for epochs in (2, 3):
        trained(tmp_path / str(epochs), Grows(), max_epochs=epochs, val_check_interval=0.5)
        saved = torch.load(tmp_path / str(epochs) / "last.ckpt", weights_only=True)
        changed[epochs] = saved["run"]["state"]["trainer"]
    assert changed[2] == {}
    assert changed[3] == {"val_check_batch": [None, 4, 1]}


class Tempered(Plain):
    """Trains a plain tensor, as reinforcement learning does a temperature, and has what is odd and
    legal: an attribute without values, and an object with any attribute.
    """

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.alphas = [torch.zeros(1, requires_grad=True) for _ in range(2)]
        self.shape_of = torch.empty(3, device="meta")
        self.answers = Answers()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        temperature = self.log_alpha.exp() + sum(each.exp() for each in self.alphas)
        return super().training_step(batch, batch_idx) * temperature.sum()

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2, 1)), 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).sum())

    def configure_optimizers(self) -> Any:
        return Counts([*self.net.parameters(), self.log_alpha, *self.alphas], 0.1, momentum=0.9)


class Answers:
    """Has an attribute of any name, as some configurations do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 1


class Counts(torch.optim.SGD):
    """Keeps a number beside the states of parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.daily(1)
@pytest.mark.parametrize("killed_at", [2, 7])
def test_a_plain_tensor_that_is_trained_stays_the_optimizers(
    killed_at: int, tmp_path: Path
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", Tempered())
    with pytest.raises(Killed):
        trained(tmp_path / "killed", Tempered(killed_at))
    resumed = trained(tmp_path / "killed", Tempered())
    assert resumed.log_alpha.requires_grad
    assert torch.equal(resumed.log_alpha, undisturbed.log_alpha)
    for mine, theirs in zip(resumed.alphas, undisturbed.alphas, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(resumed.net.weight, undisturbed.net.weight)


class CutsShort(Callback):
    """Ends the first epoch early, and lets training go on."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0 and trainer.fit_loop.total_batch_idx == 1:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.should_stop = False


def test_an_epoch_that_was_cut_before_others_is_not_resumed_inside(tmp_path: Path) -> None:
    first = trained(tmp_path, Plain(), CutsShort(), reload_dataloaders_every_n_epochs=0)
    assert first.batches == 10
    longer = trained(
        tmp_path, Plain(), CutsShort(), max_epochs=4, reload_dataloaders_every_n_epochs=0
    )
    assert longer.batches == 14


class OwnShape(LRScheduler):
    """A schedule with a function in an attribute."""

    def __init__(self, optimizer: Any, shape: Any) -> None:
        self.shape = shape
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [self.shape(self.last_epoch) for _ in self.base_lrs]


class Shaped(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        parts = [
            OwnShape(optimizer, lambda step: 0.1 / (step + 1)),
            CosineAnnealingLR(optimizer, 9),
        ]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [4])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_schedule_of_schedules_with_functions_is_resumed(tmp_path: Path) -> None:
    undisturbed = trained(tmp_path / "undisturbed", Shaped())
    with pytest.raises(Killed):
        trained(tmp_path / "killed", Shaped(7))
    resumed = trained(tmp_path / "killed", Shaped())
    assert torch.equal(resumed.net.weight, undisturbed.net.weight)


def test_a_second_training_follows_the_metric_of_its_own_module() -> None:
    best = Best.of(None, None)
    best.take_names_of(SimpleNamespace(monitor="val_f1", mode="max"))  # type: ignore[arg-type]
    best.take_names_of(SimpleNamespace(monitor="val_mse", mode="min"))  # type: ignore[arg-type]
    assert (best.monitor, best.mode) == ("val_mse", "min")
    typed = Best.of("mine", "max")
    typed.take_names_of(SimpleNamespace(monitor="val_mse", mode="min"))  # type: ignore[arg-type]
    assert (typed.monitor, typed.mode) == ("mine", "max")
