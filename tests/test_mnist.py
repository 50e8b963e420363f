"""The data: where the digits come from, how they are split, and how they become batches."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2
from unbroken.data import IdxSet
from unbroken.errors import UserError

from project.data import MNISTDataModule


def write_set(folder: Path, train: int = 24, test: int = 10) -> None:
    """Four files in MNIST's format, plain and ``.gz``: the i-th image is of the grey value i."""
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        numbers = np.arange(count, dtype=np.uint8)
        images = np.broadcast_to(numbers[:, None, None], (count, 28, 28))
        header = np.array([2051, count, 28, 28], ">u4").tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = np.array([2049, count], ">u4").tobytes()
        labels = gzip.compress(header + (numbers % 10).tobytes())
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(labels)


class SmallSet(MNISTDataModule):
    """24 + 10 made images, whose digests nobody compares."""

    files = IdxSet("MNIST/raw")


@pytest.fixture
def sample() -> MNISTDataModule:
    """The bundled digits, set up for training."""
    module = MNISTDataModule(source="sample")
    module.prepare_data()
    module.setup("fit")
    return module


# Where the digits come from


def test_the_bundled_digits_are_split_9000_1000_2000(sample: MNISTDataModule) -> None:
    sizes = {split: len(images) for split, images in sample.splits.items()}
    assert sizes == {"train": 9_000, "val": 1_000, "test": 2_000}
    assert sample.data_source == "sample"
    labels = torch.cat([images.labels for images in sample.splits.values()])
    assert labels.unique().tolist() == list(range(10))


def test_no_training_image_is_in_the_validation(workplace: Path) -> None:
    write_set(workplace / "data/MNIST/raw")
    module = SmallSet()
    module.setup("fit")
    numbers = {
        split: set(images.images[:, 0, 0, 0].tolist()) for split, images in module.splits.items()
    }
    assert numbers["train"] | numbers["val"] == set(range(24))
    assert not numbers["train"] & numbers["val"]
    assert len(numbers["val"]) == 2


def test_the_split_is_the_same_whatever_the_seed_is(sample: MNISTDataModule) -> None:
    torch.manual_seed(17)
    other = MNISTDataModule(source="sample")
    other.setup("validate")
    assert torch.equal(other.splits["val"].images, sample.splits["val"].images)


@pytest.mark.parametrize("below", ["", "MNIST", "MNIST/raw"])
def test_the_root_may_be_the_folder_of_the_files_or_one_above(workplace: Path, below: str) -> None:
    write_set(workplace / "mine/MNIST/raw")
    module = SmallSet(root=str(workplace / "mine" / below))
    assert module.state_of_files()["found"]
    module.prepare_data()
    module.setup("test")
    assert module.data_source == "mnist"
    assert module.splits["test"].labels.tolist() == list(range(10))


def test_without_the_files_the_default_takes_the_bundled_digits_and_says_so(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    module = MNISTDataModule()
    with pytest.warns(UserWarning, match=r"^Full MNIST was not found in data/MNIST/raw and the d"):
        module.prepare_data()
    module.setup("fit")  # does not warn a second time
    assert module.data_source == "sample"
    assert list(workplace.iterdir()) == []


@pytest.mark.parametrize("arguments", [{"source": "mnist"}, {"root": "dtaa"}])
def test_who_asks_for_the_full_set_gets_it_or_an_error(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    module = MNISTDataModule(**arguments)
    with pytest.raises(UserError, match=r"^--data.root (data|dtaa): .* the download failed .*\.$"):
        module.prepare_data()
    with pytest.raises(UserError, match=r"lacks train-images-idx3-ubyte, .*--data.source sample"):
        module.setup("fit")
    assert list(workplace.iterdir()) == []


def test_nothing_is_downloaded_into_a_folder_that_a_checkpoint_alone_names() -> None:
    module = MNISTDataModule(root="theirs", source="mnist")
    module.may_download = False
    with pytest.raises(UserError, match=r"type --data\.root theirs to download there"):
        module.prepare_data()


def test_a_resumed_run_stays_with_the_digits_that_it_began_with(workplace: Path) -> None:
    write_set(workplace / "data/MNIST/raw")
    module = SmallSet()
    module.stay_with("sample")
    module.setup("validate")
    assert (module.data_source, len(module.splits["val"])) == ("sample", 1_000)


def test_files_of_other_digits_are_refused_before_the_training(workplace: Path) -> None:
    write_set(workplace / "data/MNIST/raw")
    with pytest.raises(UserError, match=r"ubyte is damaged: SHA-256 must be ba891046.*got "):
        MNISTDataModule().setup("fit")


def test_a_damaged_test_file_is_told_before_the_training(workplace: Path) -> None:
    folder = workplace / "data/MNIST/raw"
    write_set(folder)
    whole = (folder / "t10k-images-idx3-ubyte").read_bytes()
    (folder / "t10k-images-idx3-ubyte").write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte is damaged: its size must be"):
        SmallSet().setup("fit")


def test_ranks_that_found_different_data_stop(sample: MNISTDataModule) -> None:
    strategy = SimpleNamespace(broadcast=lambda _: "mnist", reduce_boolean_decision=bool)
    sample.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
    with pytest.raises(UserError, match="found different data on different ranks"):
        sample.setup("fit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"^--data.batch_size must be at least 1, got 0\.$"),
        ({"val_samples": -1}, r"^--data.val_samples must be at least 1, got -1\.$"),
        ({"num_workers": 10**6}, r"^--data.num_workers must be at most"),
        ({"batch_size": 60_001}, r"^--data.batch_size must be at most the set's 60,000 images"),
    ],
)
def test_options_that_cannot_be_are_refused_in_a_line(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        MNISTDataModule(source="sample", **arguments).setup("fit")


# How they become batches


def test_training_batches_are_shuffled_and_evaluation_leaves_none_out() -> None:
    module = MNISTDataModule(source="sample", batch_size=64, eval_batch_size=300, train_samples=150)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert [len(labels) for _, labels in batches] == [64, 64]
    first = batches[0][1]
    assert not torch.equal(first, module.splits["train"].labels[:64])
    assert [len(labels) for _, labels in module.test_dataloader()] == [300] * 6 + [200]


def test_the_first_samples_of_a_split_are_kept(sample: MNISTDataModule) -> None:
    module = MNISTDataModule(source="sample", train_samples=5, val_samples=10**6, test_samples=1)
    module.setup("fit")
    assert [len(images) for images in module.splits.values()] == [5, 1_000, 1]
    assert torch.equal(module.splits["train"].images, sample.splits["train"].images[:5])


def batch_of(module: MNISTDataModule, training: bool, images: Tensor) -> tuple[Tensor, Tensor]:
    """What becomes of images on the device, in training or in an evaluation."""
    module.trainer = SimpleNamespace(training=training)  # type: ignore[assignment]
    return module.on_after_batch_transfer((images, torch.arange(len(images)) % 10), 0)


def test_training_images_move_by_at_most_a_pixel_and_others_stay() -> None:
    images = torch.zeros(400, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 14, 14] = 1
    moved, _ = batch_of(MNISTDataModule(), True, images)
    places = {(row, column) for _, _, row, column in moved.nonzero().tolist()}
    assert places == set(itertools.product((13, 14, 15), repeat=2))
    assert moved.dtype == torch.uint8
    assert batch_of(MNISTDataModule(), False, images)[0] is images


@pytest.mark.parametrize(
    "option",
    ["rotate_degrees", "scale_fraction", "shear_degrees", "shift_pixels", "elastic_pixels"],
)
def test_each_augmentation_changes_each_image_by_an_amount_of_its_own(option: str) -> None:
    image = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    image[:, :, 6:22, 10:16] = 255
    module = MNISTDataModule(**{"shift_pixels": 0.0, option: 0.7})
    changed, _ = batch_of(module, True, image.repeat(8, 1, 1, 1))
    assert len(changed.flatten(1).unique(dim=0)) == 8
    assert 0 <= float(changed.min()) < float(changed.max()) <= 1


def test_transforms_of_torchvision_are_applied_in_training() -> None:
    module = MNISTDataModule(shift_pixels=0, transforms=[v2.MixUp(num_classes=10)])
    images = torch.full((8, 1, 28, 28), 255, dtype=torch.uint8)
    mixed, labels = batch_of(module, True, images)
    assert torch.allclose(mixed, torch.ones(8, 1, 28, 28))
    assert labels.shape == (8, 10)


def test_a_digit_of_a_picture_is_shown_as_mnist_shows_it(sample: MNISTDataModule) -> None:
    image = sample.splits["test"].images[0].numpy()
    dark_on_light = np.repeat(1 - image[0].astype(np.float32)[..., None] / 255, 3, axis=2)
    large = dark_on_light.repeat(5, axis=0).repeat(5, axis=1)
    found, note = sample.prepare_image(large)
    assert found.shape == (1, 28, 28)
    assert note == ""
    assert np.abs(found.astype(int) - image).mean() < 8
    _, note = sample.prepare_image(np.concatenate([large, large], axis=1))
    assert note == "more than one digit"
