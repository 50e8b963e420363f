"""Loss, metrics, optimizer and schedule by plain values, under a plain Trainer; networks of all
kinds interchange.
"""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.profilers import PyTorchProfiler
from numerals.model import MLP, ConvNet, MNISTClassifier
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import (
    BootStrapper,
    ClasswiseWrapper,
    MeanAbsoluteError,
    MinMaxMetric,
    R2Score,
)
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassROC,
    MultilabelF1Score,
)
from unbroken.data import BatchedDataModule, SplitDataModule, TensorImages, TensorRows
from unbroken.errors import UserError
from unbroken.tasks import ImageClassifier, SupervisedModule
from unbroken.tasks.activation_checkpointing import recompute_activations
from unbroken.tasks.classifier import check_fit
from unbroken.tasks.schedules import rate_factor
from unbroken.tasks.waiting_batches import MOST_BATCHES


def test_the_mlp_has_784_256_128_10_units() -> None:
    assert sum(p.numel() for p in MLP().parameters()) == 235_146
    assert MLP()(torch.rand(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("network", [MLP(), ConvNet()])
def test_networks_take_an_empty_batch(network: nn.Module) -> None:
    assert network.eval()(torch.rand(0, 1, 28, 28)).shape == (0, 10)


def with_spectral_norm() -> nn.Module:
    """Each forward pass in training changes the buffers from which the weights are computed."""
    block = nn.Sequential(nn.Flatten(), spectral_norm(nn.Linear(784, 16)), nn.ReLU())
    return nn.Sequential(block, spectral_norm(nn.Linear(16, 3)))


@pytest.mark.parametrize("network", [MLP(dropout=0.5), ConvNet(), with_spectral_norm()])
def test_recomputed_activations_give_the_same_gradients_and_keys(network: nn.Module) -> None:
    images = torch.rand(8, 1, 28, 28)
    twin = copy.deepcopy(network)
    recompute_activations(twin)
    buffers = [*map(id, twin.buffers())]
    assert list(twin.state_dict()) == list(network.state_dict())
    gradients = []
    for one in (network, twin):
        torch.manual_seed(0)
        one(images).sum().backward()
        gradients.append([p.grad for p in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    # Running statistics are counted once, and their tensors stay the same objects.
    statistics = dict(network.named_buffers())
    for name, found in twin.named_buffers():
        assert torch.equal(found, statistics[name])
    assert [*map(id, twin.buffers())] == buffers


def test_recomputing_stores_fewer_activations() -> None:
    def stored_bytes(network: nn.Module) -> int:
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(torch.rand(64, 1, 28, 28)).sum()
        return total

    network = ConvNet()
    before = stored_bytes(network)
    recompute_activations(network)
    assert stored_bytes(network) < 0.5 * before


@pytest.mark.nightly
def test_compiled_checkpoints_are_eager_ones() -> None:
    eager = ImageClassifier(MLP())
    compiled = ImageClassifier(MLP(), compile=True)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    eager.load_state_dict(compiled.state_dict())


@pytest.mark.nightly
def test_a_compiled_network_that_recomputes_activations_counts_its_statistics_once() -> None:
    images = torch.rand(8, 1, 6, 6)
    block = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    plain = nn.Sequential(block, nn.Flatten(), nn.Linear(64, 3))
    recomputing = copy.deepcopy(plain)
    recompute_activations(recomputing)
    recomputing.compile()
    for network in (plain, recomputing):
        for _ in range(2):
            network(images).sum().backward()
    statistics = dict(plain.named_buffers())
    for name, found in recomputing.named_buffers():
        torch.testing.assert_close(found, statistics[name])
    gradients = dict(plain.named_parameters())
    for name, parameter in recomputing.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-3)


def make_optimizer(network: nn.Module, **kwargs: Any) -> Any:
    module = SupervisedModule(network, **kwargs)
    module.trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    return module.make_optimizer()


def test_weight_decay_spares_biases_and_norms() -> None:
    optimizer = make_optimizer(ConvNet(), weight_decay=0.1)
    decayed, spared = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    assert all(p.ndim < 2 for p in spared["params"])
    assert optimizer.defaults["fused"]


@pytest.mark.parametrize("name", ["SGD", "Adam", "torch.optim.RMSprop"])
def test_optimizers_are_named(name: str) -> None:
    assert type(make_optimizer(MLP(), optimizer=name)).__name__ == name.split(".")[-1]


def test_an_unknown_optimizer_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean AdamW"):
        make_optimizer(MLP(), optimizer="AdmW")


@pytest.mark.parametrize("shape", ["constant", "cosine", "linear", "onecycle"])
def test_schedules_climb_to_the_peak_and_survive_a_longer_run(shape: str) -> None:
    factors = [rate_factor(shape, 0.2, 100, step) for step in range(101)]  # type: ignore[arg-type]
    assert max(factors) == pytest.approx(1.0)
    assert factors.index(max(factors)) == 20
    assert 0 < factors[0] < 0.1
    assert rate_factor(shape, 0.2, 100, 150) == factors[-1] == (1.0 if shape == "constant" else 0.0)  # type: ignore[arg-type]
    assert rate_factor(shape, 0.2, -1, 7) == 1.0  # type: ignore[arg-type]


def test_a_schedule_of_a_run_that_nothing_gives_a_length_says_that_it_has_no_effect(
    tmp_path: Path,
) -> None:
    module = SupervisedModule(nn.Linear(4, 1), schedule="cosine", lr=0.5)
    module.trainer = plain_trainer(tmp_path, max_epochs=-1, max_time="00:01:00:00")
    told = r"^--model.schedule cosine has no effect: .* stays 0\.5\. Add --max_steps N"
    with pytest.warns(UserWarning, match=told):
        module.configure_optimizers()
    stream = SupervisedModule(nn.Linear(4, 1))
    with pytest.warns(UserWarning, match=r"^--model.schedule linear has no effect"):
        plain_trainer(tmp_path).fit(stream, DataLoader(Stream()))
    # A warning would be an error here.
    module.trainer = plain_trainer(tmp_path, max_epochs=-1, max_steps=9)
    module.configure_optimizers()
    constant = SupervisedModule(nn.Linear(4, 1), schedule="constant", warmup_fraction=0.0)
    constant.trainer = plain_trainer(tmp_path, max_epochs=-1)
    constant.configure_optimizers()
    warmed = SupervisedModule(nn.Linear(4, 1), schedule="constant")
    warmed.trainer = plain_trainer(tmp_path, max_epochs=-1)
    with pytest.warns(UserWarning, match=r"^--model.warmup_fraction 0\.2 has no effect"):
        warmed.configure_optimizers()


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Any:
        yield torch.ones(4), torch.ones(())


def test_learning_rates_and_names_that_cannot_be_are_refused_in_a_line() -> None:
    for name in (
        "null",
        "..",
        "SparseAdam",
        "Optimizer",
        "os.path",
        "nothing.Here",
        "torch.nn.Linear",
    ):
        with pytest.raises(UserError, match=r"^--model\.optimizer [^\n]*$"):
            make_optimizer(MLP(), optimizer=name)
    with pytest.raises(
        UserError, match=r"optimizer_args\.momentun is no argument of SGD. Did you mean momentum"
    ):
        make_optimizer(MLP(), optimizer="SGD", optimizer_args={"momentun": 0.9})
    with pytest.raises(UserError, match=r"optimizer_args\.weight_decay is no argument of LBFGS\.$"):
        make_optimizer(MLP(), optimizer="LBFGS", optimizer_args={"weight_decay": 0.1})
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"lr": math.nan}, "--model.lr must be above 0, got nan"),
        ({"weight_decay": math.nan}, "--model.weight_decay must be at least 0, got nan"),
        ({"loss": "MSELos"}, "--model.loss must be .* Did you mean MSELoss"),
        (
            {"loss": "CrossEntropyLoss", "loss_args": {"weights": [1.0]}},
            "loss_args.weights .* Did you mean weight",
        ),
        ({"loss_args": {"reduction": "sum"}}, "reduction"),
        ({"schedule_args": {"gamma": 0.9}}, "linear has none"),
    ]
    for arguments, message in wrong:
        with pytest.raises(UserError, match=message):
            SupervisedModule(nn.Linear(4, 1), **arguments)


# Training, under a plain Trainer.


class Rows(SplitDataModule):
    """Rows of four features in batches of 16, the same in every split."""

    def __init__(self, targets: Tensor, **kwargs: Any) -> None:
        super().__init__(**{"batch_size": 16, **kwargs})
        draw = torch.Generator().manual_seed(1)
        self.rows = TensorRows(torch.randn(len(targets), 4, generator=draw), targets)

    def make_split(self, split: Any) -> TensorRows:
        return self.rows


class Still(SupervisedModule):
    """A linear layer that does not move, so that losses are known beforehand; notes what is logged
    and trained.
    """

    def __init__(self, outputs: int = 1, **kwargs: Any) -> None:
        super().__init__(nn.Linear(4, outputs), **{"optimizer": "SGD", "lr": 1e-30, **kwargs})
        self.logged: dict[str, list[float]] = {}
        self.trained: list[float] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.logged.setdefault(name, []).append(float(value))
        super().log(name, value, *args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.trained.append(float(loss))
        return loss


def plain_trainer(tmp_path: Path, **flags: Any) -> Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return Trainer(
        **quiet | {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": tmp_path, **flags}
    )


def logged_by_validation(trainer: Trainer) -> dict[str, float]:
    """The values of validation that were logged last."""
    logged = trainer.callback_metrics.items()
    return {name: float(value) for name, value in logged if name.startswith("val")}


def test_train_and_val_loss_are_one_number_for_the_same_samples_and_weights(tmp_path: Path) -> None:
    """Neither the smoothing nor the class weights that training minimises are in what is logged."""
    labels = torch.arange(64) % 3
    weights = [1, 2, 9]
    module = Still(
        3, loss="CrossEntropyLoss", loss_args={"label_smoothing": 0.3, "weight": weights}
    )
    data = Rows(labels)
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, data)
    features = data.rows.tensors[0]
    expected = float(F.cross_entropy(module(features), labels))
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(expected, rel=1e-6)
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-6)
    module.train()
    smoothed = F.cross_entropy(
        module(features), labels, torch.tensor(weights).float(), label_smoothing=0.3
    )
    assert float(module.training_step((features, labels), 0)) == pytest.approx(
        float(smoothed), rel=1e-6
    )


@pytest.mark.parametrize(
    ("places", "ignored", "smoothing"),
    [((), -100, {}), ((5,), 2, {}), ((5,), 2, {"label_smoothing": 0.3})],
)
def test_a_loss_is_the_mean_of_the_targets_that_it_does_not_ignore(
    tmp_path: Path, places: tuple[int, ...], ignored: int, smoothing: dict[str, float]
) -> None:
    labels = torch.randint(2, (80, *places))
    labels[:13] = ignored  # whole batches of an evaluation
    labels[20:60:3] = ignored
    outputs = 3 * math.prod(places)
    network = nn.Sequential(nn.Linear(4, outputs), nn.Unflatten(1, (3, *places)))
    module = SupervisedModule(
        network,
        loss="CrossEntropyLoss",
        loss_args={"ignore_index": ignored, **smoothing},
        optimizer="SGD",
        lr=1e-30,
    )
    data = Rows(labels, eval_batch_size=4)
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, data)
    logits = module(data.rows.tensors[0])
    expected = float(F.cross_entropy(logits, labels, ignore_index=ignored))
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-6)
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(expected, rel=1e-6)


def test_a_training_batch_whose_targets_are_all_ignored_does_not_count() -> None:
    module = Still(3, loss="CrossEntropyLoss")
    features = torch.randn(16, 4)
    labels = torch.arange(16) % 3
    module.training_step((features, torch.full((16,), -100)), 0)
    module.training_step((features, labels), 1)
    module.sums.waiting.count()
    total, count = module.sums.totals["epoch"].tolist()
    expected = float(F.cross_entropy(module(features), labels))
    assert count == 16
    assert total / count == pytest.approx(expected, rel=1e-6)


def test_a_loss_ignores_no_target_of_probabilities(tmp_path: Path) -> None:
    mixed = torch.rand(32, 3).softmax(dim=1)
    module = Still(3, loss="CrossEntropyLoss")
    data = Rows(mixed)
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, data)
    expected = float(F.cross_entropy(module(data.rows.tensors[0]), mixed))
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-6)
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_train_loss_is_that_since_the_last_log_step_and_at_its_end_the_epochs(
    tmp_path: Path, accumulate: int
) -> None:
    module = Still()
    data = Rows(torch.arange(16 * 14.0))
    trainer = plain_trainer(
        tmp_path, log_every_n_steps=6 // accumulate, accumulate_grad_batches=accumulate
    )
    trainer.fit(module, data)
    seen = module.trained
    assert len(seen) == 14
    expected = [sum(seen[:6]) / 6, sum(seen[6:12]) / 6, sum(seen) / 14]
    assert module.logged["train/loss"] == pytest.approx(expected, rel=1e-6)
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(expected[-1], rel=1e-6)


def test_sums_of_an_unfinished_epoch_go_on_where_they_were_saved() -> None:
    batches = [(torch.randn(16, 4), torch.randn(16)) for _ in range(5)]
    whole = Still(metrics={"mae": MeanAbsoluteError()})
    first = Still(metrics={"mae": MeanAbsoluteError()})
    second = Still()
    for module in (first, second):
        module.network.load_state_dict(whole.network.state_dict())
    for index, batch in enumerate(batches):
        whole.training_step(batch, index)
    for index, batch in enumerate(batches[:3]):
        first.training_step(batch, index)
    second.load_metric_state(first.metric_state())
    for index, batch in enumerate(batches[3:]):
        second.training_step(batch, index)
    resumed = second.metric_state()
    unbroken = whole.metric_state()
    assert resumed.keys() == unbroken.keys()
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)
    for module in (whole, second):
        module.sums.waiting.count()
    sums, samples = second.sums.totals["epoch"].tolist()
    assert [sums, samples] == whole.sums.totals["epoch"].tolist()
    assert samples == 5 * 16


def test_outputs_are_counted_and_let_go_of_between_log_steps_that_are_far_apart() -> None:
    """An epoch's logits of a network with many classes would fill a GPU."""
    torch.manual_seed(0)
    module = ImageClassifier(MLP())
    right = 0
    for index in range(2 * MOST_BATCHES):
        images = torch.rand(4, 1, 28, 28)
        labels = torch.randint(10, (4,))
        right += int((module(images).argmax(dim=1) == labels).sum())
        module.training_step((images, labels), index)
        assert len(module.sums.waiting) < MOST_BATCHES
    assert float(module.train_metrics["accuracy"].compute()) == right / (4 * 2 * MOST_BATCHES)  # type: ignore[operator]
    for size in (3, 4):  # the last batch of an epoch is smaller
        batch = (torch.rand(size, 1, 28, 28), torch.randint(10, (size,)))
        module.training_step(batch, 0)
    module.sums.waiting.count()
    for name in ("recent", "epoch"):
        _, samples = module.sums.totals[name].tolist()
        assert samples == 4 * 2 * MOST_BATCHES + 7


def test_regression_keeps_its_float_targets_and_does_not_broadcast_them(tmp_path: Path) -> None:
    targets = torch.linspace(0, 1, 64)
    module = Still(metrics={"mae": MeanAbsoluteError()})
    data = Rows(targets)
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, data)
    outputs = module.network(data.rows.tensors[0]).squeeze(1)
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(
        float(F.mse_loss(outputs, targets)), rel=1e-6
    )
    assert float(trainer.callback_metrics["val/mae"]) == pytest.approx(
        float((outputs - targets).abs().mean()), rel=1e-6
    )
    with pytest.raises(UserError, match=r"must give the targets' shape \(64,\), got \(64, 3\)"):
        Still(3).training_step((data.rows.tensors[0], targets), 0)


def test_several_labels_are_whole_numbers_for_metrics_and_probabilities_in_predictions(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    labels = torch.randint(2, (64, 3))
    module = Still(3, loss="BCEWithLogitsLoss", metrics={"f1": MultilabelF1Score(3)})
    data = Rows(labels)
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, data)
    logits = module.network(data.rows.tensors[0])
    expected = F.binary_cross_entropy_with_logits(logits, labels.float())
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(float(expected), rel=1e-6)
    f1 = MultilabelF1Score(3)(logits.sigmoid(), labels)
    torch.testing.assert_close(trainer.callback_metrics["val/f1"], f1)
    # Of the same rows: a CPU may round a product of other sizes otherwise.
    few = module.network(data.rows.tensors[0][:5])
    assert torch.equal(module.predict_step(data.rows[:5], 0), few.sigmoid())


def test_a_loss_of_ones_own_is_trained_and_logged(tmp_path: Path) -> None:
    class Mine(Still):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return (outputs - self.targets(batch)).abs() ** 3  # one value per sample

    module = Mine(loss="HuberLoss")
    data = Rows(torch.arange(40.0))
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, data)
    cubes = (module.network(data.rows.tensors[0]).squeeze(1) - data.rows.tensors[1]).abs() ** 3
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(
        float(cubes.mean()), rel=1e-6
    )
    assert module.logged["train/loss"] == pytest.approx([sum(module.trained) / 2], rel=1e-6)


class Stretched(nn.Module):
    """A loss with a weight of its own, which training changes, and a reduction."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.stretch = nn.Parameter(torch.ones(()))
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.stretch * (outputs - targets) ** 2
        return loss.mean() if self.reduction == "mean" else loss


class Focal(nn.CrossEntropyLoss):
    """A loss of logits under a name of its own."""


def test_a_loss_derived_from_cross_entropy_takes_logits_and_predictions_are_probabilities() -> None:
    probabilities = Still(3, loss=f"{__name__}.Focal").predict_step(torch.randn(5, 4), 0)
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(5))


class Passing(nn.SmoothL1Loss):
    """Hands its arguments on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def test_a_loss_that_hands_its_arguments_on_takes_them() -> None:
    module = Still(loss=f"{__name__}.Passing", loss_args={"beta": 2.0})
    assert module.trained_loss.beta == 2.0
    with pytest.raises(UserError, match=r"^--model.loss Passing refuses its arguments .*'alpha'"):
        Still(loss=f"{__name__}.Passing", loss_args={"alpha": 2.0})


def test_a_loss_with_weights_of_its_own_is_measured_with_those_that_were_trained(
    tmp_path: Path,
) -> None:
    module = Still(loss=f"{__name__}.Stretched", lr=0.01)
    data = Rows(torch.ones(64))
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, data)
    assert float(module.trained_loss.stretch) != 1  # type: ignore[arg-type]
    with torch.no_grad():
        expected = module.trained_loss(
            module.network(data.rows.tensors[0]).squeeze(1), data.rows.tensors[1]
        )
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(float(expected), rel=1e-5)


def test_a_training_step_of_ones_own_may_return_its_loss_and_nothing_else(tmp_path: Path) -> None:
    class Mine(ImageClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

    trainer = plain_trainer(tmp_path, log_every_n_steps=1)
    trainer.fit(Mine(small_mlp()), Pictures())
    assert set(trainer.callback_metrics) == {"val/loss", "val/accuracy"}  # no train/accuracy of 0


def test_a_validation_step_of_ones_own_logs_its_own_loss(tmp_path: Path) -> None:
    class Mine(Still):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", 0.25)

    module = Mine(metrics={"mae": MeanAbsoluteError()})
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, Rows(torch.arange(40.0)))
    logged = logged_by_validation(trainer)
    assert logged == {"val/loss": 0.25}


def test_metrics_in_a_wrapper_alone_are_logged(tmp_path: Path) -> None:
    module = Still(metrics={"mae": MinMaxMetric(MeanAbsoluteError())})
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, Rows(torch.arange(40.0)))
    assert {"val/loss", "val/raw", "val/min", "val/max"} <= trainer.callback_metrics.keys()


def test_metrics_that_a_step_of_ones_own_fills_are_logged(tmp_path: Path) -> None:
    class Mine(Still):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.eval_metrics.update(torch.zeros(len(batch[1])), torch.full((len(batch[1]),), 3.0))

    module = Mine(metrics={"mae": MeanAbsoluteError()})
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, Rows(torch.arange(40.0)))
    logged = logged_by_validation(trainer)
    assert logged == {"val/mae": 3.0}


def test_one_metric_of_ones_own_in_the_collections_place_is_logged(tmp_path: Path) -> None:
    class Mine(Still):
        def __init__(self) -> None:
            super().__init__()
            self.eval_metrics = MeanAbsoluteError()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.eval_metrics(torch.zeros(len(batch[1])), torch.full((len(batch[1]),), 3.0))

    trainer = plain_trainer(tmp_path)
    trainer.fit(Mine(), Rows(torch.arange(40.0)))
    assert float(trainer.callback_metrics["val/MeanAbsoluteError"]) == 3.0


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    module = Still(
        3, loss="CrossEntropyLoss", metrics={"f1": MulticlassF1Score(3, average="macro")}
    )
    found = []
    for size in (1000, 64, 7):
        data = Rows(torch.arange(1000) % 3, eval_batch_size=size)
        (metrics,) = plain_trainer(tmp_path).test(module, data, verbose=False)
        found.append(metrics)
    assert all(one == pytest.approx(found[0], rel=1e-6) for one in found)
    assert all(one["test/f1"] == found[0]["test/f1"] for one in found)


def test_reduce_on_plateau_follows_the_monitored_metric_and_other_schedulers_their_interval(
    tmp_path: Path,
) -> None:
    def rates(**kwargs: Any) -> float:
        trainer = plain_trainer(tmp_path, max_epochs=3)
        trainer.fit(Still(**{"lr": 1e-6, **kwargs}), Rows(torch.arange(64.0)))
        return trainer.optimizers[0].param_groups[0]["lr"] / 1e-6

    plateau = {"schedule": "ReduceLROnPlateau", "schedule_args": {"patience": 0, "factor": 0.5}}
    # No weight moves, so two epochs of three are no better than the first.
    assert rates(**plateau) == pytest.approx(0.25)
    exponential = {
        "schedule": "torch.optim.lr_scheduler.ExponentialLR",
        "schedule_args": {"gamma": 0.5},
    }
    assert rates(**exponential) == pytest.approx(0.5**3)
    assert rates(**exponential, schedule_interval="step") == pytest.approx(0.5**12)
    with pytest.raises(UserError, match="Did you mean linear"):
        rates(schedule="lineer")


class Ranked(MeanAbsoluteError):
    """A metric of the user's own with a mistake."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        raise ValueError("a mistake of the user's")


class HalfOfIt(MeanAbsoluteError):
    """A metric of the user's own that gives a number of Python's."""

    def compute(self) -> float:  # type: ignore[override]
        return float(super().compute()) / 2


CLASSES = {"outputs": 3, "loss": "CrossEntropyLoss"}


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            MulticlassConfusionMatrix(3),
            r"MulticlassConfusionMatrix must give a number, got a tensor of shape \(3, 3\)\.",
        ),
        (
            MulticlassF1Score(3, average="none"),
            r"MulticlassF1Score must give a number, got a tensor of shape \(3,\)\. Choose an aver",
        ),
        (MulticlassROC(3), r"MulticlassROC must give a number, got a tuple\."),
        (
            MulticlassF1Score(5),
            r"MulticlassF1Score refuses predictions and targets of shapes \(16, 3\) and \(16,\): ",
        ),
    ],
)
def test_a_metric_that_cannot_be_logged_is_told_at_the_first_batch(
    tmp_path: Path, metric: Any, message: str
) -> None:
    module = Still(**CLASSES, metrics={"mine": metric})
    with pytest.raises(UserError, match=f"^--model.metrics.mine {message}"):
        plain_trainer(tmp_path, num_sanity_val_steps=0).fit(module, Rows(torch.arange(64) % 3))
    assert module.trained == []


# Its schedule needs more steps than this training has.
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
def test_metrics_are_tried_also_while_a_profiler_that_cannot_be_copied_watches_them(
    tmp_path: Path,
) -> None:
    module = Still(metrics={"mae": MeanAbsoluteError()})
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile", export_to_chrome=False)
    plain_trainer(tmp_path, profiler=profiler).fit(module, Rows(torch.arange(64.0)))
    assert module.sums.are_tried


def test_a_metric_that_needs_more_than_one_batch_is_no_fault(tmp_path: Path) -> None:
    module = Still(metrics={"r2": R2Score()})
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, Rows(torch.arange(40.0), batch_size=1))
    assert torch.isfinite(trainer.callback_metrics["train/r2"])


def test_a_number_of_each_class_may_be_logged_by_name(tmp_path: Path) -> None:
    metric = ClasswiseWrapper(MulticlassF1Score(3, average="none"), labels=["a", "b", "c"])
    trainer = plain_trainer(tmp_path)
    trainer.fit(Still(**CLASSES, metrics={"f1": metric}), Rows(torch.arange(64) % 3))
    found = {name for name in trainer.callback_metrics if name.startswith("val/multiclassf1score")}
    assert found == {f"val/multiclassf1score_{name}" for name in "abc"}


def test_a_metric_may_give_pythons_own_number(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path)
    trainer.fit(
        Still(metrics={"halved": HalfOfIt(), "mae": MeanAbsoluteError()}), Rows(torch.ones(64))
    )
    logged = trainer.callback_metrics
    assert float(logged["val/halved"]) == pytest.approx(float(logged["val/mae"]) / 2)


def test_a_metrics_name_that_a_module_has_already_is_told_in_a_line() -> None:
    with pytest.raises(UserError, match=r"^--model\.metrics: attribute 'half' already exists\. Ch"):
        Still(metrics={"half": MeanAbsoluteError()})


def test_a_mistake_in_a_metric_of_ones_own_keeps_its_traceback(tmp_path: Path) -> None:
    module = Still(metrics={"mine": Ranked()})
    with pytest.raises(ValueError, match="a mistake of the user's"):
        plain_trainer(tmp_path, num_sanity_val_steps=0).fit(module, Rows(torch.ones(64)))


def test_a_metric_is_tried_without_a_trace(tmp_path: Path) -> None:
    """Its sums, its smallest value so far, and every random generator stay what they are."""
    metric = MinMaxMetric(BootStrapper(MeanAbsoluteError(), num_bootstraps=2, std=False))
    module = Still(metrics={"mae": metric})
    before = (torch.get_rng_state(), np.random.get_state()[1], random.getstate())
    module.training_step((torch.randn(16, 4, generator=torch.Generator()), torch.ones(16)), 0)
    assert module.sums.are_tried
    assert not module.train_metrics["mae"].update_called
    assert float(module.train_metrics["mae"].min_val) == math.inf
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


@pytest.mark.parametrize(
    ("loss", "labels", "message"),
    [
        (
            "CrossEntropyLoss",
            torch.arange(64) % 5,
            r"\(16, 3\) and \(16,\): Target \d is out of bou",
        ),
        ("CrossEntropyLoss", torch.zeros(64, 2).long(), r"\(16, 3\) and \(16, 2\): "),
        ("BCEWithLogitsLoss", torch.zeros(64).long(), r"\(16, 3\) and \(16,\): Target size"),
    ],
)
def test_a_loss_of_another_shape_is_told_in_a_line(
    tmp_path: Path, loss: str, labels: Tensor, message: str
) -> None:
    with pytest.raises(
        UserError, match=f"^--model.loss {loss} refuses outputs and targets of shapes {message}"
    ):
        plain_trainer(tmp_path, num_sanity_val_steps=0).fit(Still(3, loss=loss), Rows(labels))


class Pair(nn.MSELoss):
    """A loss that gives two values."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Any:
        return super().forward(outputs, targets), 0.0


def test_a_loss_that_gives_no_tensor_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--model.loss Pair must give a tensor, got a tuple\.$"):
        plain_trainer(tmp_path, num_sanity_val_steps=0).fit(
            Still(loss=f"{__name__}.Pair"), Rows(torch.ones(64))
        )


# Layers that learn their size from the first input.


def lazy_network() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(1))


def test_lazy_layers_get_their_size_before_the_optimizer_is_made(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path, num_sanity_val_steps=0)
    data = Rows(torch.arange(40.0))
    torch.manual_seed(0)
    module = SupervisedModule(lazy_network(), weight_decay=0.1, lr=1e-30, optimizer="SGD")
    trainer.fit(module, data)
    decayed, spared = trainer.optimizers[0].param_groups
    assert [tuple(weight.shape) for weight in decayed["params"]] == [(6, 4), (1, 6)]
    assert [tuple(bias.shape) for bias in spared["params"]] == [(6,), (1,)]
    torch.manual_seed(0)
    first = nn.Linear(4, 6)
    assert torch.equal(module.network[0].weight, first.weight)  # type: ignore[index]
    other = SupervisedModule(lazy_network())
    other.load_state_dict(module.state_dict())
    rows = data.rows.tensors[0]
    assert torch.equal(other(rows), module(rows))


def test_lazy_layers_without_a_sample_are_told_in_a_line(tmp_path: Path) -> None:
    loader = DataLoader(Rows(torch.arange(40.0)).rows, batch_size=8)
    with pytest.raises(
        UserError, match=r"^--model.network Sequential has layers without a size \(LazyLinear\)\. G"
    ):
        plain_trainer(tmp_path).fit(SupervisedModule(lazy_network()), loader)


@pytest.mark.parametrize("channels_last", [True, False])
def test_an_image_classifier_may_have_lazy_layers(tmp_path: Path, channels_last: bool) -> None:
    layers = [nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3)]
    module = ImageClassifier(nn.Sequential(*layers), channels_last=channels_last)
    trainer = plain_trainer(tmp_path)
    trainer.fit(module, Pictures())
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [2, 4]
    weight: Any = module.network[0].weight  # type: ignore[index]
    assert weight.is_contiguous(memory_format=torch.channels_last) == channels_last


# Images.


class Pictures(BatchedDataModule):
    """Noise of two channels with three classes."""

    image_shape = (2, 8, 8)
    mean = [0.2, 0.7]
    std = [0.1, 0.4]
    class_names = ["a", "b", "c"]

    def make_split(self, split: Any) -> TensorImages:
        draw = torch.Generator().manual_seed(0)
        return TensorImages(
            torch.randint(256, (60, 2, 8, 8), generator=draw, dtype=torch.uint8),
            torch.arange(60) % 3,
        )


def small_mlp() -> MLP:
    return MLP(image_shape=(2, 8, 8), hidden=[8], num_classes=3)


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_module_takes_raw_images_and_standardizes_them_as_the_data_module_says(
    tmp_path: Path, channels_last: bool
) -> None:
    module = ImageClassifier(small_mlp(), channels_last=channels_last)
    data = Pictures()
    plain_trainer(tmp_path).fit(module, data)
    raw: Tensor = data.make_split("val").images
    before = raw.clone()
    mean, std = (torch.tensor(values).view(2, 1, 1) for values in (data.mean, data.std))
    assert torch.allclose(module.standardize(raw), (raw / 255 - mean) / std, atol=1e-5)
    assert torch.allclose(module(raw / 255), module(raw), atol=1e-5)
    assert torch.equal(raw, before)
    assert torch.equal(module.predict_step((raw, None), 0), module(raw).softmax(dim=1))
    saved = module.state_dict()
    other = ImageClassifier(small_mlp())  # knows nothing of two channels
    other.load_state_dict(saved)
    assert torch.equal(other(raw), module(raw))


def test_a_state_dict_of_before_standardization_was_in_it_still_loads() -> None:
    module = MNISTClassifier(MLP())
    older = {key: value for key, value in module.state_dict().items() if key.startswith("network.")}
    other = MNISTClassifier(MLP())
    other.load_state_dict(older)
    digits = torch.randint(256, (4, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(other(digits), module(digits))
    assert torch.allclose(module.standardize(digits), (digits / 255 - 0.1307) / 0.3081, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_weights_of_any_type_get_images_of_that_type(tmp_path: Path, precision: str) -> None:
    module = ImageClassifier(small_mlp(), class_weights=[1, 1, 2])
    trainer = plain_trainer(tmp_path, precision=precision)
    trainer.fit(module, Pictures())
    assert 0 < float(trainer.callback_metrics["val/loss"]) < 10
    assert (
        module.standardize(torch.zeros(1, 2, 8, 8, dtype=torch.uint8)).dtype
        == next(module.parameters()).dtype
    )


def test_mixed_labels_are_learnt_from_and_counted_by_their_larger_part() -> None:
    module = ImageClassifier(small_mlp())
    labels = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.4, 0.6]])
    images = torch.rand(2, 2, 8, 8)
    expected = F.cross_entropy(module(images), labels, label_smoothing=0.1)
    assert float(module.training_step((images, labels), 0)) == pytest.approx(float(expected))
    module.sums.waiting.count()
    right = (module(images).argmax(1) == torch.tensor([0, 2])).float().mean()
    assert float(module.train_metrics["accuracy"].compute()) == float(right)  # type: ignore[operator]


def test_a_network_that_does_not_fit_the_data_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"must give 3 logits .* Try --model.network.image_shape \[2,8,8\]"
    ):
        plain_trainer(tmp_path).fit(ImageClassifier(MLP(image_shape=(2, 8, 8))), Pictures())


def test_the_sizes_to_type_are_those_that_the_network_has() -> None:
    data = SimpleNamespace(image_shape=(2, 8, 8), class_names=["a", "b", "c"])
    told = []
    for network in (
        MLP(image_shape=(2, 8, 8)),
        nn.Sequential(nn.Flatten(), nn.Linear(128, 4)),
        nn.Linear(9, 3),
    ):
        with pytest.raises(UserError) as refused:
            check_fit(network, data)
        told.append(str(refused.value))
    must = "must give 3 logits for SimpleNamespace's images of shape (2, 8, 8), got"
    sizes = "Try --model.network.image_shape [2,8,8] --model.network.num_classes 3"
    assert told[0] == f"--model.network MLP {must} shape (1, 10) for one. {sizes}"
    assert told[1] == f"--model.network Sequential {must} shape (1, 4) for one."
    assert told[2].startswith(f"--model.network Linear {must} ")
    # Torch 2.15 names the operation before it.
    assert "mat1 and mat2 shapes cannot be multiplied (16x8 and 9x3)" in told[2]
    check_fit(MLP(image_shape=(2, 8, 8), num_classes=3), data)


class SlowLearner(MNISTClassifier):
    """A class of a user's own with defaults of its own."""

    def __init__(self, lr: float = 0.0005, **kwargs: Any) -> None:
        super().__init__(lr=lr, **kwargs)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on so short a run
def test_lightnings_own_command_line_makes_modules_from_plain_values_and_keeps_a_classs_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning warns where both it and arguments are given.
    monkeypatch.setattr("sys.argv", ["plain"])
    metric = {
        "class_path": "torchmetrics.classification.MulticlassF1Score",
        "init_args": {"num_classes": 10},
    }
    words = ["--model", f"{__name__}.SlowLearner", "--model.optimizer", "SGD"]
    words += ["--model.metrics", str({"f1": metric})]
    words += ["--data", "numerals.data.MNISTDataModule", "--data.source", "sample"]
    words += ["--trainer.logger", "false", "--trainer.accelerator", "cpu"]
    words += ["--trainer.limit_train_batches", "3", "--trainer.max_epochs", "1"]
    words += ["--trainer.default_root_dir", str(tmp_path)]
    cli = LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        save_config_callback=None,
        args=words,
    )
    assert cli.model.lr == 0.0005
    assert (cli.model.monitor, cli.model.mode) == ("val/accuracy", "max")
    cli.trainer.fit(cli.model, cli.datamodule)
    assert 0 < float(cli.trainer.callback_metrics["val/f1"]) < 1
    cli.trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)  # hyperparameters are plain values
    assert saved["hyper_parameters"]["optimizer"] == "SGD"


def test_a_look_at_one_blank_image_leaves_frozen_parts_frozen() -> None:
    network = ConvNet()
    frozen = next(part for part in network.modules() if isinstance(part, nn.BatchNorm2d)).eval()
    check_fit(network, SimpleNamespace(image_shape=(1, 28, 28), class_names=[*"0123456789"]))
    assert [part for part in network.modules() if not part.training] == [frozen]
