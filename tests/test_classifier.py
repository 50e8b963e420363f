"""The model: what a step does, what is logged, that it learns, and what it says of digits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from unbroken import ExactCheckpoint
from unbroken.commands.predict import main as predict
from unbroken.errors import UserError

from project.data import MNISTDataModule
from project.fit import job
from project.model import MLP, ConvNet, MNISTClassifier

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer_of(**flags: Any) -> Trainer:
    """A plain Trainer that leaves nothing behind."""
    return Trainer(**{**QUIET, "max_epochs": 1, **flags})


def digits(**arguments: Any) -> MNISTDataModule:
    """A few of the bundled digits, not augmented."""
    few = {"train_samples": 320, "val_samples": 150, "test_samples": 150, "batch_size": 32}
    return MNISTDataModule(source="sample", shift_pixels=0, **{**few, **arguments})


def test_it_learns_digits_in_one_epoch_of_the_sample() -> None:
    torch.manual_seed(0)
    trainer = trainer_of()
    trainer.fit(MNISTClassifier(), digits(train_samples=3_200))
    assert trainer.callback_metrics["val/accuracy"] > 0.9
    assert set(trainer.callback_metrics) == {
        *("train/loss", "train/accuracy", "val/loss", "val/accuracy")
    }


def test_what_is_logged_is_the_mean_over_all_samples_without_smoothing() -> None:
    # The rate is so small that no weight changes.
    module = MNISTClassifier(MLP(), lr=1e-30, weight_decay=0, optimizer="SGD")
    data = digits(eval_batch_size=64)
    trainer = trainer_of()
    trainer.fit(module, data)
    for split in ("train", "val"):
        samples = data.splits[split]
        logits = module(samples.images)
        expected = float(cross_entropy(logits, samples.labels))
        assert float(trainer.callback_metrics[f"{split}/loss"]) == pytest.approx(expected, rel=1e-6)
        right = (logits.argmax(dim=1) == samples.labels).float().mean()
        assert float(trainer.callback_metrics[f"{split}/accuracy"]) == float(right)
    smoothed = cross_entropy(logits, samples.labels, label_smoothing=0.1)
    step = module.training_step((samples.images, samples.labels), 0)
    assert float(step) == pytest.approx(float(smoothed), rel=1e-6)


def test_the_test_metrics_do_not_depend_on_the_batch_size() -> None:
    module = MNISTClassifier()
    found = []
    for size in (1000, 64, 7):
        (metrics,) = trainer_of().test(module, digits(eval_batch_size=size), verbose=False)
        found.append(metrics)
    assert found[0]["test/accuracy"] == found[1]["test/accuracy"] == found[2]["test/accuracy"]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_a_run_that_is_stopped_inside_an_epoch_logs_what_a_whole_one_logs(workplace: Path) -> None:
    def train(folder: str, **flags: Any) -> dict[str, float]:
        keep = ExactCheckpoint(folder, monitor="val/accuracy", mode="max")
        torch.manual_seed(3)
        trainer = Trainer(**{**QUIET, "enable_checkpointing": True}, callbacks=[keep], **flags)
        # Other schedules would follow the number of steps.
        module = MNISTClassifier(MLP(), schedule="constant", warmup_fraction=0)
        trainer.fit(module, digits(), ckpt_path=keep.resume_from)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    whole = train("whole", max_epochs=2)
    train("cut", max_epochs=2, max_steps=13)
    assert train("cut", max_epochs=2, max_steps=-1) == whole


def test_the_mean_and_deviation_are_those_of_the_data_and_part_of_the_weights() -> None:
    module = MNISTClassifier(MLP())
    data = digits()
    data.mean = [0.25]
    trainer_of(max_steps=1).fit(module, data)
    state = module.state_dict()
    assert float(state["mean"]) == 0.25
    assert float(state["std"]) == pytest.approx(0.3081)
    # Checkpoints of older versions lack both.
    old = MNISTClassifier(MLP())
    old.load_state_dict({name: x for name, x in state.items() if name.startswith("network.")})
    assert float(old.mean) == pytest.approx(0.1307)


def test_biases_and_norms_do_not_decay() -> None:
    trainer = trainer_of(max_steps=1)
    trainer.fit(MNISTClassifier(weight_decay=0.3), digits())
    with_decay, without = trainer.optimizers[0].param_groups
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.3, 0.0)
    assert {weight.ndim for weight in with_decay["params"]} == {2, 4}
    assert {weight.ndim for weight in without["params"]} == {1}


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "onecycle"])
def test_the_rate_climbs_to_its_peak_and_falls(schedule: Any) -> None:
    trainer = trainer_of()
    module = MNISTClassifier(MLP(), lr=0.5, optimizer="SGD", schedule=schedule)
    trainer.fit(module, digits())
    factor = trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0]
    rates = [factor(step) for step in range(11)]
    assert max(rates) == rates[2] == 1
    assert rates[-1] == (1 if schedule == "constant" else 0)


def test_recomputed_activations_train_the_same_weights() -> None:
    network = ConvNet()
    logits = []
    for recomputes in (False, True):
        module = MNISTClassifier(copy.deepcopy(network), activation_checkpointing=recomputes)
        torch.manual_seed(0)
        trainer_of(max_steps=3).fit(module, digits())
        logits.append(module.eval()(torch.zeros(1, 1, 28, 28)))
        assert module.state_dict().keys() == MNISTClassifier().state_dict().keys()
    torch.testing.assert_close(logits[1], logits[0])


def test_planes_in_another_order_give_the_same_logits() -> None:
    images = torch.rand(4, 1, 28, 28)
    network = ConvNet()
    channels_last = MNISTClassifier(copy.deepcopy(network)).eval()
    contiguous = MNISTClassifier(network, channels_last=False).eval()
    assert next(contiguous.parameters()).is_contiguous()
    torch.testing.assert_close(channels_last(images), contiguous(images))


def test_labels_that_were_mixed_are_learned_and_counted() -> None:
    module = MNISTClassifier(MLP())
    mixed = torch.eye(10)[torch.arange(64) % 10] * 0.6 + 0.04
    images = torch.rand(64, 1, 28, 28)
    samples = list(zip(images, mixed, strict=True))
    trainer = trainer_of(limit_val_batches=0)
    trainer.fit(module, DataLoader(samples, batch_size=16))
    assert 0 <= float(trainer.callback_metrics["train/accuracy"]) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0}, r"^--model.lr must be above 0, got 0\.$"),
        ({"label_smoothing": 1}, r"^--model.label_smoothing must be at least 0 and below 1, got 1"),
        ({"optimizer": "AdmW"}, r"^--model.optimizer must be .* Did you mean AdamW\?$"),
        ({"optimizer_args": {"bettas": 1}}, r"optimizer_args.bettas is no argument of AdamW"),
        ({"network": ConvNet(num_classes=7)}, r"must give 10 logits .*--model.network.num_classes"),
    ],
)
def test_a_mistake_is_told_in_a_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer_of(max_steps=1).fit(MNISTClassifier(**arguments), digits())


def test_predict_labels_digits_in_files(workplace: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--data.source", "sample", "--data.train_samples", "3200", "--max_epochs", "1"]
    quiet = ["--report", "false", "--monitors", "none", "--accelerator", "cpu"]
    assert job.main([*flags, *quiet, "--run_name", "mine"]) == 0
    data = MNISTDataModule(source="sample")
    data.setup("test")
    images, labels = data.splits["test"].tensors
    for place in range(20):
        Image.fromarray(255 - images[place, 0].numpy()).resize((90, 90)).save(f"{place:02}.png")
    assert predict("project", ["*.png", "--output", "labels.json"]) == 0
    rows = json.loads(Path("labels.json").read_text())
    right = [row["digit"] == str(int(label)) for row, label in zip(rows, labels, strict=False)]
    assert len(right) == 20
    assert sum(right) >= 16


def test_a_run_without_a_word_trains_what_the_default_file_names() -> None:
    path = Path(__file__).parents[1] / "configs" / "default.yaml"
    default = yaml.safe_load(path.read_text())
    few = ["--data.source", "sample", "--limit_train_batches", "1", "--max_epochs", "1"]
    quiet = ["--report", "false", "--monitors", "none", "--accelerator", "cpu"]
    assert job.main([*few, *quiet, "--run_name", "mine"]) == 0
    resolved = yaml.safe_load(Path("checkpoints/mine/config.yaml").read_text())
    for section in ("model", "data"):
        assert resolved[section]["class_path"] == default[section]["class_path"]
