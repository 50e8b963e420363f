"""A picture of a digit, prepared the way MNIST was made.

"The original black and white (bilevel) images from NIST were size normalized to fit in a 20x20 pixel box while
preserving their aspect ratio. The resulting images contain grey levels as a result of the anti-aliasing technique.
[They] were centered in a 28x28 image by computing the center of mass of the pixels, and translating the image so as to
position this point at the center of the 28x28 field." (Y. LeCun, http://yann.lecun.com/exdb/mnist)

In MNIST's files the box is drawn around every pixel above zero, and the centre of mass, in pixel indices counted
from 0, rounds to 14 in both directions.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from project.errors import BadImage

FIELD, BOX, CENTRE = 28, 20, 14
LEAST_CONTRAST = 0.04  # between digit and background, of 0-1; below it (about 10 grey levels of 255) an image is empty
LEAST_INK = 0.15  # of full ink, from which a pixel is the digit's: above the ringing of JPEG and of enlargements
# Fraction of full ink at the edge of a digit that is larger than MNIST's. Enlarging and lenses blur the edge to both
# sides: around all of the blur the box would be too large. Enlarged test digits come back closer to the originals:
# pixels are 5.9 to 7.0 of 255 away, not 6.3 to 9.3 (means of 1,000 digits in six kinds of file; 0.3 and 0.5 are no
# better).
EDGE_INK = 0.4
LEAST_PATCH = 0.03  # of the largest patch's ink; what has less is dust. The bar of a broken 5 has more.
GRID = 96  # cells along the longer side, on which patches are told apart


def prepare_digit(pixels: np.ndarray) -> np.ndarray:
    """uint8 (28, 28), bright digit on black, from any picture of one digit. An MNIST image comes out unchanged.

    Args:
        pixels: float32 (height, width, 3) in 0-1, upright and without transparency.

    Raises:
        BadImage: Nothing stands out from the background.
    """
    grey = pixels[..., 0]
    if grey.shape == (FIELD, FIELD) and grey.any() and np.ptp(pixels, axis=2).max() == 0:
        rows, columns = box_around(grey)
        box = grey[rows, columns]
        if max(box.shape) == BOX and (rows.start, columns.start) == _corner(box):  # MNIST's makers made it
            return np.round(grey * 255).astype(np.uint8)
    ink = without_dust(find_ink(pixels))  # (height, width)
    rows, columns = box_around(ink)
    if max(ink[rows, columns].shape) > 1.5 * BOX:
        rows, columns = box_around(np.where(ink > EDGE_INK, ink, 0))
    digit = fit_into_box(ink[rows, columns])
    top, left = _corner(digit)
    field = np.zeros((FIELD, FIELD), dtype=np.uint8)
    field[top : top + digit.shape[0], left : left + digit.shape[1]] = np.round(digit * 255)
    return field


def find_ink(pixels: np.ndarray) -> np.ndarray:
    """How far each pixel is on the way from the background's colour to the digit's: float32 (height, width), 0-1.

    The background is what the picture's edge shows. Measured along the line between the two colours, it does not
    matter which one is brighter, nor that both have the same grey (red on green).
    """
    background, noise = find_background(pixels)
    away = pixels - background  # (height, width, 3)
    squares = np.einsum("hwc,hwc->hw", away, away)
    if squares.max() < LEAST_CONTRAST**2:
        raise BadImage("one plain colour, no digit in it")
    towards = np.einsum("hwc,hw->c", away, squares)  # the strongest pixels say where the digit's colour lies
    ink = np.clip(np.einsum("hwc,c->hw", away, towards / max(float(np.linalg.norm(towards)), 1e-12)), 0, None)
    # not the strongest pixel of all: in a photo that one is noise
    full = float(np.quantile(ink[ink >= ink.max() / 2], 0.9))
    ink = np.clip(ink / max(full, 1e-6), 0, 1)
    return np.where(ink > max(LEAST_INK, 4 * noise / max(full, 1e-6)), ink, 0)


def find_background(pixels: np.ndarray) -> tuple[np.ndarray, float]:
    """The background under the whole picture, (height, width, 3), and its noise, the standard deviation around it.

    A plane through the edge's pixels for each colour: light falls off across a photo of a sheet of paper.
    """
    height, width = pixels.shape[:2]
    thick = max(1, min(height, width) // 50)
    edge = np.ones((height, width), dtype=bool)
    edge[thick:-thick, thick:-thick] = False
    y, x = np.linspace(-1, 1, height, dtype=np.float32), np.linspace(-1, 1, width, dtype=np.float32)
    rows, columns = np.nonzero(edge)
    at, values = np.stack([np.ones(len(rows)), y[rows], x[columns]], axis=1), pixels[edge]  # (count, 3) both
    residual = np.abs(values - np.median(values, axis=0)).max(axis=1)
    for _ in range(3):  # without the ink of a digit that touches the edge
        usual = residual <= max(3 * float(np.median(residual)), 1 / 255)
        # einsum and a system of 3 equations: threads of a matrix library would cost more than they save
        squares = np.einsum("ni,nj->ij", at[usual], at[usual])
        plane = np.linalg.lstsq(squares, np.einsum("ni,nc->ic", at[usual], values[usual]), rcond=None)[0]
        residual = np.abs(values - np.einsum("ni,ic->nc", at, plane)).max(axis=1)  # plane: (coefficient, colour)
    level, down, across = plane.astype(np.float32)
    background = level + y[:, None, None] * down + x[None, :, None] * across
    return background, float(residual[usual].std())


def without_dust(ink: np.ndarray) -> np.ndarray:
    """The ink without patches that are too small to be a part of the digit; one spot of dust would stretch the box."""
    height, width = ink.shape
    cell = -(-max(height, width) // GRID)
    padded = np.pad(ink, ((0, -height % cell), (0, -width % cell)))
    cells = padded.reshape(padded.shape[0] // cell, cell, padded.shape[1] // cell, cell).sum(axis=(1, 3))
    left, patches = set(map(tuple, np.argwhere(cells).tolist())), []
    while left:  # cells above 0 that hang together, corners included
        patch = [left.pop()]
        for row, column in patch:  # grows while it is walked through
            around = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= around
            patch.extend(around)
        patches.append((sum(cells[at] for at in patch), patch))
    heaviest, keep = max((weight for weight, _ in patches), default=0), np.zeros(cells.shape, dtype=bool)
    for weight, patch in patches:
        keep[tuple(np.transpose(patch))] = weight >= LEAST_PATCH * heaviest
    return np.where(keep.repeat(cell, axis=0).repeat(cell, axis=1)[:height, :width], ink, 0)


def box_around(ink: np.ndarray) -> tuple[slice, slice]:
    """Rows and columns of the smallest box around every pixel above 0.

    Raises:
        BadImage: There is none.
    """
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    if not len(rows):
        raise BadImage("no digit in it")
    return slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)


def fit_into_box(ink: np.ndarray) -> np.ndarray:
    """The cut-out digit scaled, with its aspect ratio, so that its longer side is 20 pixels; float32, anti-aliased."""
    height, width = ink.shape
    scale = BOX / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    # of Pillow's filters the one that brings enlarged test digits back closest to the originals
    small = np.asarray(Image.fromarray(ink.astype(np.float32)).resize(size, Image.Resampling.HAMMING))
    return np.clip(small / max(float(small.max()), 1e-6), 0, 1)


def _corner(digit: np.ndarray) -> tuple[int, int]:
    """Row and column in the field of the digit's upper left corner; inside it wherever the digit's weight lies."""
    height, width = digit.shape
    mass = max(float(digit.sum()), 1e-6)
    row = float(digit.sum(axis=1) @ np.arange(height)) / mass
    column = float(digit.sum(axis=0) @ np.arange(width)) / mass
    top, left = round(CENTRE - row), round(CENTRE - column)
    return min(max(top, 0), FIELD - height), min(max(left, 0), FIELD - width)
