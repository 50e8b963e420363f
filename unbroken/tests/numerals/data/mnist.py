"""MNIST: the full set if it is available, else the real digits that ship inside the package."""

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset
from unbroken.data.base import Split
from unbroken.data.downloads import download_into
from unbroken.data.drawn_figures import find_figure
from unbroken.data.idx_files import find_idx, read_idx
from unbroken.data.images import BatchedDataModule, TensorImages
from unbroken.errors import UserError, require

# The digits of the template that lies beside the library
DIGITS = next(Path(__file__).parents[4].glob("*/data/bundled"), Path("no digits"))
DEFAULT_ROOT = "data"

# The share of the training set that is validation. Of the full set it is 5,000 images, of the
# sample 1,000.
VAL_SHARE = 1 / 12
VAL_SHARE_OF_SAMPLE = 1 / 10


class MNISTDataModule(BatchedDataModule):
    """MNIST as uint8 tensors in memory: 55,000 training, 5,000 validation, 10,000 test images of 28
    × 28.

    The bundled digits are 10,000 images of the real training set (1,000 for validation) and 2,000
    of the test set.

    Args:
        root: Folder in torchvision's layout, ``root/MNIST/raw/...``, plain or ``.gz``; or one of
            the folders in it.
        source: ``mnist``: the files in ``root``, else a download into it, else an error.
            ``sample``: the bundled digits. ``auto``: ``mnist`` if it is there, else ``sample`` with
            a warning; an error if ``root`` is another.
        batch_size: See :class:`SplitDataModule`.
        shift_pixels: See :class:`BatchedDataModule`.
        kwargs: Those of :class:`BatchedDataModule`.
    """

    mean = [0.1307]
    std = [0.3081]
    label_name = "digit"
    folder = "MNIST/raw"
    # File → SHA-256 of its decompressed bytes, computed from the files that torchvision fetches.
    # None: the file is not compared.
    files: dict[str, str | None] = {
        "train-images-idx3-ubyte": (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        "train-labels-idx1-ubyte": (
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
        ),
        "t10k-images-idx3-ubyte": (
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
        ),
        "t10k-labels-idx1-ubyte": (
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
        ),
    }
    torchvision_dataset = "MNIST"  # the class in torchvision.datasets that can fetch the files
    sample_folder: Path | None = DIGITS if DIGITS.is_dir() else None  # a bare clone has none
    may_download = True  # the library says no where a stranger's checkpoint asks for the data

    def __init__(
        self,
        root: str = DEFAULT_ROOT,
        source: Literal["auto", "mnist", "sample"] = "auto",
        batch_size: int = 192,
        shift_pixels: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, shift_pixels=shift_pixels, **kwargs)
        if source == "sample" and self.sample_folder is None:
            got = f"{source}: {type(self).__name__} ships no files"
            require(False, "--data.source", "be auto or mnist", got)
        # A checkpoint may hold a text that no system takes for a path.
        require("\0" not in str(root), "--data.root", "be a folder's name", repr(root))
        self.root = root
        self.source = source
        # "auto" until it is known what there is; then "mnist" or "sample".
        self.data_source: str = source

    # What Lightning calls

    def prepare_data(self) -> None:
        """Download the full set if it is wanted and missing (once per machine)."""
        if self.data_source == "sample" or not self.missing():
            return
        if not self.may_download:
            there = f"type --data.root {self.root} to download there"
            self.do_without(f", and a stranger's checkpoint downloads nothing: {there}")
            return
        try:
            self._download()
        except Exception as error:
            reason = " ".join(str(error).split())
            self.do_without(f" and the download failed ({reason})")

    def setup(self, stage: str) -> None:
        self.settle_source()
        super().setup(stage)
        if stage == "fit" and self.data_source == "mnist":
            # A damaged test file is an error before the training, not at its end.
            self.make_split("test")
        must = "be at most the set's 60,000 images"
        require(self.batch_size <= 60_000, "--data.batch_size", must, self.batch_size)
        self.check_that_ranks_agree()

    def make_split(self, split: Split) -> Dataset[Any]:
        """The images and labels of a split, from the full set or from the bundled digits."""
        part = "t10k" if split == "test" else "train"
        if self.data_source == "sample" and self.sample_folder is not None:
            dataset = read_part(self.sample_folder, part, digests={})
            share = VAL_SHARE_OF_SAMPLE
        else:
            dataset = read_part(self.raw_folder(), part, digests=self.files)
            share = VAL_SHARE
        if split == "test":
            return dataset
        return self.hold_out(dataset, split, share)

    def prepare_image(self, pixels: np.ndarray) -> Any:
        """The digit of a picture, for ``predict``, and a note where there are several."""
        return find_figure(pixels, self.label_name)

    # Where the files are

    def raw_folder(self) -> Path:
        """The folder of the files: below ``root``, or where ``root`` is that folder itself or the
        one above it.
        """
        root = Path(self.root).resolve()
        for above in (root, *root.parents[:2]):
            place = above / self.folder
            if place.is_relative_to(root) and any(find_idx(place, name) for name in self.files):
                return place
        return Path(self.root) / self.folder

    def missing(self) -> list[str]:
        """Names of the set's files that are not there."""
        folder = self.raw_folder()
        return [name for name in self.files if find_idx(folder, name) is None]

    def state_of_files(self) -> dict[str, Any]:
        """Whether the full set is there: ``found``, its ``folder``, and a ``text`` of one line."""
        folder = self.raw_folder()
        missing = self.missing()
        if not missing:
            text = f"found in {folder}"
        elif len(missing) < len(self.files):
            text = f"incomplete in {folder}: {', '.join(missing)} missing"
        else:
            text = f"not in {folder}: fit downloads it, or uses the bundled digits"
        return {"found": not missing, "folder": str(folder), "text": text}

    # Which source is used

    def stay_with(self, data_source: str | None) -> None:
        """Where the source is ``auto``: what it found then, whatever it would find now."""
        if self.source == "auto" and data_source:
            self.data_source = data_source

    def settle_source(self) -> None:
        """Know whether the full set or the bundled digits are used; an error if neither can be."""
        if self.data_source == "sample":
            return
        if self.missing():
            self.do_without()
        elif self.data_source == "auto":
            self.data_source = "mnist"

    def do_without(self, reason: str = "") -> None:
        """Take the bundled digits for missing files, and warn of it.

        Raises:
            UserError: More was asked for: the full set itself, or a folder, whose name may be
                wrong.
        """
        folder = self.raw_folder()
        is_default = self.data_source == "auto" and self.root == DEFAULT_ROOT
        if is_default and self.sample_folder is not None:
            self.data_source = "sample"
            used = "this run uses the 10,000 + 2,000 digits that ship inside the package"
            fix = "For the full set name its folder with --data.root."
            quiet = "To choose these digits without this warning: --data.source sample."
            warnings.warn(
                f"Full MNIST was not found in {folder}{reason}: {used}. {fix} {quiet}",
                stacklevel=2,
            )
            return
        lacks = f"{folder} lacks {', '.join(self.missing())}{reason}"
        fix = "Put the files there (plain or .gz) or name another --data.root"
        if self.sample_folder is not None:
            fix += ", or use --data.source sample for the bundled digits"
        raise UserError(f"--data.root {self.root}: {lacks}. {fix}.") from None

    def check_that_ranks_agree(self) -> None:
        """A UserError if ranks found different data: they would train on two sets."""
        if self.trainer is None:
            return
        strategy = self.trainer.strategy
        first = strategy.broadcast(self.data_source)
        if strategy.reduce_boolean_decision(first == self.data_source):
            return
        found = f"found different data on different ranks (rank 0: {first})"
        fix = "Give all machines the files, or name the source: --data.source mnist or sample."
        raise UserError(f"--data.source auto {found}. {fix}")

    def _download(self) -> None:
        """Torchvision's download, with bounded time-outs, into a folder of its own: no half file in
        the root.
        """
        from torchvision import datasets

        dataset_class = getattr(datasets, self.torchvision_dataset)
        download_into(
            self.raw_folder(),
            self.files,
            lambda scratch: dataset_class(scratch, download=True),
            subfolder=self.folder,
        )


def read_part(folder: Path, part: str, digests: dict[str, str | None]) -> TensorImages:
    """The images and labels of a folder's training ("train") or test files ("t10k"), checked by
    their digests.
    """

    def read(name: str) -> Tensor:
        # Where there is no such file, the error names the plain one.
        path = find_idx(folder, name) or folder / name
        return read_idx(path, digests.get(name))

    images = read(f"{part}-images-idx3-ubyte")
    labels = read(f"{part}-labels-idx1-ubyte")
    if len(images) != len(labels):
        raise UserError(f"{folder}: {len(images)} {part} images but {len(labels)} labels.")
    return TensorImages(images, labels)
