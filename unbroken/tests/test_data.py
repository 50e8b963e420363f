"""The data: files checked, splits fixed, targets as they are, batches in one call, augmentation on
the device.
"""

from __future__ import annotations

import gzip
import itertools
import math
import socket
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numerals.data import MNISTDataModule
from numerals.data.mnist import DIGITS
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision.transforms import v2
from unbroken.data import (
    BatchedDataModule,
    IdxSet,
    SplitDataModule,
    TensorImages,
    TensorRows,
    idx_files,
)
from unbroken.data.augmentation import random_deformation
from unbroken.data.base import belongs_on
from unbroken.data.idx_files import read_idx
from unbroken.errors import UserError
from unbroken.loading import exact_form, position_of

from tests.made_data import make_idx_files
from tests.make_digits import stratified, write_idx


def test_a_compressed_idx_file_that_announces_very_much_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    header = b"".join(size.to_bytes(4, "big") for size in (idx_files.IMAGES_MAGIC, 4000, 28, 28))
    path.write_bytes(gzip.compress(header + bytes(4000 * 28 * 28)))
    assert read_idx(path).shape == (4000, 1, 28, 28)
    monkeypatch.setattr(idx_files, "MOST_UNPACKED", 2**20)
    with pytest.raises(UserError, match="announces must be at most 1,048,576 bytes for a file of"):
        read_idx(path)
    noise = torch.randint(0, 256, (4000 * 28 * 28,), dtype=torch.uint8).numpy().tobytes()
    path.write_bytes(gzip.compress(header + noise, 1))
    assert read_idx(path).shape == (4000, 1, 28, 28)


@pytest.mark.parametrize("name", ["x-images-idx3-ubyte", "x-images-idx3-ubyte.gz"])
def test_idx_files_are_read_back_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8)
    write_idx(tmp_path / name, images)
    assert torch.equal(read_idx(tmp_path / name), images)
    with pytest.raises(UserError, match="SHA-256"):
        read_idx(tmp_path / name, sha256="0" * 64)


def test_no_more_is_read_of_an_idx_file_than_its_header_announces(tmp_path: Path) -> None:
    path = tmp_path / "x-labels-idx1-ubyte.gz"
    whole = (2049).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes(2**26)
    path.write_bytes(gzip.compress(whole, compresslevel=1))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"be the 11 bytes that its header announces, got more"):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kept", [0, 3, 6, 9])
def test_an_idx_file_that_was_cut_is_damaged(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "x-labels-idx1-ubyte"
    whole = (2049).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes(3)
    path.write_bytes(whole[:kept])
    with pytest.raises(UserError, match="is damaged: its "):
        read_idx(path)


def test_the_bundled_digits_are_stratified_and_real(mnist_root: Path) -> None:
    module = MNISTDataModule(root=str(mnist_root), source="mnist")
    for part, size in (("train", 10_000), ("t10k", 2_000)):
        images_name = f"{part}-images-idx3-ubyte"
        labels_name = f"{part}-labels-idx1-ubyte"
        raw = mnist_root / "MNIST/raw"
        all_labels = read_idx(raw / labels_name, module.files[labels_name])
        all_images = read_idx(raw / images_name)
        chosen = stratified(all_labels, size)
        assert torch.equal(read_idx(DIGITS / f"{labels_name}.gz"), all_labels[chosen])
        assert torch.equal(read_idx(DIGITS / f"{images_name}.gz"), all_images[chosen])


def test_full_mnist_is_split_55000_5000_10000(mnist_root: Path) -> None:
    module = MNISTDataModule(root=str(mnist_root))
    module.prepare_data()
    module.setup("fit")
    assert (len(module.splits["train"]), len(module.splits["val"])) == (55_000, 5_000)
    module.setup("test")
    assert len(module.splits["test"]) == 10_000
    # Also after a test, which lets go of the training set.
    assert len(module.train_dataloader().dataset) == 55_000
    assert module.data_source == "mnist"


def test_a_damaged_test_file_is_told_before_the_training(mnist_root: Path, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in (mnist_root / "MNIST" / "raw").glob("*-ubyte*"):
        (raw / path.name).symlink_to(path)
    for path in raw.glob("t10k-labels-idx1-ubyte*"):
        labels = read_idx(path)
        labels[0] = (labels[0] + 1) % 10
        path.unlink()
        write_idx(path, labels)
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte.* is damaged: SHA-256"):
        MNISTDataModule(root=str(tmp_path)).setup("fit")


def test_auto_falls_back_to_the_sample_and_says_so(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    module = MNISTDataModule()
    with pytest.warns(UserWarning, match="was not found") as told:
        module.prepare_data()
    (line,) = str(told[0].message).splitlines()
    assert line.startswith("Full MNIST was not found in data/MNIST/raw and the download failed (")
    assert "this run uses the 10,000 + 2,000 digits that ship inside the package" in line
    assert "--data.source sample" in line
    another_rank = MNISTDataModule()
    with pytest.warns(UserWarning, match="was not found"):
        another_rank.setup("fit")
    module.setup("fit")  # does not warn a second time
    for each in (module, another_rank):
        assert each.data_source == "sample"
        assert (len(each.splits["train"]), len(each.splits["val"])) == (9_000, 1_000)


def test_the_validation_split_does_not_depend_on_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        module = MNISTDataModule(source="sample")
        module.setup("fit")
        splits.append(module.splits["val"].images)
    assert torch.equal(*splits)


@pytest.mark.parametrize("below", ["", "Made", "Made/raw"])
def test_the_root_may_be_named_as_the_folder_of_the_files_or_the_one_above(
    tmp_path: Path, below: str
) -> None:
    class Made(MNISTDataModule):
        folder = "Made/raw"
        files = dict.fromkeys(MNISTDataModule.files)

    make_idx_files(tmp_path / "Made" / "raw", train=24, test=10)
    module = Made(root=str(tmp_path / below))
    module.prepare_data()
    module.setup("fit")
    assert (module.data_source, len(module.splits["train"])) == ("mnist", 22)


@pytest.mark.parametrize("source", ["auto", "mnist"])
def test_a_mistyped_root_is_an_error_that_creates_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, source: Any
) -> None:
    from torchvision import datasets

    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    module = MNISTDataModule(root="dtaa/mnist", source=source)
    with pytest.raises(
        UserError, match=r"^--data.root dtaa/mnist: [^\n]* the download failed[^\n]*$"
    ):
        module.prepare_data()
    # On another rank, or where nobody has called prepare_data:
    with pytest.raises(UserError, match=r"dtaa/mnist.*lacks train-images"):
        module.setup("fit")
    assert list(workplace.iterdir()) == []


# Datasets and loaders.


class Fixed(SplitDataModule):
    """The same dataset in every split."""

    def __init__(self, dataset: Dataset[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dataset = dataset

    def make_split(self, split: Any) -> Dataset[Any]:
        return self.dataset


class FixedImages(Fixed, BatchedDataModule):
    image_shape = (1, 2, 2)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.tensor([0.25, 0.5]), torch.float32),
        (torch.tensor([0.25, 0.5], dtype=torch.float64), torch.float64),
        (torch.tensor([3, 250], dtype=torch.uint8), torch.int64),
        (torch.tensor([[True, False], [True, True]]), torch.int64),
    ],
)
def test_targets_stay_what_they_are_and_whole_numbers_are_int64(
    given: Tensor, kept: torch.dtype
) -> None:
    dataset = TensorImages(torch.zeros(2, 4, 4), given)
    assert dataset.images.shape == (2, 1, 4, 4)
    assert dataset.labels.dtype == kept
    assert torch.equal(dataset.gather(torch.tensor([1]))[1], given[1:].to(kept))


def test_a_plain_loader_gathers_whole_batches_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TensorImages(torch.arange(10).view(10, 1, 1, 1), torch.arange(10))
    calls: list[list[int]] = []
    gather = TensorRows.gather

    def counted_gather(self: TensorRows, indices: Tensor) -> tuple[Tensor, ...]:
        calls.append(indices.tolist())
        return gather(self, indices)

    monkeypatch.setattr(TensorRows, "gather", counted_gather)
    for held in (dataset, Subset(dataset, range(10))):
        module = FixedImages(held, batch_size=5, eval_batch_size=4, num_workers=0)
        module.setup("fit")
        calls.clear()
        (images, labels), _ = module.train_dataloader()
        assert images.flatten().tolist() == labels.tolist() == calls[0]
        assert [len(call) for call in calls] == [5, 5]
        assert sorted(calls[0] + calls[1]) == list(range(10)) != calls[0] + calls[1]
        evaluated = [labels.tolist() for _, labels in module.val_dataloader()]
        assert evaluated == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_training_set_smaller_than_a_batch_is_one_batch() -> None:
    module = Fixed(TensorRows(torch.arange(3)), batch_size=128)
    module.setup("fit")
    assert [len(batch) for (batch,) in module.train_dataloader()] == [3]


def test_a_held_out_part_is_disjoint_of_the_rest_and_keeps_its_kind() -> None:
    dataset = TensorImages(torch.rand(50, 4, 4), torch.arange(50))
    module = Fixed(dataset, val_samples=3)
    train = module.hold_out(dataset, "train")
    val = module.hold_out(dataset, "val")
    assert isinstance(val, TensorImages)
    assert sorted([*train.labels.tolist(), *val.labels.tolist()]) == list(range(50))  # type: ignore[attr-defined]
    assert len(val) == 5
    module.setup("validate")
    assert module.splits["val"].labels.tolist() == [0, 1, 2]  # type: ignore[attr-defined]


class Pairs(Dataset[dict[str, Any]]):
    """Samples that are dictionaries."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"left": torch.full((2,), float(index)), "right": index}


def test_a_batch_may_have_any_structure(tmp_path: Path) -> None:
    module = Fixed(Pairs(), batch_size=3, num_workers=1)
    module.setup("validate")
    (batch,) = module.val_dataloader()
    assert batch["right"].tolist() == list(range(6))
    moved = module.transfer_batch_to_device(batch, torch.device("cpu"), 0)
    assert torch.equal(moved["left"], batch["left"])


def test_pictures_of_any_size_become_images_of_one_shape_and_float_targets_stay_floats() -> None:
    class Photos(Dataset[tuple[Image.Image, float]]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[Image.Image, float]:
            return Image.new("L", (5 + index, 9), color=40 * index), index / 2

    module = FixedImages(Photos(), num_workers=0)
    module.setup("validate")
    ((images, targets),) = module.val_dataloader()
    assert images[:, 0, 0, 0].tolist() == [0, 40, 80]
    assert (images.shape, images.dtype) == ((3, 1, 2, 2), torch.uint8)
    assert (targets.tolist(), targets.dtype) == ([0, 0.5, 1], torch.float32)


def test_data_in_memory_needs_no_workers_and_other_data_as_many_as_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for dataset, workers in ((TensorRows(torch.arange(6)), 0), (Pairs(), 3)):
        module = Fixed(dataset)
        module.setup("fit")
        assert module.train_dataloader().num_workers == workers


# Data that live on the device.


def trainer_on(device: str) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))


def test_data_on_the_device_are_uploaded_whole_and_batches_are_made_there() -> None:
    """The device is PyTorch's ``meta``, which takes tensors from the CPU and gives none back."""
    images = torch.zeros(6, 1, 2, 2, dtype=torch.uint8)
    module = FixedImages(
        TensorImages(images, torch.arange(6)), batch_size=2, on_device=True, pin_memory=True
    )
    module.trainer = trainer_on("meta")
    module.setup("fit")
    loader = module.train_dataloader()
    assert (loader.num_workers, loader.pin_memory) == (0, False)
    assert loader.dataset.device.type == "meta"  # type: ignore[attr-defined]
    assert loader.dataset.images.dtype == torch.uint8  # type: ignore[attr-defined]
    assert [(images.device.type, len(labels)) for images, labels in loader] == [("meta", 2)] * 3
    exact = exact_form(loader, training=True, seed=0)
    orders = [part.device.type for _, _, part in position_of(exact)]
    assert orders == ["meta"] * 3  # the epoch's order is uploaded once, and cut there
    assert module.splits["train"].images.device.type == "cpu"  # for whoever looks at samples
    assert module.bytes_on_device == {"train": 6 * 4 + 6 * 8}


@pytest.mark.parametrize(
    ("asked", "device", "memory", "workers", "expected"),
    [
        ("auto", "cuda", 480, None, True),
        ("auto", "cuda", 479, None, False),  # more than a tenth
        ("auto", "cuda", 480, 2, False),  # workers were asked for, and cannot use the device
        ("auto", "cpu", 480, None, False),
        ("auto", "mps", 480, None, False),
        (True, "cuda", 10, None, True),
        (True, "cpu", 10, 0, True),
        (False, "cuda", 480, None, False),
    ],
)
def test_data_live_on_a_cuda_device_where_they_take_little_of_it(
    monkeypatch: pytest.MonkeyPatch,
    asked: Any,
    device: str,
    memory: int,
    workers: int | None,
    expected: bool,
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory)
    )
    rows = TensorRows(torch.arange(6))
    assert belongs_on(torch.device(device), rows, asked, workers) is expected


def test_data_that_cannot_live_on_the_device_are_an_error_only_where_it_was_asked_for() -> None:
    assert not belongs_on(torch.device("cuda"), Pairs(), "auto", None)
    with pytest.raises(
        UserError, match=r"^--data.on_device true needs data in memory .* got Pairs.$"
    ):
        belongs_on(torch.device("cuda"), Pairs(), True, None)
    with pytest.raises(
        UserError, match=r"^--data.num_workers must be 0 with --data.on_device true, got 2.$"
    ):
        Fixed(Pairs(), on_device=True, num_workers=2)


@pytest.mark.parametrize(
    ("device", "without_waiting"), [("cuda", True), ("mps", False), ("cpu", False)]
)
def test_only_copies_to_cuda_do_not_wait(device: str, without_waiting: bool) -> None:
    """MPS reads pageable memory after the call has returned: batches would be corrupted."""
    calls: list[tuple[Any, Any]] = []

    class Recorded(torch.Tensor):
        def to(self, device: Any, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
            calls.append((device.type, non_blocking))
            return self

    batch = (torch.rand(2).as_subclass(Recorded), torch.rand(2).as_subclass(Recorded))
    Fixed(Pairs()).transfer_batch_to_device(batch, torch.device(device), 0)
    assert calls == [(device, without_waiting)] * 2


def test_labels_without_a_name_are_told_before_they_are_an_index_error() -> None:
    for labels, message in (
        (torch.tensor([0, 12]), "from 0 to 12, got 10"),
        (torch.tensor([-1, 2]), "from -1 to 2"),
    ):
        with pytest.raises(
            UserError, match=f"FixedImages.class_names must name every class: .* {message}"
        ):
            FixedImages(TensorImages(torch.zeros(2, 2, 2), labels)).setup("fit")
    # The targets of a regression are no classes.
    numbers = torch.tensor([0.5, 12.5])
    FixedImages(TensorImages(torch.zeros(2, 2, 2), numbers)).setup("fit")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"mean": ["0.5"]}, r"mean must be a list of float, got \['0.5'\].$"),
        ({"class_names": "abc"}, "class_names must be a list of str, got abc.$"),
        (
            {"image_shape": [1, 0, 28]},
            r"image_shape must be sizes above 0 of one image, got \[1, 0, 28\].$",
        ),
        ({"image_shape": [3, 2**14, 2**14]}, "image_shape must be sizes above 0 of one image"),
    ],
)
def test_what_a_checkpoint_tells_of_its_data_is_checked(told: dict[str, Any], message: str) -> None:
    described = BatchedDataModule().description()
    module = BatchedDataModule()
    module.describe(described)
    assert (module.description(), module.image_shape) == (described, (1, 28, 28))
    with pytest.raises(UserError, match=f"^the checkpoint's {message}"):
        module.describe({**described, **told})


# Augmentation.


def training_batch(
    module: BatchedDataModule, images: Tensor, labels: Tensor, training: bool = True
) -> Any:
    module.trainer = SimpleNamespace(training=training)  # type: ignore[assignment]
    return module.on_after_batch_transfer((images, labels), 0)


class Flipped(BatchedDataModule):
    image_shape = (3, 4, 4)

    def augment(self, images: Tensor) -> Tensor:
        return images.flip(3)


def test_augmentation_is_a_method_or_a_list_of_transforms_for_training_alone() -> None:
    torch.manual_seed(0)
    images = torch.randint(256, (64, 3, 4, 4), dtype=torch.uint8)
    labels = torch.arange(64) % 5
    assert torch.equal(training_batch(Flipped(), images, labels)[0], images.flip(3))
    listed = BatchedDataModule(transforms=[v2.RandomHorizontalFlip(0.5), v2.MixUp(num_classes=5)])
    listed.image_shape = (3, 4, 4)
    for module in (Flipped(), listed):
        found, same = training_batch(module, images, labels, training=False)
        assert torch.equal(found, images)
        assert torch.equal(same, labels)
    flips = BatchedDataModule(transforms=[v2.RandomHorizontalFlip(0.5)])
    flips.image_shape = (3, 4, 4)
    found, _ = training_batch(flips, images, labels)
    turned = (found == images.flip(3) / 255).flatten(1).all(1)
    kept = (found == images / 255).flatten(1).all(1)
    assert bool((turned | kept).all())
    assert 10 < int(turned.sum()) < 54  # each image for itself, not the batch as one
    mixed, soft = training_batch(listed, images, labels)
    assert soft.shape == (64, 5)
    assert torch.allclose(soft.sum(1), torch.ones(64))
    assert 0 <= float(mixed.min()) < float(mixed.max()) <= 1


def test_augmentation_repeats_when_torchs_generator_does() -> None:
    module = BatchedDataModule(rotate_degrees=20, elastic_pixels=0.5)
    images = torch.randint(256, (4, 1, 28, 28), dtype=torch.uint8)
    labels = torch.arange(4)
    state = torch.get_rng_state()
    first, second = (training_batch(module, images, labels)[0] for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(training_batch(module, images, labels)[0], first)
    assert not torch.equal(first, second)
    assert 0 <= float(first.min()) < float(first.max()) <= 1


def test_augmentation_without_amount_changes_nothing_and_a_shift_shifts() -> None:
    images = torch.rand(4, 1, 28, 28)
    torch.manual_seed(0)
    nothing = {"degrees": 0.0, "scale": 0.0, "shear": 0.0, "shift": 0.0, "elastic": 0.0}
    same = random_deformation(images, **nothing)
    assert torch.allclose(same, images, atol=1e-5)
    moved = random_deformation(images, **nothing | {"shift": 3.0})
    assert not torch.allclose(moved, images, atol=0.1)
    assert moved.shape == images.shape


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_whole_shift_alone_moves_every_image_by_its_own_whole_pixels(dtype: torch.dtype) -> None:
    module = BatchedDataModule(shift_pixels=2)
    module.image_shape = (3, 6, 8)
    images = torch.randint(1, 256, (400, 3, 6, 8)).to(dtype)
    moved, _ = training_batch(module, images, torch.zeros(400, dtype=torch.int64))
    assert moved.dtype == dtype
    assert moved.shape == images.shape
    padded = torch.nn.functional.pad(images, [2] * 4)
    seen = set()
    for image, result in zip(padded, moved, strict=True):
        found = []
        for y, x in itertools.product(range(5), repeat=2):
            if torch.equal(image[:, y : y + 6, x : x + 8], result):
                found.append((y, x))
        assert len(found) == 1  # all channels together
        seen |= set(found)
    assert len(seen) == 25  # every shift in ± 2


def test_a_rotation_and_a_shear_are_by_degrees_also_where_images_are_not_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each image gets the largest angle.
    monkeypatch.setattr(torch, "rand", lambda *shape, device: torch.ones(*shape))
    images = torch.zeros(1, 1, 21, 61)
    images[:, :, 10, 40] = 1  # 10 pixels to the right of the centre
    nothing = {"degrees": 0.0, "scale": 0.0, "shear": 0.0, "shift": 0.0, "elastic": 0.0}
    turned = random_deformation(images, **nothing | {"degrees": 90.0})
    assert abs(turned).max() == pytest.approx(1, abs=1e-4)
    assert places_of(turned) == [(0, 30)]  # 10 pixels above the centre
    images = torch.zeros(1, 1, 21, 61)
    images[:, :, 15, 30] = 1  # 5 pixels below the centre
    sheared = random_deformation(images, **nothing | {"shear": 45.0})
    assert places_of(sheared) == [(15, 25)]


def places_of(images: Tensor) -> list[tuple[int, int]]:
    """Row and column of each pixel that is clearly above 0."""
    return [(row, column) for _, _, row, column in (images > 0.5).nonzero().tolist()]


@pytest.mark.parametrize(
    ("option", "value"),
    [("rotate_degrees", 10.0), ("shift_pixels", 1.0), ("transforms", [v2.RandomHorizontalFlip()])],
)
def test_augmentation_is_refused_beside_masks_that_would_stay_as_they_are(
    option: str, value: Any
) -> None:
    images = torch.rand(4, 1, 28, 28)
    masks = torch.zeros(4, 28, 28, dtype=torch.int64)
    module = BatchedDataModule(**{option: value})
    with pytest.raises(UserError, match=rf"^--data\.{option} must be (0|empty) where targets are"):
        training_batch(module, images, masks)
    # There is nothing to refuse in an evaluation, for other targets, and without augmentation.
    training_batch(module, images, masks, training=False)
    training_batch(module, images, torch.zeros(4, 28))
    training_batch(module, images, torch.zeros(4, 2, 2))
    found, same = training_batch(BatchedDataModule(), images, masks)
    assert torch.equal(found, images)
    assert same is masks


class FlippedWithMasks(BatchedDataModule):
    def transformed(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return images.flip(3), targets.flip(2)


def test_images_and_masks_are_changed_together_by_a_method() -> None:
    images = torch.rand(4, 1, 28, 28)
    masks = (images[:, 0] > 0.5).long()
    found, moved = training_batch(FlippedWithMasks(), images, masks)
    assert torch.equal((found[:, 0] > 0.5).long(), moved)
    assert not torch.equal(moved, masks)


def test_the_default_digits_move_by_at_most_a_pixel() -> None:
    images = torch.zeros(400, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 14, 14] = 1
    moved, _ = training_batch(MNISTDataModule(), images, torch.zeros(400, dtype=torch.int64))
    places = {(row, column) for _, _, row, column in moved.nonzero().tolist()}
    assert places == set(itertools.product((13, 14, 15), repeat=2))


@pytest.mark.parametrize("shift", [1.5, -1.0, 29.0, math.inf])
def test_any_other_shift_is_interpolated(shift: float) -> None:
    images = torch.randint(256, (4, 1, 28, 28), dtype=torch.uint8)
    labels = torch.arange(4)
    moved, _ = training_batch(BatchedDataModule(shift_pixels=shift), images, labels)
    assert moved.dtype == torch.float32


def test_elastic_distortion_moves_points_by_the_pixels_that_were_asked_for() -> None:
    ramp = torch.arange(28.0).expand(500, 1, 28, 28)  # each pixel's value is its column
    torch.manual_seed(0)
    bent = random_deformation(ramp, degrees=0, scale=0, shear=0, shift=0, elastic=0.5)
    moved = (bent - ramp)[:, :, 9, 9]  # on a point of the lattice of 7 × 7: 27 / 6 pixels apart
    assert float(moved.std()) == pytest.approx(0.5, rel=0.1)
    assert float((bent - ramp)[:, :, 9, 9].mean()) == pytest.approx(0, abs=0.07)
    assert not torch.allclose(bent[0], bent[1], atol=0.1)


# Sets of IDX files, and downloads.


def test_a_set_is_read_checked_and_described(tmp_path: Path) -> None:
    files = IdxSet("Made/raw")
    assert files.state(tmp_path, ", alas") == {
        "found": False,
        "folder": str(tmp_path / "Made/raw"),
        "text": f"not in {tmp_path / 'Made/raw'}, alas",
    }
    make_idx_files(tmp_path / "Made" / "raw", train=24, test=10)
    assert files.state(tmp_path / "Made")["text"] == f"found in {tmp_path / 'Made/raw'}"
    assert len(files.read(tmp_path, "train")) == 24
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte is damaged: SHA-256 must be 0, "):
        IdxSet("Made/raw", list("0123")).read(tmp_path, "train")
    (tmp_path / "Made/raw/t10k-images-idx3-ubyte").unlink()
    assert files.missing(tmp_path) == ["t10k-images-idx3-ubyte"]
    assert "incomplete" in files.state(tmp_path)["text"]
    with pytest.raises(UserError, match=r"^--data.root must be a folder's name, got 'a\\x00b'\.$"):
        files.missing("a\0b")


def test_a_download_brings_what_is_missing_and_replaces_nothing(tmp_path: Path) -> None:
    files = IdxSet("Made/raw")
    mine = tmp_path / "Made/raw/t10k-labels-idx1-ubyte"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")

    def fetch(root: str) -> None:
        print("a progress bar")
        raw = Path(root) / "Made/raw"
        raw.mkdir(parents=True)
        for name in files.names:
            (raw / name).write_bytes(b"theirs")

    assert files.download(tmp_path, fetch) == ""
    assert mine.read_bytes() == b"mine"
    assert {path.name for path in mine.parent.iterdir()} == set(files.names)


def test_a_download_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    files = IdxSet("Made/raw")
    before = socket.getdefaulttimeout()

    def fetch(root: str) -> None:
        (Path(root) / "half").write_bytes(b"half")
        raise OSError(f"no\nnetwork within {socket.getdefaulttimeout()} s")

    problem = files.download(tmp_path / "deep" / "below", fetch)
    assert problem == " and the download failed (no network within 10.0 s)"
    assert list(tmp_path.iterdir()) == []
    assert socket.getdefaulttimeout() == before
