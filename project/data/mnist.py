"""MNIST: the full set where it can be had, else the real digits that ship inside the package."""

import contextlib
import gzip
import hashlib
import os
import shutil
import socket
import struct
import tempfile
import warnings
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from project.data.base import BatchedDataModule, Split, TensorImages
from project.errors import UserError

DIGITS = Path(__file__).parent / "bundled"
DEFAULT_ROOT = "data"
DOWNLOAD_TIMEOUT_S = 10.0  # per connection and per read


class MNISTDataModule(BatchedDataModule):
    """MNIST as uint8 tensors in memory: 55,000 training, 5,000 validation, 10,000 test images of 28 × 28.

    Validation is split from the training set with a fixed seed. The bundled digits are 10,000 + 2,000 images of the
    real training and test sets (9,000 training, 1,000 validation, 2,000 test).

    Args:
        root: Folder in torchvision's layout: ``root/MNIST/raw/...``, plain or ``.gz``. ``root/MNIST`` and
            ``root/MNIST/raw`` are understood, too.
        source: ``mnist``: the files in ``root``, else a download into it, else an error. ``sample``: the bundled
            digits. ``auto``: ``mnist`` if it is available, else ``sample`` with a warning (an error if ``root``
            is not the default).
        kwargs: Those of :class:`BatchedDataModule`.
    """

    mean = [0.1307]
    std = [0.3081]
    folder = "MNIST/raw"
    # SHA-256 of the decompressed files, computed from the files torchvision fetches
    files: dict[str, str | None] = {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    }
    torchvision_dataset = "MNIST"  # the class in torchvision.datasets that can fetch the files
    sample_folder: Path | None = DIGITS if DIGITS.is_dir() else None  # a bare clone has none

    def __init__(
        self, root: str = DEFAULT_ROOT, source: Literal["auto", "mnist", "sample"] = "auto", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.source = source
        self.data_source = source
        if source == "sample" and self.sample_folder is None:
            raise UserError(f"--data.source must be auto or mnist, got sample: {type(self).__name__} ships no files.")

    def prepare_data(self) -> None:
        """Download the full set if it is wanted and missing (once per machine)."""
        if self.data_source != "sample" and self._missing():
            try:
                self._download()
            except Exception as error:
                if not self._may_fall_back():
                    raise self._lacking(f" and the download failed ({' '.join(str(error).split())})") from None

    def _may_fall_back(self) -> bool:
        """Whether to use the bundled digits. Not if a folder was named: its name may be mistyped."""
        return self.data_source == "auto" and self.sample_folder is not None and self.root == DEFAULT_ROOT

    def _lacking(self, reason: str = "") -> UserError:
        bundled = ", or use --data.source sample for the bundled digits" if self.sample_folder else ""
        return UserError(
            f"--data.root {self.root}: {self._raw()} lacks {', '.join(self._missing())}{reason}. Put the files there "
            f"(plain or .gz) or name another --data.root{bundled}."
        )

    def stay_with(self, data_source: str | None) -> None:
        """Resolve ``auto`` as the earlier run did, whatever is available now."""
        if self.source == "auto" and data_source:
            self.data_source = data_source

    def make_split(self, split: Split) -> Dataset[Any]:
        prefix = "t10k" if split == "test" else "train"
        if self.data_source == "auto":
            self.data_source = self._resolve_auto()
        if self.data_source == "sample":
            assert self.sample_folder is not None
            images, labels = _read_pair(self.sample_folder, prefix, {})
        else:
            images, labels = _read_pair(self._raw(), prefix, self.files)
        if split == "test":
            return TensorImages(images, labels)
        return self.hold_out(TensorImages(images, labels), split, 1 / 10 if self.data_source == "sample" else 1 / 12)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._require_one_source()
        if self.batch_size > 60_000:
            raise UserError(f"--data.batch_size must be at most the 60,000 images of the set, got {self.batch_size}.")

    def _raw(self) -> Path:
        """The folder of the files: below ``root``, or where ``root`` is that folder itself or the one above it."""
        root, folder = Path(self.root), Path(self.folder)
        typed = root.resolve().parts
        places = [root / folder]
        places += [root / folder.name] if typed[-1:] == folder.parts[:1] else []
        places += [root] if typed[-2:] == folder.parts else []
        return next((place for place in places if any(find_idx(place, name) for name in self.files)), places[0])

    def _missing(self) -> list[str]:
        return [name for name in self.files if find_idx(self._raw(), name) is None]

    def _resolve_auto(self) -> str:
        if not self._missing():
            return "mnist"
        if not self._may_fall_back():
            raise self._lacking()
        warnings.warn(
            f"\n{'!' * 100}\nFull MNIST was not found in {self._raw()} and could not be downloaded: using the 10,000 + "
            "2,000 digits that ship with the package.\nFor the full set name its folder with --data.root, or silence "
            f"this with --data.source sample.\n{'!' * 100}",
            stacklevel=2,
        )
        return "sample"

    def _require_one_source(self) -> None:
        """Check that all ranks use the same source: otherwise one network would train on two datasets."""
        if self.trainer is None or self.trainer.world_size == 1:
            return
        first = self.trainer.strategy.broadcast(self.data_source)
        same = torch.tensor(float(first == self.data_source), device=self.trainer.strategy.root_device)
        if self.trainer.strategy.reduce(same, reduce_op="mean") < 1:
            raise UserError(
                f"--data.source auto found different data on different ranks (rank 0: {first}). Give all machines the "
                "files, or name the source: --data.source mnist or sample."
            )

    def _download(self) -> None:
        """Run torchvision's download, with bounded time-outs, into a folder of its own: no half file in the root."""
        from torchvision import datasets

        # in an existing folder, so that a failed download does not create the root
        root = Path(self.root).absolute()
        there = next(place for place in (root, *root.parents) if place.is_dir())
        previous = socket.getdefaulttimeout()
        socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
        try:
            with tempfile.TemporaryDirectory(dir=there, prefix=".download-") as scratch:
                with contextlib.redirect_stdout(open(os.devnull, "w")):
                    getattr(datasets, self.torchvision_dataset)(scratch, download=True)
                fetched = {name: Path(scratch) / self.folder / name for name in self.files}
                for name, path in fetched.items():
                    read_idx(path, self.files[name])
                raw = self._raw()
                raw.mkdir(parents=True, exist_ok=True)
                for name, path in fetched.items():
                    shutil.move(path, raw / name)
        finally:
            socket.setdefaulttimeout(previous)


def _read_pair(folder: Path, prefix: str, digests: dict[str, str | None]) -> tuple[Tensor, Tensor]:
    """Checked images and labels of one part ("train" or "t10k")."""
    parts = []
    for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
        path = find_idx(folder, name)
        if path is None:
            raise UserError(f"{folder} lacks {name}. Name another --data.root or use --data.source sample.")
        parts.append(read_idx(path, digests.get(name)))
    images, labels = parts
    if len(images) != len(labels):
        raise UserError(f"{folder}: {len(images)} {prefix} images but {len(labels)} labels.")
    return images, labels


# MNIST's IDX files, plain or ``.gz``: checked before they are used.

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049


def find_idx(folder: Path, name: str) -> Path | None:
    """The file ``name`` or ``name.gz`` in ``folder``, the plain one first; None where there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, sha256: str | None = None) -> Tensor:
    """Images (count, 1, rows, columns) or labels (count,) of an IDX file; images uint8, labels int64.

    Args:
        path: The file, plain or ``.gz``.
        sha256: Expected digest of the decompressed bytes; not checked when None.

    Raises:
        UserError: The file cannot be read, is damaged, truncated, too long, or not the expected one.
    """
    fix = f"Delete {path} and run again to fetch it anew, or use --data.source sample."
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}. {fix}") from None
    magic = struct.unpack(">I", data[:4])[0] if len(data) >= 4 else None
    if magic not in (IMAGES_MAGIC, LABELS_MAGIC):
        raise UserError(f"{path} is not an IDX file: magic number {magic}, not {IMAGES_MAGIC} or {LABELS_MAGIC}. {fix}")
    header = 16 if magic == IMAGES_MAGIC else 8
    if len(data) < header:
        raise UserError(f"{path} is truncated: {len(data)} bytes. {fix}")
    shape = struct.unpack(f">{header // 4 - 1}I", data[4:header])
    expected = header + int(np.prod(shape))
    if len(data) != expected:
        raise UserError(f"{path} is damaged: {len(data):,} bytes where its header announces {expected:,}. {fix}")
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise UserError(f"{path} is damaged: SHA-256 {found[:12]}…, not {sha256[:12]}…. {fix}")
    # frombuffer is a view of read-only bytes; the copy owns writable memory
    values = torch.from_numpy(np.frombuffer(data, np.uint8, offset=header).copy())
    if magic == LABELS_MAGIC:
        return values.long()
    return values.view(shape[0], 1, shape[1], shape[2])


def write_idx(path: Path, values: Tensor) -> None:
    """Write uint8 images (count, 1, rows, columns) or labels (count,) as an IDX file, gzipped if named ``.gz``."""
    array = values.to(torch.uint8).numpy()
    if array.ndim == 1:
        header = struct.pack(">II", LABELS_MAGIC, len(array))
    else:
        header = struct.pack(">IIII", IMAGES_MAGIC, len(array), *array.shape[2:])
    data = header + array.tobytes()
    # mtime=0: the same digits make the same file, whenever they are written
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)
