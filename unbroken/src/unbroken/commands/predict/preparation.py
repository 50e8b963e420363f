"""How a file becomes an input of the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from unbroken import contract
from unbroken.cli.read_checkpoint import Loaded
from unbroken.commands.predict.images import read_image
from unbroken.errors import UserError

DIGITS = [str(digit) for digit in range(10)]


class Preparation(NamedTuple):
    """A way to turn a file into an input."""

    # Returns the input, without a batch dimension, and a note for its row, which is often empty.
    prepare: Callable[[Path], tuple[Any, str]]
    description: str


def choose_preparation(loaded: Loaded) -> Preparation:
    """The way of the data module's ``prepare_file(path)``, else of its ``prepare_image(pixels)``.

    Without either it is the middle of the picture, scaled to the data module's ``image_shape``; of
    the ten digits at 28x28 it is the digit, as their makers prepared it. Images become uint8, or
    float in 0-1.
    """
    data: Any = loaded.datamodule
    owner = "the data module" if data is None else type(data).__name__
    if isinstance(data, contract.PreparesFiles):
        return Preparation(file_preparation(data), f"inputs: {owner}.prepare_file")
    if isinstance(data, contract.PreparesImages):
        return Preparation(image_preparation(data), f"inputs: {owner}.prepare_image")
    if isinstance(data, contract.ShapesImages):
        shape = tuple(data.image_shape)
        if shape == (1, 28, 28) and is_of_digits(data):
            return Preparation(prepare_digit, "inputs: each digit scaled and centred as in MNIST")
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
    """The data module gets the pixels of the picture: float32 (height, width, 3) in 0-1."""
    return lambda path: (data.prepare_image(read_image(path)), "")


def middle_preparation(shape: tuple[int, int, int]) -> Callable[[Path], tuple[Any, str]]:
    """The largest middle part of the picture, scaled to ``shape`` (channels, height, width)."""
    from unbroken.data.images import fit_image

    def prepare(path: Path) -> tuple[Any, str]:
        pixels = np.round(read_image(path) * 255).astype(np.uint8)
        return fit_image(Image.fromarray(pixels), shape), ""

    return prepare


def is_of_digits(data: Any) -> bool:
    """Whether a data module's classes are the ten digits."""
    return isinstance(data, contract.NamesClasses) and data.class_names == DIGITS


def prepare_digit(path: Path) -> tuple[Any, str]:
    """The digit of a picture as MNIST shows it; the note says where there seem to be several."""
    from unbroken.commands.predict.digits import find_digit

    return find_digit(read_image(path))
