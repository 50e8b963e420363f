"""What training puts in the place of something of the start comes back, or is told."""

from __future__ import annotations

import copy
import functools
import math
import multiprocessing
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from unbroken import ExactCheckpoint

STEPS = 5


class Killed(Exception):
    """Ends a run in the middle of an epoch."""


class Task(LightningModule):
    """Five steps an epoch."""

    # The step before which the killed run ends
    killed_at = 2 * STEPS - 2

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.2), nn.Linear(2, 1))
        self.measure: Any = nn.functional.mse_loss
        self.factor = 1.0

    def rows(self) -> Any:
        return TensorDataset(torch.arange(2.0 * STEPS)[:, None])

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows(), 2, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows(), 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] / 10
        return self.measure(self.net(x), x.sin()) * self.factor

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


class NewSchedule(Task):
    """Makes its schedule again when it knows how long the training is."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, 99), "interval": "step"}]

    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        self.trainer.lr_scheduler_configs[0].scheduler = CosineAnnealingLR(optimizer, 15)


class LessOften(Task):
    """Steps its schedule less often after the first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.lr_scheduler_configs[0].frequency = 3


class MorePatient(Task):
    """Waits longer for a better value after the first epoch."""

    def on_train_epoch_end(self) -> None:
        stopping: Any = self.trainer.early_stopping_callback
        if self.current_epoch == 0:
            stopping.patience = 2


class Reads(Task):
    """Weighs its loss by what was logged last."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: list[Any] = [self.trainer.logged_metrics, self.trainer.progress_bar_metrics]
        weights = [1 + float(each.get("val_loss", 0.0)) for each in found]
        return super().training_step(batch, batch_idx) * sum(weights)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch), prog_bar=True)


class Reorders(Task):
    """Weighs its loss by the entry of a dictionary that was used longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = {"a": 1.0, "b": 2.0, "c": 3.0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        oldest = next(iter(self.weights))
        self.weights[oldest] = self.weights.pop(oldest)
        return super().training_step(batch, batch_idx) * self.weights[oldest]


class SignsItsZero(Task):
    """Divides by a zero whose sign training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros = [0.0, torch.zeros(2)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        signs = [torch.copysign(torch.ones(1), torch.as_tensor(each)).sum() for each in self.zeros]
        if self.global_step == 3:
            self.zeros = [-0.0, -torch.zeros(2)]
        return super().training_step(batch, batch_idx) * (3 + sum(signs))


class Spawns(Task):
    """Adds noise of children of a generator, and of another generator from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [np.random.default_rng(1)]
        self.seed = np.random.SeedSequence(2)
        self.later = np.random.default_rng(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 1:
            self.later = np.random.default_rng(4)
        children = [each.spawn(2)[1] for each in (*self.generators, self.later)]
        children.append(np.random.default_rng(self.seed.spawn(1)[0]))
        noise = sum(float(child.normal()) for child in children)
        return super().training_step(batch, batch_idx) * (1 + noise)


# Filled as a test begins: other tests look at what is in global variables.
GENERATORS: dict[str, Any] = {}


class DrawsFromFurther(Task):
    """Draws from a generator in a global dictionary, and from one that a default is."""

    def drawn(self, of: random.Random = random.Random(6)) -> float:  # noqa: B008
        return of.random() + float(GENERATORS["noise"].normal())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.drawn()


AVERAGE = nn.Linear(1, 2)


class AveragesInAGlobal(Task):
    """Averages its first layer in a global module, and weighs its loss by the average."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            AVERAGE.weight.lerp_(self.net[0].weight, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * AVERAGE.weight.abs().sum().detach()


class HasWeightsOfItsOwn(Task):
    """Moves two weights by itself, every second step: one is in no module, one in a hidden one."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(1, requires_grad=True)
        self.hidden = [nn.Linear(1, 1)]
        self.own = torch.optim.SGD([self.shift, *self.hidden[0].parameters()], 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.hidden[0](batch[0] / 10) + self.shift], batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step % 2 == 1:
            self.own.step()
            self.own.zero_grad()


class ReplacesAWeight(Task):
    """Puts another tensor with a gradient in the place of one at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(1, requires_grad=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0] + self.shift], batch_idx)

    def on_before_zero_grad(self, _: Any) -> None:
        if self.shift.grad is not None:
            moved = self.shift + self.shift.grad.sign()
            self.shift = moved.detach().requires_grad_()


class DrawsItsRows(Task):
    """Draws as it makes the loader of each epoch, by which batches are shifted."""

    def train_dataloader(self) -> Any:
        rows = torch.arange(2.0 * STEPS)[:, None] + torch.rand(1)
        return DataLoader(TensorDataset(rows), 2, shuffle=True)


class DrawsAsTrainingStarts(DrawsItsRows):
    """Draws behind the making of its first loader, too."""

    killed_at = 2

    def on_train_start(self) -> None:
        torch.rand(1)


class Shifted(Dataset[Any]):
    """Rows that the hook of an epoch's start shifts."""

    shift = torch.zeros(1)

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, place: int) -> Any:
        return [place + self.shift]


class DrawsForAnEpoch(Task):
    """Draws at the start of each epoch, for its data set, which nobody keeps."""

    def rows(self) -> Any:
        return Shifted()

    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        loader.dataset.shift = torch.rand(1)


class OwnFormat(TorchCheckpointIO):
    """Reads what it has written alone."""

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        raise AssertionError("another one has written that")


class Kills(Callback):
    """Ends a run before a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


def trained(
    folder: Path,
    make: Callable[[], Task],
    killed_at: int | None = None,
    more: Any = (),
    plugins: Any = (),
) -> Trainer:
    """Train for three epochs."""
    torch.manual_seed(0)
    keep = ExactCheckpoint(folder, every="1")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Kills(killed_at), *(each() for each in more), keep],
        plugins=[*plugins],
        reload_dataloaders_every_n_epochs=int(make in (DrawsItsRows, DrawsAsTrainingStarts)),
    )
    trainer.fit(make(), ckpt_path=keep.resume_from)
    return trainer


def stopping() -> Callback:
    return EarlyStopping("val_loss", patience=1, mode="min")


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "make",
    [
        NewSchedule,
        LessOften,
        MorePatient,
        Reads,
        Reorders,
        SignsItsZero,
        Spawns,
        DrawsFromFurther,
        AveragesInAGlobal,
        HasWeightsOfItsOwn,
        ReplacesAWeight,
        DrawsItsRows,
        DrawsAsTrainingStarts,
        DrawsForAnEpoch,
    ],
)
def test_what_training_sets_anew_comes_back(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [stopping] if make is MorePatient else []

    def begin_a_process() -> None:
        monkeypatch.setattr(sys.modules[__name__], "AVERAGE", nn.Linear(1, 2).requires_grad_(False))
        nn.init.ones_(AVERAGE.weight)
        monkeypatch.setitem(GENERATORS, "noise", np.random.default_rng(5))
        monkeypatch.setattr(DrawsFromFurther.drawn, "__defaults__", (random.Random(6),))

    begin_a_process()
    undisturbed = trained(tmp_path / "undisturbed", make, more=more)
    begin_a_process()
    with pytest.raises(Killed):
        trained(tmp_path / "killed", make, make.killed_at, more)
    begin_a_process()
    resumed = trained(tmp_path / "killed", make, more=more)
    assert resumed.global_step == undisturbed.global_step
    ours, theirs = (each.lightning_module.state_dict() for each in (resumed, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_io_of_the_users_does_not_read_what_it_has_not_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, Task, 2 * STEPS - 2, plugins=[OwnFormat()])
    assert trained(tmp_path, Task, plugins=[OwnFormat()]).global_step == 3 * STEPS


class OtherLayer(Task):
    """Takes a layer out after the first epoch."""

    def on_train_epoch_end(self) -> None:
        self.net[1] = nn.Identity()


class OtherFunction(Task):
    """Measures in another way after the first epoch."""

    def on_train_epoch_end(self) -> None:
        self.measure = nn.functional.l1_loss


class OtherMethod(Task):
    """Measures by another method after the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.measure = self.early

    def early(self, found: Tensor, target: Tensor) -> Tensor:
        return (found - target).abs().mean()

    def late(self, found: Tensor, target: Tensor) -> Tensor:
        return (found - target).square().mean()

    def on_train_epoch_end(self) -> None:
        self.measure = self.late


class OtherClass(Task):
    """Takes another class from the first epoch's end on."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: type[nn.Module] = nn.L1Loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = self.kind()(self.net(batch[0] / 10), batch[0].sin())
        return found

    def on_train_epoch_end(self) -> None:
        self.kind = nn.MSELoss


class Stage:
    """What differs between the stages of a training."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def get(self) -> float:
        return self.factor


class NextLayer(Task):
    """Trains a layer, and in its second epoch another one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.head = self.heads[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = (
            super().training_step(batch, batch_idx) + self.head(batch[0]).square().mean()
        )
        return found

    def on_train_epoch_end(self) -> None:
        self.head = self.heads[1]


class Swaps(Task):
    """Lets two networks change their places."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.4), nn.Linear(2, 1))

    def on_train_epoch_end(self) -> None:
        self.net, self.other = self.other, self.net


class NextStage(Task):
    """Goes on to another one of its objects, of which a dictionary holds the one in use."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: Any = {"early": Stage(1.0), "late": Stage(0.5)}
        self.stages["now"] = self.stages["early"]

    def on_train_epoch_end(self) -> None:
        self.stages["now"] = self.stages["late"]


class NextFunction(Task):
    """Goes on to another function that has no name, either."""

    def __init__(self) -> None:
        super().__init__()
        self.measures = [lambda a, b: (a - b).abs().mean(), lambda a, b: (a - b).square().mean()]
        self.measure = self.measures[0]

    def on_train_epoch_end(self) -> None:
        self.measure = self.measures[1]


class MethodOfAnother(Task):
    """Asks another object of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: Any = [Stage(1.0), Stage(0.5)]
        self.ask = self.stages[0].get

    def on_train_epoch_end(self) -> None:
        self.ask = self.stages[1].get


class NextRows(Task):
    """Goes on to another data set."""

    def __init__(self) -> None:
        super().__init__()
        self.easy, self.hard = super().rows(), super().rows()
        self.current = self.easy

    def rows(self) -> Any:
        return self.current

    def on_train_epoch_end(self) -> None:
        self.current = self.hard


class BecomeOne(Task):
    """Has two objects, and then one by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Stage(1.0), Stage(0.5)

    def on_train_epoch_end(self) -> None:
        self.two = self.one


class InSlots:
    """Counts in a slot."""

    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def add(self) -> None:
        self.__count += 1


class Named(InSlots):
    """Has a dictionary beside the slot."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class CountsInASlot(Task):
    """Keeps an object that has slots and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Named("batches")

    def on_train_batch_end(self, *_: Any) -> None:
        self.meter.add()


class ArrayOfObjects(Task):
    """Counts in an array of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.array([0, "batches", None], dtype=object)

    def on_train_batch_end(self, *_: Any) -> None:
        self.table[0] += 1


class OtherLayerOfATeacher(Task):
    """Puts another layer into a teacher that is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Sequential(nn.Linear(1, 1), nn.ReLU())]

    def on_train_epoch_end(self) -> None:
        self.teacher[0][1] = nn.Tanh()


class OtherForward(Task):
    """Lets a layer of torch's compute something else."""

    def on_train_epoch_end(self) -> None:
        self.net[1].forward = torch.tanh


class OtherEntries(Task):
    """Puts other functions into a dictionary and into a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = {"last": torch.sigmoid}
        self.part = functools.partial(torch.add, alpha=2)

    def on_train_epoch_end(self) -> None:
        self.functions["last"] = torch.tanh
        self.part = functools.partial(torch.sub, alpha=2)


class Calls(Callback):
    """Calls another function after an epoch."""

    def __init__(self) -> None:
        self.function = math.sin

    def on_train_epoch_end(self, *_: Any) -> None:
        self.function = math.cos


class SharesANumber(Task):
    """Has a number that workers could see."""

    def __init__(self) -> None:
        super().__init__()
        self.level = multiprocessing.Value("d", 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.level.value *= 0.9


class NotThereYet:
    """Has an attribute that cannot be read before it is opened."""

    __slots__ = ("__dict__", "handle")

    def __getattribute__(self, name: str) -> Any:
        if name == "handle":
            raise RuntimeError("open it first")
        return super().__getattribute__(name)


class HoldsWhatCannotBeRead(Task):
    def __init__(self) -> None:
        super().__init__()
        self.reader = NotThereYet()


class Rotates(Task):
    """Objects of one class change their places, and all that they hold is kept by place."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = [Stage(1.0), Stage(0.5), Stage(0.25)]
        self.front, self.back = Stage(1.0), Stage(2.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.stages.append(self.stages.pop(0))
        self.stages[0].factor *= 0.9
        self.front, self.back = self.back, self.front
        return super().training_step(batch, batch_idx) * self.stages[0].factor * self.front.factor


class ChoosesByEpoch(Task):
    """A hook of each epoch's start chooses a stage, and the loader's maker chooses the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = [Stage(1.0), Stage(0.5)]
        self.stage = self.stages[0]
        self.sets = [super().rows(), super().rows()]
        self.current = self.sets[0]

    def train_dataloader(self) -> Any:
        self.current = self.sets[self.current_epoch % 2]
        return DataLoader(self.current, 2, shuffle=True)

    def on_train_epoch_start(self) -> None:
        self.stage = self.stages[self.current_epoch % 2]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.stage.factor


class RemakesIts(Callback):
    """Makes a network in training, saves it, and makes it again."""

    def __init__(self) -> None:
        self.best: Any = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.best = copy.deepcopy(pl_module.net)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.best is None else {"best": self.best.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = Task().net
        self.best.load_state_dict(state_dict["best"])


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("make", "more"), [(Rotates, []), (ChoosesByEpoch, []), (Task, [RemakesIts])]
)
def test_what_moves_and_comes_back_is_not_told(
    make: Any, more: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", make, more=more)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", make, 2 * STEPS - 2, more)
    resumed = trained(tmp_path / "killed", make, more=more)
    assert "a resume may not be exact" not in capsys.readouterr().out
    for mine, theirs in zip(
        resumed.lightning_module.parameters(),
        undisturbed.lightning_module.parameters(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


class Labelled(Dataset[Any]):
    """Rows with labels, which are seen through something that the data set holds."""

    def __init__(self) -> None:
        self.labels = torch.zeros(2 * STEPS)
        self.view = View()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> Any:
        return [self.view.strength * (place + self.labels[place, None])]


class View:
    """Strengthens rows."""

    strength = 1.0


class WritesLabels(Task):
    """Writes labels of its own between two epochs."""

    def rows(self) -> Any:
        return Labelled()

    def on_train_epoch_end(self) -> None:
        loader: Any = self.trainer.train_dataloader
        loader.dataset.labels += 1


class Strengthens(Task):
    """Sets what its data set holds between two epochs."""

    def rows(self) -> Any:
        return Labelled()

    def on_train_epoch_end(self) -> None:
        loader: Any = self.trainer.train_dataloader
        loader.dataset.view.strength *= 0.9


BANK = torch.zeros(2)


class FillsAGlobal(Task):
    """Fills a global tensor."""

    def on_train_batch_end(self, *_: Any) -> None:
        BANK.add_(1)


class HasAnIterator(Callback):
    """Reads rows of its own."""

    def __init__(self) -> None:
        self.rows = iter(range(99))

    def on_train_batch_end(self, *_: Any) -> None:
        next(self.rows)


def counts() -> Callback:
    """One of Lightning's, with a hook of the user's that counts."""
    seen = np.zeros(1)

    def count(*_: Any) -> None:
        seen[0] += 1

    return LambdaCallback(on_train_batch_end=count)


class Hooked(Task):
    """Has a hook after the first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.net[0].register_forward_hook(lambda layer, inputs, output: output * 0.9)


class Leaves(Callback):
    """Takes part in the first epoch alone."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.callbacks.remove(self)  # type: ignore[attr-defined]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("make", "more", "line"),
    [
        (OtherLayer, [], "Identity in the place of Dropout at module.net.1"),
        (OtherFunction, [], "l1_loss in the place of mse_loss at module.measure"),
        (OtherMethod, [], "OtherMethod.late in the place of OtherMethod.early at module.measure"),
        (OtherClass, [], "MSELoss in the place of L1Loss at module.kind"),
        (NextLayer, [], "put the object of module.heads.1 at module.head, where"),
        (Swaps, [], "put the object of module.other at module.net, where"),
        (NextStage, [], "put the object of module.stages.late at module.stages.now, where"),
        (NextFunction, [], "put the object of module.measures.1 at module.measure, where"),
        (MethodOfAnother, [], "put the object of module.stages.1 at module.ask.__self__, where"),
        (NextRows, [], "put the object of module.hard at module.current, where"),
        (BecomeOne, [], "put the object of module.one at module.two, where"),
        (CountsInASlot, [], "module.meter._InSlots__count changes in training"),
        (ArrayOfObjects, [], "module.table changes in training"),
        (OtherLayerOfATeacher, [], "Tanh in the place of ReLU at module.teacher.0.1."),
        (OtherForward, [], "in the place of Dropout.forward at module.net.1.forward."),
        (OtherEntries, [], "sigmoid at module.functions.last."),
        (OtherEntries, [], "add at module.part.func."),
        (Task, [Calls], "cos in the place of sin at callbacks.Calls.0.function."),
        (SharesANumber, [], "module.level changes in training"),
        (HoldsWhatCannotBeRead, [], "to look at module.reader raises a RuntimeError"),
        (WritesLabels, [], "training changes what Labelled holds between two epochs"),
        (Strengthens, [], "begins anew with train_dataloader.dataset.view, which changes"),
        (FillsAGlobal, [], "begins anew with test_other_objects.BANK, which changes"),
        (Task, [HasAnIterator], "begins anew with callbacks.HasAnIterator.0.rows, which changes"),
        (Task, [counts], "LambdaCallback.0.on_train_batch_end.seen, which changes in training"),
        (Hooked, [], "the number of hooks of module.net.0 from 0 to 1"),
        (Task, [Leaves], "has changed the callbacks from Kills Leaves to Kills"),
    ],
)
def test_what_a_resumed_run_has_of_its_start_is_told_once(
    make: Any, more: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "undisturbed", make, more=more)
    assert capsys.readouterr().out.count(line) == 1
    # A resume is not exact, and comes to its end.
    with pytest.raises(Killed):
        trained(tmp_path / "killed", make, 2 * STEPS - 2, more)
    assert trained(tmp_path / "killed", make, more=more).global_step == 3 * STEPS


class Counts(Callback):
    """Counts epochs, and nobody keeps the count."""

    def __init__(self) -> None:
        self.count = 0
        self.epoch = -1

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.count += 1
        self.epoch = trainer.current_epoch
        pl_module.factor = 1 / self.count


def test_what_the_starts_of_epochs_add_up_is_told_at_the_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, Task, 2 * STEPS - 2, [Counts])
    assert "Counts" not in capsys.readouterr().out
    trained(tmp_path, Task, more=[Counts])
    told = capsys.readouterr().out
    assert told.count("callbacks.Counts.0.count was 2 at the save and is 1 now") == 1
    assert "Counts.0.epoch" not in told, "it is set alike"
