"""MNIST: the full set where it can be had, else the real digits that lie beside this file."""

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from unbroken import data as tools
from unbroken.errors import UserError, require

Batch = tuple[Tensor, Tensor]  # images (batch, 1, 28, 28), uint8 or float in 0-1; labels (batch,)

DEFAULT_ROOT = "data"
BUNDLED = Path(__file__).parent / "bundled"
SPLITS: dict[str, list[tools.Split]] = {
    # A damaged test file is an error before the training, not at its end.
    "fit": ["train", "val", "test"],
    "validate": ["val"],
    "test": ["test"],
}
# The share of the training images that is validation. Of the full set it is 5,000.
VAL_SHARE = {"mnist": 1 / 12, "sample": 1 / 10}


class MNISTDataModule(LightningDataModule):
    """MNIST as uint8 tensors in memory: 55,000 training, 5,000 validation, 10,000 test images of 28
    × 28.

    The bundled digits are 10,000 images of the real training set (1,000 for validation) and 2,000
    of the test set.

    Args:
        root: Folder in torchvision's layout, ``root/MNIST/raw/...``, plain or ``.gz``; or one of
            the folders in it.
        source: ``mnist``: the files in ``root``, else a download into it, else an error.
            ``sample``: the bundled digits. ``auto``: ``mnist`` if it is there, else ``sample`` with
            a warning; but an error if you named another ``root``.
        batch_size: Training samples per batch and device.
        eval_batch_size: Validation and test samples per batch and device. It changes speed and
            memory, never a metric.
        shift_pixels: Augmentation: random shift per axis within ± this many pixels. It is by whole
            pixels if this is a whole number and the next four are 0.
        rotate_degrees: Augmentation: random rotation within ± this angle.
        scale_fraction: Augmentation: random scaling per axis by 1 ± this fraction.
        shear_degrees: Augmentation: random shear within ± this angle.
        elastic_pixels: Augmentation: random bending, by this standard deviation per point of a
            coarse lattice. With all five at 0 images stay as they are.
        transforms: Augmentation: transforms of ``torchvision.transforms.v2``, applied in order to
            the training images. ``MixUp`` and ``CutMix`` get the batch with its labels, every other
            one an image at a time, which takes longer than the augmentations above.
        num_workers: Loader processes per device. Default: none, because the data are in memory.
        on_device: Keep the data on the device, and make batches there: the same order, the same
            results, no copy in a step. ``auto``: on CUDA, a split of at most a tenth of its memory.
        pin_memory: Page-locked batches, for copies that overlap with computing. Default: with a
            CUDA device only.
        prefetch_factor: Batches each worker prepares ahead, at most 1000.
        train_samples: Keep the first N training samples (default: all).
        val_samples: Keep the first N validation samples (default: all).
        test_samples: Keep the first N test samples (default: all).
    """

    files = tools.IdxSet(
        "MNIST/raw",
        [  # SHA-256 of what torchvision fetches, decompressed
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ],
    )
    # The library asks for these names, and for the methods stay_with, state_of_files and
    # prepare_image below (unbroken.contract). It does without any that is missing.
    mean = [0.1307]  # of pixels in 0-1
    std = [0.3081]
    image_shape = (1, 28, 28)
    class_names = [str(digit) for digit in range(10)]
    label_name = "digit"  # the column of predict
    may_download = True  # the library says no where a stranger's checkpoint asks for the data
    # Lightning's name: a rank may have no sample of a tiny set.
    allow_zero_length_dataloader_with_multiple_devices = True

    def __init__(
        self,
        root: str = DEFAULT_ROOT,
        source: Literal["auto", "mnist", "sample"] = "auto",
        batch_size: int = 192,
        eval_batch_size: int = 1000,
        shift_pixels: float = 1.0,
        rotate_degrees: float = 0.0,
        scale_fraction: float = 0.0,
        shear_degrees: float = 0.0,
        elastic_pixels: float = 0.0,
        transforms: list[nn.Module] | None = None,
        num_workers: int | None = None,
        on_device: bool | Literal["auto"] = "auto",
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "eval_batch_size": eval_batch_size}
        samples = {"train": train_samples, "val": val_samples, "test": test_samples}
        sizes_of_splits = {f"{split}_samples": count for split, count in samples.items()}
        tools.check_loading({**sizes, **sizes_of_splits}, prefetch_factor, num_workers, on_device)
        self.root = root
        self.source = source
        self.data_source: str = source  # once it is known: mnist or sample
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.samples = samples
        self.augmentation = {
            "shift_pixels": shift_pixels,
            "rotate_degrees": rotate_degrees,
            "scale_fraction": scale_fraction,
            "shear_degrees": shear_degrees,
            "elastic_pixels": elastic_pixels,
        }
        self.transforms = transforms or []
        self.loading = {
            "num_workers": num_workers,
            "on_device": on_device,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
        }
        self.splits: dict[str, tools.TensorImages] = {}
        self.bytes_on_device: dict[str, int] = {}  # by split, for the memory monitor

    # Where the digits come from

    def prepare_data(self) -> None:
        """Download the full set if it is wanted and missing (once per machine)."""
        if self.data_source == "sample" or not self.files.missing(self.root):
            return
        if self.may_download:
            reason = self.files.download(self.root, self.fetch)
        else:
            there = f"type --data.root {self.root} to download there"
            reason = f", and a stranger's checkpoint downloads nothing: {there}"
        if reason:
            self.use_bundled_digits(reason)

    def fetch(self, folder: str) -> None:
        """Torchvision's download."""
        from torchvision import datasets  # here, because it takes long to import

        datasets.MNIST(folder, download=True)

    def use_bundled_digits(self, reason: str = "") -> None:
        """Take the bundled digits for missing files, and warn of it.

        Raises:
            UserError: More was asked for: the full set itself, or a folder, whose name may be
                wrong.
        """
        folder = self.files.folder(self.root)
        if self.data_source == "auto" and self.root == DEFAULT_ROOT:
            self.data_source = "sample"
            used = "this run uses the 10,000 + 2,000 digits that ship inside the package"
            fix = "For the full set name its folder with --data.root."
            quiet = "To choose these digits without this warning: --data.source sample."
            what = f"Full MNIST was not found in {folder}{reason}: {used}. {fix} {quiet}"
            warnings.warn(what, stacklevel=2)
            return
        lacks = f"{folder} lacks {', '.join(self.files.missing(self.root))}{reason}"
        fix = "Put the files there (plain or .gz) or name another --data.root"
        sample = "use --data.source sample for the bundled digits"
        raise UserError(f"--data.root {self.root}: {lacks}. {fix}, or {sample}.")

    def stay_with(self, data_source: str | None) -> None:
        """Called at a resume: where the source is ``auto``, use what the run found at its start."""
        if self.source == "auto" and data_source:
            self.data_source = data_source

    def state_of_files(self) -> dict[str, Any]:
        """Whether the full set is there, for the command ``devices``."""
        return self.files.state(self.root, ": fit downloads it, or uses the bundled digits")

    # How they become batches

    def setup(self, stage: str) -> None:
        if self.data_source != "sample":
            if self.files.missing(self.root):
                self.use_bundled_digits()
            else:
                self.data_source = "mnist"
        # Ranks with different data would train on two sets.
        if not tools.is_same_on_all_ranks(self.data_source, self.trainer):
            found = f"found different data on different ranks (here: {self.data_source})"
            fix = "Give all machines the files, or name the source: --data.source mnist or sample."
            raise UserError(f"--data.source auto {found}. {fix}")
        allowed = "be at most the set's 60,000 images"
        require(self.batch_size <= 60_000, "--data.batch_size", allowed, self.batch_size)
        for split in SPLITS.get(stage, []):
            if split not in self.splits:
                self.splits[split] = tools.first_samples(self.read(split), self.samples[split])

    def read(self, split: tools.Split) -> tools.TensorImages:
        """The images and labels of a split, from the full set or from the bundled digits."""
        part = "t10k" if split == "test" else "train"
        if self.data_source == "sample":
            images = tools.read_part(BUNDLED, part)
        else:
            images = self.files.read(self.root, part)
        if split == "test":
            return images
        return tools.hold_out(images, split, VAL_SHARE[self.data_source])

    def train_dataloader(self) -> DataLoader[Batch]:
        # A set smaller than a batch is one batch; it would be dropped otherwise.
        batch_size = min(self.batch_size, len(self.splits["train"]))
        return self.loader("train", batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.loader("val", self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.loader("test", self.eval_batch_size)

    def loader(self, split: tools.Split, batch_size: int, **order: bool) -> DataLoader[Batch]:
        """Batches of a split, each gathered in one call, on the device where that pays."""
        options: dict[str, Any] = {**self.loading, **order}
        loader = tools.make_loader(self.splits[split], batch_size, self.trainer, **options)
        self.bytes_on_device[split] = tools.bytes_on_device(loader)
        return loader

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        return tools.copy_to(device, batch)  # faster than Lightning's search for tensors

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augment training images on their device; the module standardizes them."""
        images, labels = batch
        if self.trainer is None or not self.trainer.training:
            return images, labels
        images = tools.random_changes(images, **self.augmentation)
        return tools.transformed(images, labels, self.transforms)

    def prepare_image(self, pixels: np.ndarray) -> tuple[np.ndarray, str]:
        """For ``predict``: the digit of a picture (height, width, 3) as MNIST shows it, uint8
        (1, 28, 28), and a note where there are several.
        """
        return tools.find_figure(pixels, "digit")
