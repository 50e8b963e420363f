"""The data: files checked, splits fixed, every sample once, order a function of (seed, epoch)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from project.data import MNISTDataModule
from project.data.augment import random_deformation
from project.data.bundled.make_digits import stratified
from project.data.mnist import DIGITS, read_idx, write_idx
from project.data.sampler import EvalBatchSampler, SeededFetch, TensorImages, TrainBatchSampler, make_loader
from project.errors import UserError


@pytest.mark.parametrize("name", ["x-images-idx3-ubyte", "x-images-idx3-ubyte.gz"])
def test_idx_files_are_read_back_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8)
    write_idx(tmp_path / name, images)
    assert torch.equal(read_idx(tmp_path / name), images)
    with pytest.raises(UserError, match="SHA-256"):
        read_idx(tmp_path / name, sha256="0" * 64)


def test_the_bundled_digits_are_stratified_and_real(mnist_root: Path) -> None:
    module = MNISTDataModule(root=str(mnist_root), source="mnist")
    for part, size in (("train", 10_000), ("t10k", 2_000)):
        images, labels = (read_idx(DIGITS / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        whole = read_idx(
            mnist_root / "MNIST/raw" / f"{part}-labels-idx1-ubyte", module.files[f"{part}-labels-idx1-ubyte"]
        )
        chosen = stratified(whole, size)
        assert torch.equal(labels, whole[chosen])
        pixels = read_idx(mnist_root / "MNIST/raw" / f"{part}-images-idx3-ubyte")
        assert torch.equal(images, pixels[chosen])


def test_full_mnist_is_split_55000_5000_10000(mnist_root: Path) -> None:
    module = MNISTDataModule(root=str(mnist_root))
    module.prepare_data()
    module.setup("fit")
    assert (module.num_samples("train"), module.num_samples("val")) == (55_000, 5_000)
    module.setup("test")
    assert module.num_samples("test") == 10_000
    assert module.data_source == "mnist"


def test_auto_falls_back_to_the_sample_and_says_so(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    module = MNISTDataModule(root="nowhere")
    module.prepare_data()
    with pytest.warns(UserWarning, match="was not found"):
        module.setup("fit")
    assert module.data_source == "sample"
    assert (module.num_samples("train"), module.num_samples("val")) == (9_000, 1_000)


def test_the_validation_split_does_not_depend_on_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        module = MNISTDataModule(source="sample")
        module.setup("fit")
        splits.append(module.splits["val"].images)
    assert torch.equal(*splits)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 33, 1999])
@pytest.mark.parametrize("batch_size", [1, 32, 5000])
def test_evaluation_sees_every_sample_once_in_the_same_number_of_batches(
    count: int, world_size: int, batch_size: int
) -> None:
    ranks = [list(EvalBatchSampler(count, batch_size, rank, world_size)) for rank in range(world_size)]
    assert torch.equal(torch.cat([batch for rank in ranks for batch in rank]), torch.arange(count))
    assert len({len(rank) for rank in ranks}) == 1
    assert max(len(batch) for rank in ranks for batch in rank) <= batch_size


def test_ranks_share_the_batches_of_one_process() -> None:
    alone = list(TrainBatchSampler(1000, 64, seed=3))
    pairs = zip(*(TrainBatchSampler(1000, 32, rank, 2, seed=3) for rank in range(2)), strict=True)
    assert all(torch.equal(one, torch.cat(two)) for one, two in zip(alone, pairs, strict=True))


def test_order_depends_on_seed_and_epoch_only() -> None:
    sampler = TrainBatchSampler(1000, 64, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    assert not torch.equal(torch.cat(list(sampler)), torch.cat(first))
    sampler.set_epoch(0)
    assert torch.equal(torch.cat(list(sampler)), torch.cat(first))
    assert not torch.equal(torch.cat(list(TrainBatchSampler(1000, 64, seed=4))), torch.cat(first))


@pytest.mark.parametrize(("batch_size", "world_size"), [(64, 1), (50, 1), (16, 3)])
def test_a_resumed_epoch_goes_on_from_the_right_sample(batch_size: int, world_size: int) -> None:
    before = TrainBatchSampler(1000, 64, seed=3)
    order = torch.cat(list(before))
    done = 5 * 64
    samplers = [TrainBatchSampler(1000, batch_size, rank, world_size, seed=3) for rank in range(world_size)]
    for sampler in samplers:
        sampler.resume_at(0, done)
    rest = torch.cat([torch.cat(parts) for parts in zip(*samplers, strict=True)])
    common = min(len(rest), len(order) - done)
    assert torch.equal(rest[:common], order[done : done + common])
    assert samplers[0].start_batch + len(list(samplers[0])) == len(samplers[0])


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples with random augmentation in ``__getitem__``, as users write it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(1, 2, 2), index


@pytest.mark.parametrize("num_workers", [1, 2])
def test_random_augmentation_in_workers_does_not_depend_on_the_workers(num_workers: int) -> None:
    def epoch(workers: int) -> list[torch.Tensor]:
        sampler = TrainBatchSampler(40, 8, seed=1)
        loader = make_loader(
            Noisy(), sampler, num_workers=workers, pin_memory=False, prefetch_factor=2, seed=1, image_shape=(1, 2, 2)
        )
        return [images for images, _ in loader]

    state = torch.get_rng_state()
    here = epoch(0)
    assert torch.equal(torch.get_rng_state(), state), "fetching moved the training's own generator"
    assert all(torch.equal(a, b) for a, b in zip(here, epoch(num_workers), strict=True))
    assert len({float(images[0, 0, 0, 0]) for images in here}) == 5


def test_a_batch_is_gathered_in_one_call() -> None:
    dataset = TensorImages(torch.arange(10).view(10, 1, 1, 1), torch.arange(10))
    images, labels = dataset[torch.tensor([3, 1])]
    assert images.flatten().tolist() == labels.tolist() == [3, 1]
    for others in (slice(2, 4), torch.arange(10) > 7, [4, 2], -1):  # as a tensor would be indexed
        images, labels = dataset[others]
        assert images.flatten().tolist() == labels.flatten().tolist() == torch.arange(10)[others].flatten().tolist()
    loader = make_loader(
        dataset,
        TrainBatchSampler(10, 5),
        num_workers=0,
        pin_memory=False,
        prefetch_factor=2,
        seed=0,
        image_shape=(1, 1, 1),
    )
    assert not isinstance(loader.dataset, SeededFetch)
    assert [len(labels) for _, labels in loader] == [5, 5]


def test_normalised_digits_have_mean_0_and_deviation_1() -> None:
    module = MNISTDataModule(source="sample")
    module.setup("fit")
    images = module.splits["train"].images
    before = images.clone()
    normalised = module.normalize(images)
    assert torch.equal(images, before)
    assert normalised.dtype == torch.float32
    assert abs(float(normalised.mean())) < 0.02
    assert abs(float(normalised.std()) - 1) < 0.02
    fractions = images.float() / 255
    assert torch.allclose(module.normalize(fractions), normalised, atol=1e-6)
    assert torch.equal(fractions, images.float() / 255)


def test_augmentation_without_amount_changes_nothing_and_a_shift_shifts() -> None:
    images = torch.rand(4, 1, 28, 28)
    generator = torch.Generator().manual_seed(0)
    nothing = {"degrees": 0.0, "scale": 0.0, "shear": 0.0, "shift": 0.0, "elastic": 0.0}
    same = random_deformation(images, generator, **nothing)
    assert torch.allclose(same, images, atol=1e-5)
    moved = random_deformation(images, generator, **nothing | {"shift": 3.0})
    assert not torch.allclose(moved, images, atol=0.1)
    assert moved.shape == images.shape


def test_elastic_distortion_moves_points_by_the_pixels_that_were_asked_for() -> None:
    ramp = torch.arange(28.0).expand(500, 1, 28, 28)  # each pixel's value is its column
    generator = torch.Generator().manual_seed(0)
    bent = random_deformation(ramp, generator, degrees=0, scale=0, shear=0, shift=0, elastic=0.5)
    moved = (bent - ramp)[:, :, 9, 9]  # on a point of the lattice of 7 × 7: 27 / 6 pixels apart
    assert float(moved.std()) == pytest.approx(0.5, rel=0.1)
    assert float((bent - ramp)[:, :, 9, 9].mean()) == pytest.approx(0, abs=0.07)
    assert not torch.allclose(bent[0], bent[1], atol=0.1)
