"""MNIST: the full set if it is available, else the real digits that ship inside the package."""

import contextlib
import gzip
import hashlib
import io
import math
import shutil
import socket
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from project.data.base import Split
from project.data.images import BatchedDataModule, TensorImages
from project.errors import UserError, require

DIGITS = Path(__file__).parent / "bundled"
DEFAULT_ROOT = "data"


class MNISTDataModule(BatchedDataModule):
    """MNIST as uint8 tensors in memory: 55,000 training, 5,000 validation, 10,000 test images of 28 × 28.

    The bundled digits are 10,000 images of the real training set (1,000 for validation) and 2,000 of the test set.

    Args:
        root: Folder in torchvision's layout, ``root/MNIST/raw/...``, plain or ``.gz``; or one of the folders in it.
        source: ``mnist``: the files in ``root``, else a download into it, else an error. ``sample``: the bundled
            digits. ``auto``: ``mnist`` if it is there, else ``sample`` with a warning; an error if ``root`` is another.
        batch_size: See :class:`SplitDataModule`.
        shift_pixels: See :class:`BatchedDataModule`.
        kwargs: Those of :class:`BatchedDataModule`.
    """

    mean = [0.1307]
    std = [0.3081]
    folder = "MNIST/raw"
    files: dict[
        str, str | None
    ] = {  # SHA-256 of the decompressed files, computed from the files torchvision fetches
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    }
    torchvision_dataset = "MNIST"  # the class in torchvision.datasets that can fetch the files
    sample_folder: Path | None = DIGITS if DIGITS.is_dir() else None  # a bare clone has none
    may_download = True  # else only into the default root

    def __init__(
        self,
        root: str = DEFAULT_ROOT,
        source: Literal["auto", "mnist", "sample"] = "auto",
        batch_size: int = 192,
        shift_pixels: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, shift_pixels=shift_pixels, **kwargs)
        self.root, self.source = root, source
        self.data_source: str = source  # auto until it is known what there is
        got = f"{source}: {type(self).__name__} ships no files"
        require(
            source != "sample" or self.sample_folder is not None,
            "--data.source",
            "be auto or mnist",
            got,
        )

    def prepare_data(self) -> None:
        """Download the full set if it is wanted and missing (once per machine)."""
        if self.data_source != "sample" and self.missing():
            if not self.may_download and self.root != DEFAULT_ROOT:
                self._do_without(
                    f", and a checkpoint alone names it: type --data.root {self.root} to download there"
                )
            try:
                self._download()
            except Exception as error:
                self._do_without(f" and the download failed ({' '.join(str(error).split())})")

    def stay_with(self, data_source: str | None) -> None:
        """Where the source is ``auto``: what it found then, whatever it would find now."""
        if self.source == "auto" and data_source:
            self.data_source = data_source

    def setup(self, stage: str) -> None:
        if self.data_source != "sample" and self.missing():
            self._do_without()
        elif self.data_source == "auto":
            self.data_source = "mnist"
        super().setup(stage)
        if stage == "fit" and self.data_source == "mnist":
            self.make_split("test")  # a damaged file is told before the training, not at its end
        require(
            self.batch_size <= 60_000,
            "--data.batch_size",
            "be at most the set's 60,000 images",
            self.batch_size,
        )
        if self.trainer is None:
            return
        first = self.trainer.strategy.broadcast(
            self.data_source
        )  # else ranks could train on two sets
        if not self.trainer.strategy.reduce_boolean_decision(first == self.data_source):
            fix = "Give all machines the files, or name the source: --data.source mnist or sample."
            raise UserError(
                f"--data.source auto found different data on different ranks (rank 0: {first}). {fix}"
            )

    def make_split(self, split: Split) -> Dataset[Any]:
        sample, prefix = self.data_source == "sample", "t10k" if split == "test" else "train"
        folder = self.sample_folder if sample and self.sample_folder else self.raw_folder()
        names = (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
        digests = {} if sample else self.files
        images, labels = (
            read_idx(find_idx(folder, name) or folder / name, digests.get(name)) for name in names
        )
        if len(images) != len(labels):
            raise UserError(f"{folder}: {len(images)} {prefix} images but {len(labels)} labels.")
        dataset = TensorImages(images, labels)
        return (
            dataset
            if split == "test"
            else self.hold_out(dataset, split, 1 / 10 if sample else 1 / 12)
        )

    def raw_folder(self) -> Path:
        """The folder of the files: below ``root``, or where ``root`` is that folder itself or the one above it."""
        root = Path(self.root).resolve()
        for above in (root, *root.parents[:2]):
            place = above / self.folder
            if place.is_relative_to(root) and any(find_idx(place, name) for name in self.files):
                return place
        return Path(self.root) / self.folder

    def missing(self) -> list[str]:
        """Names of the set's files that are not there."""
        return [name for name in self.files if find_idx(self.raw_folder(), name) is None]

    def _do_without(self, reason: str = "") -> None:
        """Take the bundled digits for missing files; a UserError if more was asked for: a name may be wrong."""
        folder = self.raw_folder()
        if (
            self.data_source == "auto"
            and self.sample_folder is not None
            and self.root == DEFAULT_ROOT
        ):
            self.data_source = "sample"
            found = f"Full MNIST was not found in {folder} and could not be downloaded: using the bundled"
            fix = "For the full set name its folder with --data.root, or silence this with --data.source sample."
            warnings.warn(
                f"\n{'!' * 100}\n{found} 10,000 + 2,000 digits.\n{fix}\n{'!' * 100}", stacklevel=2
            )
            return
        bundled = (
            ", or use --data.source sample for the bundled digits" if self.sample_folder else ""
        )
        lacks = f"{folder} lacks {', '.join(self.missing())}{reason}"
        fix = f"Put the files there (plain or .gz) or name another --data.root{bundled}."
        raise UserError(f"--data.root {self.root}: {lacks}. {fix}") from None

    def _download(self) -> None:
        """Torchvision's download, with bounded time-outs, into a folder of its own: no half file in the root."""
        from torchvision import datasets

        root = Path(self.root).absolute()
        there = next(
            place for place in (root, *root.parents) if place.is_dir()
        )  # a failed one does not create root
        previous = socket.getdefaulttimeout()
        socket.setdefaulttimeout(10)  # seconds, per connection and per read
        try:
            with tempfile.TemporaryDirectory(dir=there, prefix=".download-") as scratch:
                with contextlib.redirect_stdout(io.StringIO()):
                    getattr(datasets, self.torchvision_dataset)(scratch, download=True)
                fetched, raw = Path(scratch) / self.folder, self.raw_folder()
                raw.mkdir(parents=True, exist_ok=True)
                for name in self.files:
                    shutil.move(fetched / name, raw / name)
        finally:
            socket.setdefaulttimeout(previous)


IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049  # how MNIST's IDX files begin


def find_idx(folder: Path, name: str) -> Path | None:
    """The file ``name`` or ``name.gz`` in ``folder``, the plain one first; None where there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, sha256: str | None = None) -> Tensor:
    """Images (count, 1, rows, columns), uint8, or labels (count,), int64, of an IDX file, plain or ``.gz``. A UserError
    where it cannot be read, is damaged, or its decompressed bytes have another digest than ``sha256``.
    """
    fix = f"Delete {path} and run again to fetch it anew, or use --data.source sample."
    try:
        if path.suffix == ".gz":
            data = np.frombuffer(bytearray(gzip.decompress(path.read_bytes())), np.uint8)
        else:
            data = np.fromfile(path, np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}. {fix}") from None
    magic = int.from_bytes(data[:4].tobytes(), "big")
    header = 16 if magic == IMAGES_MAGIC else 8
    shape = np.frombuffer(data[4:header].tobytes().ljust(header - 4, b"\0"), ">u4").tolist()
    expected = header + math.prod(shape)
    digest = hashlib.sha256(data.data).hexdigest() if sha256 else None
    for is_right, fault in (
        (
            magic in (IMAGES_MAGIC, LABELS_MAGIC),
            f"magic number {magic}, not {IMAGES_MAGIC} or {LABELS_MAGIC}",
        ),
        (len(data) == expected, f"{len(data):,} bytes where its header announces {expected:,}"),
        (digest == sha256, f"SHA-256 {digest}, not {sha256}"),
    ):
        if not is_right:
            raise UserError(f"{path} is damaged: {fault}. {fix}")
    values = torch.from_numpy(data[header:])
    return values.long() if magic == LABELS_MAGIC else values.view(shape[0], 1, *shape[1:])
