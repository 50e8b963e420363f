"""How a file becomes an input of the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from unbroken import contract
from unbroken.cli.read_checkpoint import Loaded
from unbroken.errors import UserError
from unbroken.pictures import read_picture, read_pixels


class Preparation(NamedTuple):
    """A way to turn a file into an input."""

    # Returns the input, without a batch dimension, and a note for its row, which is often empty.
    prepare: Callable[[Path], tuple[Any, str]]
    description: str


def choose_preparation(loaded: Loaded) -> Preparation:
    """The way of the data module's ``prepare_file(path)``, else of its ``prepare_image(pixels)``.

    Without either it is the middle of the picture, scaled to the data module's ``image_shape``.
    Images become uint8, or float in 0-1.
    """
    data: Any = loaded.datamodule
    owner = "the data module" if data is None else type(data).__name__
    if isinstance(data, contract.PreparesFiles):
        return Preparation(file_preparation(data), f"inputs: {owner}.prepare_file")
    if isinstance(data, contract.PreparesImages):
        return Preparation(image_preparation(data), f"inputs: {owner}.prepare_image")
    if isinstance(data, contract.ShapesImages):
        shape = tuple(data.image_shape)
        if len(shape) == 3 and shape[0] in (1, 3):
            size = " x ".join(str(side) for side in shape)
            description = f"inputs: the largest middle part of each picture, scaled to {size}"
            return Preparation(middle_preparation(data.image_shape), description)
    raise UserError(
        f"predict does not know how a file becomes an input of {type(loaded.module).__name__}. "
        f"Give {owner} a method prepare_file(path) that returns the input as a tensor, "
        "without a batch dimension."
    )


def file_preparation(data: contract.PreparesFiles) -> Callable[[Path], tuple[Any, str]]:
    """The data module reads the file itself."""
    return lambda path: (data.prepare_file(path), "")


def image_preparation(data: contract.PreparesImages) -> Callable[[Path], tuple[Any, str]]:
    """The data module gets the pixels of the picture: float32 (height, width, 3) in 0-1.

    It may have something to say of the picture.
    """

    def prepare(path: Path) -> tuple[Any, str]:
        prepared = data.prepare_image(read_pixels(path))
        return prepared if isinstance(prepared, tuple) else (prepared, "")

    return prepare


def middle_preparation(shape: tuple[int, int, int]) -> Callable[[Path], tuple[Any, str]]:
    """The largest middle part of the picture, scaled to ``shape`` (channels, height, width)."""
    from unbroken.data.images import fit_image

    def prepare(path: Path) -> tuple[Any, str]:
        return fit_image(read_picture(path), shape), ""

    return prepare
