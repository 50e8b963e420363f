"""Every kept part of a checkpoint comes back: taken from one Trainer, given back to a fresh one."""

from __future__ import annotations

import io
import itertools
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricTracker, MinMaxMetric
from unbroken.checkpoint.following import Best, Following
from unbroken.checkpoint.kept import KeptParts
from unbroken.errors import UserError
from unbroken.loading import RunLoaders
from unbroken.loading.own_generators import generators_in, seed_them
from unbroken.parts.generators import OwnGenerators, RandomGenerators
from unbroken.parts.held import held_by_users as held
from unbroken.parts.held import is_object
from unbroken.parts.hyperparameters import StartingHyperparameters, apply_changes, with_changes
from unbroken.parts.loaders import LoaderStates
from unbroken.parts.loops import EarlyStop, ValidatedBatches, clean_counters
from unbroken.parts.metrics import CallbackMetrics, LoggedSums, MetricStates, ModuleSums
from unbroken.parts.module import (
    EvalModes,
    FrozenParameters,
    Gradients,
    PlainBuffers,
    UntrackedStatistics,
)
from unbroken.parts.rows import MetricRows
from unbroken.parts.undeclared.attributes import PlainAttributes
from unbroken.parts.undeclared.modules import HiddenModules
from unbroken.parts.undeclared.not_kept import NotKept
from unbroken.parts.users_objects import UsersObjects
from unbroken.storage.contents import RUN_KEY
from unbroken.storage.savable import made_plain
from unbroken.storage.weights import make_room_for_buffers
from unbroken.tensors.same_values import is_same

CPU = torch.device("cpu")


class Module(LightningModule):
    """Has something for every part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.error = MinMaxMetric(MeanSquaredError())
        self.register_buffer("queue", torch.zeros(3), persistent=False)
        self.sums = {"loss": torch.zeros(2)}
        self.automatic_optimization = False

    def metric_state(self) -> dict[str, torch.Tensor]:
        return self.sums

    def load_metric_state(self, state: dict[str, torch.Tensor]) -> None:
        self.sums = state


def trainer_of(module: LightningModule) -> Trainer:
    trainer = Trainer(accelerator="cpu", logger=False, barebones=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    return trainer


@pytest.fixture
def one() -> Trainer:
    return trainer_of(Module())


@pytest.fixture
def other() -> Trainer:
    return trainer_of(Module())


def test_the_list_has_every_part_once_and_generators_last() -> None:
    own = MetricRows(SimpleNamespace())  # type: ignore[arg-type]
    parts = KeptParts(RunLoaders(0), Following(Best()), [own], undeclared=True).all
    names = [part.name for part in parts]
    assert len(names) == len(set(names)) == 31
    assert isinstance(parts[-1], RandomGenerators)


def test_generators(one: Trainer, other: Trainer) -> None:
    state = RandomGenerators().take(one)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    RandomGenerators().give_back(other, state)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(0),
        lambda: np.random.default_rng(0),
        lambda: np.random.Generator(np.random.MT19937(0)),
        lambda: np.random.RandomState(0),
    ],
)
def test_generators_that_a_module_and_a_callback_hold(
    make: Any, one: Trainer, other: Trainer, tmp_path: Path
) -> None:
    class Draws(Callback):
        def __init__(self) -> None:
            self.noise = {"draw": torch.Generator()}

    for trainer in (one, other):
        trainer.lightning_module.helper = SimpleNamespace(draw=make())
        trainer.callbacks.append(Draws())  # type: ignore[attr-defined]

    def draw(trainer: Trainer) -> list[float]:
        callback = trainer.callbacks[-1]  # type: ignore[attr-defined]
        noise = torch.rand(1, generator=callback.noise["draw"])
        return [noise.item(), trainer.lightning_module.helper.draw.uniform(0, 1)]

    draw(one)
    torch.save(own_generators_of(one).take(one), tmp_path / "state.pt")
    expected = draw(one)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    own_generators_of(other).give_back(other, saved)
    assert draw(other) == expected


def own_generators_of(trainer: Trainer) -> OwnGenerators:
    """The part, after a walk over what the user's objects hold."""
    objects = UsersObjects()
    objects.fit_starts(trainer)
    return OwnGenerators(objects)


class InSlots:
    """Keeps its generator in a slot."""

    __slots__ = "draw"

    def __init__(self) -> None:
        self.draw = np.random.default_rng(0)


def test_generators_in_a_slot_or_a_queue_and_those_that_draw_bits_alone(
    one: Trainer, other: Trainer
) -> None:
    for trainer in (one, other):
        generators = [InSlots(), np.random.PCG64(0), np.random.default_rng(0)]
        trainer.lightning_module.helper = deque(generators)

    def draw(trainer: Trainer) -> list[Any]:
        slot, bits, generator = trainer.lightning_module.helper
        return [slot.draw.random(), bits.random_raw(), generator.random()]

    draw(one)
    state = own_generators_of(one).take(one)
    expected = draw(one)
    own_generators_of(other).give_back(other, state)
    assert draw(other) == expected
    there = generators_in(other.lightning_module.helper)
    seed_them(there, 1)
    drawn = draw(other)
    seed_them(there, 1)
    assert draw(other) == drawn != expected


class OfThisProject(Callback):
    """The user's own, in this project's package."""

    __module__ = "numerals.callbacks"

    def __init__(self) -> None:
        self.draw = random.Random(0)


def test_generators_of_callbacks_in_this_package_are_found_by_class(
    one: Trainer, other: Trainer
) -> None:
    one.callbacks += [OfThisProject(), OfThisProject()]  # type: ignore[attr-defined]
    other.callbacks += [Callback(), OfThisProject(), OfThisProject()]  # type: ignore[attr-defined]
    expected = []
    for callback in one.callbacks[-2:]:  # type: ignore[attr-defined]
        expected.append(callback.draw.random())
        callback.draw.seed(len(expected))
    own_generators_of(other).give_back(other, own_generators_of(one).take(one))
    drawn = [callback.draw.random() for callback in other.callbacks[-2:]]  # type: ignore[attr-defined]
    assert drawn == [random.Random(1).random(), random.Random(2).random()]


def test_a_modules_own_sums(one: Trainer, other: Trainer) -> None:
    one.lightning_module.sums["loss"] += 3
    ModuleSums().give_back(other, ModuleSums().take(one))
    assert other.lightning_module.sums["loss"].tolist() == [3, 3]


def test_metrics_and_what_their_wrappers_keep(one: Trainer, other: Trainer) -> None:
    for guess in (1.0, 3.0):
        one.lightning_module.error(torch.tensor([guess]), torch.zeros(1))
    state = MetricStates().take(one)
    MetricStates().give_back(other, state)
    expected = one.lightning_module.error.compute()
    assert other.lightning_module.error.compute() == expected


def test_a_tracker_gets_its_earlier_epochs(one: Trainer, other: Trainer) -> None:
    for trainer, epochs in ((one, 2), (other, 0)):
        trainer.lightning_module.tracker = MetricTracker(MeanSquaredError(), maximize=False)
        for _ in range(epochs):
            trainer.lightning_module.tracker.increment()
            trainer.lightning_module.tracker.update(torch.ones(1), torch.zeros(1))
    MetricStates().give_back(other, MetricStates().take(one))
    assert other.lightning_module.tracker.compute_all().tolist() == [1, 1]


def test_gradients_of_manual_optimization(one: Trainer, other: Trainer) -> None:
    one.lightning_module.net[0].weight.grad = torch.ones(2, 2)
    Gradients(UsersObjects()).give_back(other, Gradients(UsersObjects()).take(one))
    assert other.lightning_module.net[0].weight.grad.tolist() == [[1, 1], [1, 1]]
    assert other.lightning_module.net[0].bias.grad is None


def test_no_gradients_between_two_automatic_steps(one: Trainer) -> None:
    module = one.lightning_module
    module.automatic_optimization = True
    one.strategy.optimizers = [torch.optim.SGD([module.net[0].weight], 0.1)]
    module.net[0].weight.grad = torch.ones(2, 2)
    assert Gradients(UsersObjects()).take(one) == {}
    # No optimizer zeroes it.
    module.net[0].bias.grad = torch.ones(2)
    assert set(Gradients(UsersObjects()).take(one)) == {"net.0.bias"}


def test_frozen_parameters_modes_and_statistics(one: Trainer, other: Trainer) -> None:
    net = one.lightning_module.net
    net[0].weight.requires_grad = False
    net[1].eval()
    net[1].track_running_stats = False
    for part in (FrozenParameters(), EvalModes(), UntrackedStatistics()):
        part.give_back(other, part.take(one))
    again = other.lightning_module.net
    assert not again[0].weight.requires_grad
    assert again[0].bias.requires_grad
    assert not again[1].training
    assert again.training
    assert not again[1].track_running_stats


class Frozen(Module):
    """Is made with its first layer frozen, or not."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.net[0].requires_grad_(not is_frozen)
        self.net[1].train(not is_frozen)
        self.net[1].track_running_stats = not is_frozen


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_a_constructor_freezes_wins_and_what_training_freezes_comes_back(
    is_frozen: bool,
) -> None:
    before = Frozen(not is_frozen)
    parts = (FrozenParameters(), EvalModes(), UntrackedStatistics())
    for part in parts:
        part.begin(trainer_of(before))
    before.net[1].weight.requires_grad = False
    values = [part.take(before.trainer) for part in parts]
    assert values == [{"net.1.weight": False}, {}, {}]

    after = Frozen(is_frozen)
    again = (FrozenParameters(), EvalModes(), UntrackedStatistics())
    for part in again:
        part.begin(trainer_of(after))
    # A hook of the start changes what was not changed then.
    after.net[0].requires_grad_(is_frozen)
    for part, value in zip(again, values, strict=True):
        part.give_back(after.trainer, value)
    assert after.net[0].weight.requires_grad is not is_frozen
    assert after.net[1].training is not is_frozen
    assert after.net[1].track_running_stats is not is_frozen
    assert not after.net[1].weight.requires_grad


def test_only_buffers_that_have_changed_are_kept(one: Trainer, other: Trainer) -> None:
    part = PlainBuffers()
    part.begin(one.lightning_module)
    assert part.take(one) == {}
    one.lightning_module.queue = torch.tensor([1.0, 2.0, 3.0])
    part.give_back(other, part.take(one))
    assert other.lightning_module.queue.tolist() == [1, 2, 3]


class OddBuffers(LightningModule):
    """A sparse buffer that no memory could hold as a dense one, one that is empty, and one that
    shares its memory.
    """

    def __init__(self) -> None:
        super().__init__()
        graph = torch.sparse_coo_tensor([[0], [0]], [1.0], (2**30, 2**30), check_invariants=True)
        self.register_buffer("graph", graph, persistent=False)
        self.register_buffer("empty", None, persistent=False)
        self.register_buffer("empty_and_saved", None)
        self.register_buffer("full", torch.ones(2), persistent=False)
        self.register_buffer("shared", torch.ones(1).expand(3))


def test_buffers_that_training_makes_fills_or_empties_come_back() -> None:
    before = OddBuffers()
    part = PlainBuffers()
    part.begin(before)
    assert part.take(trainer_of(before)) == {}
    before.graph = before.graph * 2
    before.empty = torch.ones(1)
    before.empty_and_saved = torch.ones(2)
    before.full = None
    before.register_buffer("late", torch.ones(3), persistent=False)
    before.register_buffer("late_and_saved", torch.ones(4))
    value = made_plain(part.take(before.trainer), "buffers")
    state = {"ranks": [{"buffers": value}]}
    checkpoint = {"state_dict": before.state_dict(), RUN_KEY: {"state": state}}

    after = OddBuffers()
    make_room_for_buffers(after, checkpoint)
    after.load_state_dict(checkpoint["state_dict"])
    again = PlainBuffers()
    again.begin(after)
    again.give_back(trainer_of(after), value)
    assert is_same(dict(sorted(after.named_buffers())), dict(sorted(before.named_buffers())))
    assert after.full is None
    assert after.state_dict().keys() == before.state_dict().keys()
    assert is_same(again.take(after.trainer), value), "the next save holds them, too"


class Collects(LightningModule):
    """Keeps numbers, tensors and lists as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        self.lr = 0.1
        self.outputs: list[torch.Tensor] = []
        self.window: deque[float] = deque([1.0], maxlen=2)
        self.weights = list(self.net.parameters())
        self.phase = "warm-up"
        self.seen: set[int] = set()
        self.counts = np.zeros(2, dtype=np.int16)
        self.best = np.float32(1)
        self.names = [f"{number}.png" for number in range(2000)]


def test_plain_attributes_that_have_changed_are_kept() -> None:
    before = Collects()
    part = PlainAttributes()
    part.begin(held(trainer_of(before)))
    before.outputs.append(before.net(torch.ones(1, 2)).sum())
    before.window.extend([2.0, 3.0])
    before.net[1].p = 0.5
    before.phase = "main"
    before.seen.add(3)
    before.counts[1] = 5
    before.best = np.float32(0.1)
    before.names.append("more.png")
    value = part.take(held(before.trainer))
    expected = {
        "module.outputs": [before.outputs[0].detach()],
        "module.window": {"collections.deque": [[2.0, 3.0], 2]},
        "module.net.1.p": 0.5,
        "module.phase": "main",
        "module.seen": {3},
        "module.counts": {"numpy.ndarray": torch.tensor([0, 5], dtype=torch.int16)},
        "module.best": {"numpy.generic": torch.tensor(0.1)},
    }
    assert is_same(dict(sorted(value.items())), dict(sorted(expected.items()))), (
        "a list of many texts is data"
    )
    # What a checkpoint holds
    value = made_plain(value, "attributes")

    after = Collects()
    other = PlainAttributes()
    other.begin(held(trainer_of(after)))
    # A hook of the start acts a second time.
    after.lr = 7.0
    other.undo(held(after.trainer), CPU)
    other.give_back(held(after.trainer), value, CPU)
    assert after.lr == 0.1
    assert after.outputs == value["module.outputs"]
    assert after.window == deque([2.0, 3.0], maxlen=2)
    assert after.window.maxlen == 2
    assert after.net[1].p == 0.5
    assert after.phase == "main"
    assert after.seen == {3}
    assert is_same(after.counts, np.array([0, 5], dtype=np.int16))
    assert is_same(after.best, np.float32(0.1))
    assert after.weights[0] is after.net[0].weight


def test_plain_attributes_are_kept_beside_what_a_module_says_itself_that_it_keeps() -> None:
    before = Module()
    before.seen = 0
    data = LightningDataModule()
    data.seen = 0
    trainer = trainer_of(before)
    trainer.datamodule = data
    part = PlainAttributes()
    part.begin(held(trainer))
    before.seen = 3
    data.seen = 5
    assert part.take(held(trainer)) == {"module.seen": 3, "data.seen": 5}


class Meter:
    """A running sum, in an object that is no layer."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.sum = 0.0
        self.recent: deque[float] = deque(maxlen=2)

    def add(self, value: float) -> None:
        self.sum += value
        self.recent.append(value)


class Memory(nn.Module):
    """A layer of the user's own that keeps a tensor and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(2)
        self.seen: list[int] = []


class CountsSteps(Callback):
    """Counts without a state_dict: Lightning's callbacks begin anew then."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.count = 0


class HoldsObjects(LightningModule):
    """Keeps what it counts in objects."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.meters = {"train": Meter(scale), "val": Meter(scale)}
        self.memory = Memory()


def trainer_of_objects(scale: float = 1.0) -> Trainer:
    trainer = trainer_of(HoldsObjects(scale))
    trainer.callbacks.append(CountsSteps())  # type: ignore[attr-defined]
    return trainer


def test_what_objects_and_layers_keep_comes_back_and_callbacks_begin_anew() -> None:
    before = trainer_of_objects()
    module: Any = before.lightning_module
    part = PlainAttributes()
    part.begin(held(before))
    assert part.take(held(before)) == {}
    module.meters["train"].add(2.0)
    module.memory.mean += 1
    module.memory.seen.append(3)
    counts: Any = before.callbacks[-1]  # type: ignore[attr-defined]
    counts.count = 5
    counts.meter.add(1.0)
    value = made_plain(part.take(held(before)), "attributes")

    after = trainer_of_objects(scale=3.0)
    again = PlainAttributes()
    again.begin(held(after))
    again.give_back(held(after), value, CPU)
    module = after.lightning_module
    assert vars(module.meters["train"]) == {"scale": 3.0, "sum": 2.0, "recent": deque([2.0])}
    assert module.meters["val"].sum == 0.0
    assert module.memory.mean.tolist() == [1, 1]
    assert module.memory.seen == [3]
    counts = after.callbacks[-1]  # type: ignore[attr-defined]
    assert (counts.count, counts.meter.sum) == (0, 0.0)


def test_samples_are_not_copied() -> None:
    trainer = trainer_of(HoldsObjects())
    trainer.datamodule = LightningDataModule()  # type: ignore[attr-defined]
    cache = {number: torch.zeros(2**10) for number in range(2**9)}
    few = {"weights": torch.zeros(3), "sparse": torch.eye(3).to_sparse()}
    helper = SimpleNamespace(rows=torch.zeros(2**20), cache=cache, few=few, count=0)
    trainer.datamodule.helper = helper  # type: ignore[attr-defined]
    names = held(trainer).attributes
    assert "data.helper.count" in names
    assert "data.helper.few" in names
    assert "data.helper.rows" not in names
    assert "data.helper.cache" not in names


def test_the_engines_own_objects_keep_their_place_themselves() -> None:
    assert is_object(Meter())
    assert not is_object(RunLoaders())


def test_a_data_module_gets_its_attributes_back_before_it_makes_loaders() -> None:
    trainers = []
    for _ in range(3):
        trainer = trainer_of(Collects())
        trainer.datamodule = LightningDataModule()  # type: ignore[attr-defined]
        trainer.datamodule.pool = [0, 1]  # type: ignore[attr-defined]
        trainers.append(trainer)
    first, second, third = trainers
    part = PlainAttributes()
    part.begin(held(first))
    first.datamodule.pool.append(7)  # type: ignore[attr-defined]
    value = part.take(held(first))
    for trainer in (second, third):
        part = PlainAttributes()
        part.give_back_early(held(trainer), value, CPU)
        pool = trainer.datamodule.pool  # type: ignore[attr-defined]
        assert pool == [0, 1, 7]
        part.begin(held(trainer))
        part.undo(held(trainer), CPU)
        part.give_back(held(trainer), value, CPU)
        assert trainer.datamodule.pool is pool, "a loader may hold it"  # type: ignore[attr-defined]
        value = part.take(held(trainer))
        assert value == {"data.pool": [0, 1, 7]}, "the next resume needs it, too"


class Hides(LightningModule):
    """Hides a teacher, a frozen network and a metric from its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.teacher = [nn.BatchNorm1d(2)]
        self.frozen = [nn.Linear(2, 2)]
        self.same = {"net": self.net}
        self.scales = [nn.Parameter(torch.ones(2))]
        self.metrics = {"mean": MeanMetric()}


def test_modules_that_are_no_layers_come_back() -> None:
    before = trainer_of(Hides())
    part = HiddenModules()
    part.begin(held(before), before.lightning_module)
    module: Any = before.lightning_module
    module.teacher[0](torch.randn(4, 2))
    with torch.no_grad():
        module.teacher[0].weight.add_(1)
        module.net.weight.add_(1)
        module.scales[0].add_(1)
    module.metrics["mean"].update(3.0)
    value = made_plain(part.take(held(before), module), "modules")
    assert {name.rpartition(".")[2] for name in value["tensors"]} == {
        *("weight", "running_mean", "running_var", "num_batches_tracked", "0")
    }, "what has not changed is left out"

    after = trainer_of(Hides())
    again = HiddenModules()
    there: Any = after.lightning_module
    again.begin(held(after), there)
    again.give_back(held(after), there, value)
    assert is_same(dict(there.teacher[0].state_dict()), dict(module.teacher[0].state_dict()))
    assert there.scales[0].tolist() == [2, 2]
    assert there.metrics["mean"].compute() == 3.0
    taken = again.take(held(after), there)
    assert is_same(taken["tensors"], value["tensors"]), "the next save holds it, too"


class CannotBeHeld(LightningModule):
    """Keeps what no checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.cycle([1, 2])
        self.names = np.array(["a"])
        self.samples: list[Any] = [object()]
        self.constants = [object()]
        self.count = 0
        self.log_file = io.StringIO()
        self.loss = nn.functional.mse_loss


class SavesItself(CannotBeHeld):
    """Saves it by itself."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["samples"] = len(self.samples)


def changed(module: Any) -> NotKept:
    not_kept = NotKept()
    not_kept.begin(held(trainer_of(module)))
    module.names = np.array(["b"])
    module.samples.append(object())
    module.count += 1
    assert module.hparams == {}, "Lightning makes them where it saves"
    return not_kept


def test_what_changes_and_cannot_be_held_is_told_once() -> None:
    module = CannotBeHeld()
    not_kept = changed(module)
    told = [
        line.partition(": ")[2].partition(" ")[0] for line in not_kept.lines(held(module.trainer))
    ]
    assert told == ["module.turns", "module.names", "module.samples"]
    assert not_kept.lines(held(module.trainer)) == []


def test_a_module_that_saves_what_it_keeps_is_told_nothing() -> None:
    module = SavesItself()
    assert changed(module).lines(held(module.trainer)) == []


class OnAccelerator(torch.Tensor):
    """Says that it lies on an accelerator, of which there is none here."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]

    def detach(self) -> Any:
        return self.as_subclass(torch.Tensor)


def test_tensors_in_lists_go_back_to_the_accelerator_that_they_were_on(
    tmp_path: Path,
) -> None:
    before = Collects()
    part = PlainAttributes()
    part.begin(held(trainer_of(before)))
    loss = torch.ones(2).as_subclass(OnAccelerator)
    before.outputs = [loss, torch.zeros(2)]
    before.window.append({"losses": (loss, 1.0)})  # type: ignore[arg-type]
    torch.save(made_plain(part.take(held(before.trainer)), "attributes"), tmp_path / "state.pt")

    after = Collects()
    trainer = trainer_of(after)
    # No tensor can be moved to meta but on purpose.
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    part.give_back(held(trainer), saved, torch.device("meta"))
    assert [loss.device.type for loss in after.outputs] == ["meta", "cpu"]
    (first, last) = after.window
    assert first == 1.0
    assert last["losses"][0].device.type == "meta"  # type: ignore[index]


def test_what_the_sanity_check_has_changed_is_kept() -> None:
    before = Collects()
    part = PlainAttributes()
    part.check_begins(held(trainer_of(before)))
    before.phase = "checked"
    part.check_ends(held(before.trainer))
    part.begin(held(before.trainer))
    assert part.take(held(before.trainer)) == {"module.phase": "checked"}


def test_what_an_epochs_start_has_made_of_nothing_stays() -> None:
    module = Collects()
    module.helper = None
    part = PlainAttributes()
    part.begin(held(trainer_of(module)))
    module.helper = SimpleNamespace()
    part.undo(held(module.trainer), CPU)
    part.give_back(held(module.trainer), part.take(held(module.trainer)), CPU)
    assert module.helper is not None


def test_what_shares_its_memory_with_a_weight_still_does() -> None:
    modules = []
    part = PlainAttributes()
    for _ in range(2):
        module = Collects()
        module.phases = {"codebook": module.net[0].weight.data, "count": 0}
        modules.append(module)
    before, after = modules
    part.begin(held(trainer_of(before)))
    before.phases["count"] = 3
    with torch.no_grad():
        before.net[0].weight.add_(1)
    after.load_state_dict(before.state_dict())
    part.give_back(held(trainer_of(after)), part.take(held(before.trainer)), CPU)
    assert after.phases["count"] == 3
    assert after.phases["codebook"].data_ptr() == after.net[0].weight.data_ptr()


@pytest.mark.parametrize(
    "forged",
    [
        {"filled": 3},
        {"filled": [[]]},
        {"same": ["module.lr"]},
        [],
    ],
    ids=str,
)
def test_a_forged_list_of_objects_is_one_line(forged: Any) -> None:
    module = Collects()
    with pytest.raises(UserError, match="Give another checkpoint"):
        PlainAttributes().give_back(held(trainer_of(module)), {"module.lr": 1.0}, CPU, forged)


def test_a_checkpoint_lets_an_attribute_hold_plain_values_of_others_alone() -> None:
    module = Collects()
    objects = {"same": {"module.phase": "module.net", "module.lr": "module.window"}}
    PlainAttributes().give_back(held(trainer_of(module)), {}, CPU, objects)
    assert module.phase == "warm-up", "a layer is no plain value"
    assert module.lr is module.window


class PlainSums(Metric):
    """Keeps its sums in plain attributes."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.largest = largest
        self.total = 0.0
        self._seen: list[float] = []
        self.last = None

    def update(self, value: float) -> None:
        self.total += min(value, self.largest)
        self._seen.append(value)
        self.last = torch.tensor(value)

    def compute(self) -> float:
        return self.total / len(self._seen)


def test_what_a_metric_keeps_in_plain_attributes() -> None:
    before = Module()
    before.sum = PlainSums(10.0)
    part = PlainAttributes()
    part.begin(held(trainer_of(before)))
    before.sum.update(3.0)
    value = part.take(held(before.trainer))
    assert value == {"module.sum.total": 3.0, "module.sum._seen": [3.0]}
    after = Module()
    after.sum = PlainSums(20.0)
    again = PlainAttributes()
    again.begin(held(trainer_of(after)))
    MetricStates().give_back(after.trainer, MetricStates().take(before.trainer))
    again.give_back(held(after.trainer), value, CPU)
    assert after.sum.compute() == 3.0
    assert after.sum.largest == 20.0
    assert after.sum.last == torch.tensor(3.0)


def test_batches_that_validations_have_read(one: Trainer, other: Trainer) -> None:
    ValidatedBatches().give_back(one, {0: 7})
    ValidatedBatches().give_back(other, ValidatedBatches().take(one))
    assert ValidatedBatches().take(other) == {0: 7}


def test_latest_values_with_their_types(one: Trainer, other: Trainer) -> None:
    one.callback_metrics["val_loss"] = torch.tensor(0.1, dtype=torch.float64)
    CallbackMetrics().give_back(other, CallbackMetrics().take(one))
    assert other.callback_metrics["val_loss"].dtype == torch.float64
    assert other.callback_metrics["val_loss"] == one.callback_metrics["val_loss"]


def test_an_early_stop_is_taken(one: Trainer) -> None:
    assert not EarlyStop().take(one)
    one.should_stop = True
    assert EarlyStop().take(one)


def test_loader_positions_tell_whether_the_epoch_is_over(one: Trainer) -> None:
    asked: list[Any] = []
    loading: Any = SimpleNamespace(
        positions=[
            SimpleNamespace(state_to_start_after=lambda *words: asked.append(words) or (0, None))
        ]
    )
    part = LoaderStates(loading)
    part.epoch_is_over = True
    assert part.take(one) == [(0, None)]
    assert asked == [(0, True)]


def test_rows_are_counted_and_cut() -> None:
    calls: list[Any] = []
    rows: Any = SimpleNamespace(
        count=12,
        write=lambda to_disk=False: calls.append(("write", to_disk)),
        keep_rows=lambda count: calls.append(("keep", count)),
    )
    part = MetricRows(rows)
    trainer: Any = None
    part.give_back(trainer, part.take(trainer))
    part.flush()
    assert calls == [("keep", 12), ("write", True)]


def test_sums_of_self_log_are_of_the_running_epoch_alone(one: Trainer) -> None:
    assert LoggedSums().take(one) == {}


def optimizers_of(lr: float, decay: float) -> Any:
    """A Trainer with one optimizer and schedule, as a start makes them."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    configs = [SimpleNamespace(scheduler=schedule)]
    return SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=configs)


@pytest.mark.parametrize(("changed", "rate", "decay"), [(True, 0.02, 0.3), (False, 0.05, 0.1)])
def test_what_the_user_has_changed_wins_and_what_the_schedule_did_stays(
    changed: bool, rate: float, decay: float
) -> None:
    before = optimizers_of(0.1, 0.1)
    then = StartingHyperparameters()
    then.begin(before)
    before.optimizers[0].step()
    before.lr_scheduler_configs[0].scheduler.step()
    now = optimizers_of(0.04, 0.3)
    start = StartingHyperparameters()
    start.begin(now)
    now.optimizers[0].load_state_dict(before.optimizers[0].state_dict())
    apply_changes(now, start.now, then.take(before), changed)
    (group,) = now.optimizers[0].param_groups
    assert group["lr"] == pytest.approx(rate)
    assert group["weight_decay"] == decay


def test_nested_changes_win_one_by_one() -> None:
    current = {"a": [1, 2], "b": {"c": 3, "d": 4}}
    earlier = {"a": [0, 2], "b": {"c": 0, "d": 9}}
    wanted = {"a": [0, 5], "b": {"c": 0, "d": 9}}
    assert with_changes(current, wanted, earlier) == {"a": [1, 5], "b": {"c": 3, "d": 4}}


def test_counters_between_two_steps_are_all_done_or_not_begun() -> None:
    def counters(ready: int, completed: int) -> dict[str, int]:
        return {"ready": ready, "started": ready, "processed": completed, "completed": completed}

    fit: dict[str, Any] = {
        "state_dict": {"combined_loader": [1]},
        "epoch_loop.batch_progress": {
            "total": counters(8, 7),
            "current": counters(4, 3),
            "is_last_batch": True,
        },
        "epoch_loop.val_loop.batch_progress": {"total": counters(2, 2), "current": counters(2, 2)},
        "epoch_loop.state_dict": {"_batches_that_stepped": 7},
        "epoch_progress": {"total": counters(2, 1), "current": counters(2, 1)},
    }
    clean_counters(fit, "batch", validated=True)
    assert fit["state_dict"] == {}
    assert fit["epoch_loop.batch_progress"]["current"] == counters(3, 3)
    assert not fit["epoch_loop.batch_progress"]["is_last_batch"]
    assert fit["epoch_loop.state_dict"]["_batches_that_stepped"] == 6
    assert fit["epoch_progress"]["current"] == counters(2, 1), "the epoch goes on"
