"""A picture of a digit, prepared the way MNIST was made.

NIST's black and white images "were size normalized to fit in a 20x20 pixel box while preserving their aspect ratio",
with anti-aliasing, and then centred in 28x28 pixels by their centre of mass (http://yann.lecun.com/exdb/mnist). In the
files the box is drawn around every pixel above 0, and the centre of mass, in indices from 0, rounds to 14.
"""

import itertools
import math

import numpy as np
from PIL import Image, ImageFilter

from project.errors import BadImage

FIELD, BOX, CENTRE = 28, 20, 14
LEAST_CONTRAST = 0.04  # between digit and background, of 0-1; below it (about 10 grey levels of 255) an image is empty
LEAST_INK = 0.15  # of full ink, from which a pixel is the digit's: above the ringing of JPEG and of enlargements
# Of full ink, at the edge of a digit that is larger than MNIST's, whose blur would widen the box. Enlarged test digits
# come back 5.9 to 7.0 grey levels of 255 from the originals, instead of 6.3 to 9.3; 0.3 and 0.5 are no better.
EDGE_INK = 0.4
CLEAR = (
    0.56  # mean of a clear picture's ink: at least 0.58 on one colour, mostly less in photographs
)
LEAST_FILLED = 0.12  # of a picture that is cut close around a digit; lines on paper fill less
MUCH_NOISE = 0.04  # standard deviation of the background, of 0-1
LEAST_IN_PHOTO = 0.3  # of full ink: a photograph's noise and what its lines leave is below
LEAST_PATCH = (
    0.03  # of the largest patch's ink; what has less is dust. The bar of a broken 5 has more.
)
PHOTO = 256  # pixels along the longer side of a reduced photograph
GRID = 96  # cells along the longer side, on which patches are told apart
LEAST_CELLS = (
    5  # that the largest patch of a photograph measures; the largest of mere noise is smaller
)


def find_digit(pixels: np.ndarray) -> tuple[np.ndarray, str]:
    """The digit of a picture as MNIST shows it, uint8 (1, 28, 28), bright on black; and a note where there seem to be
    several, which the image then shows. The picture is float32 (height, width, 3) in 0-1. An MNIST image comes out
    unchanged. BadImage where nothing stands out from the background.
    """
    grey = pixels[..., 0]
    if grey.shape == (FIELD, FIELD) and grey.any() and np.ptp(pixels, axis=2).max() == 0:
        rows, columns = box_around(grey)
        box = grey[rows, columns]
        if max(box.shape) == BOX and (rows.start, columns.start) == _corner(
            box
        ):  # MNIST's makers made it
            return np.round(grey * 255).astype(np.uint8)[None], ""
    background, noise = edge_colour(pixels)
    ink, parts = without_dust(find_ink(pixels - background, noise))  # (height, width)
    shorter, longer = sorted(ink.shape)
    if shorter > 2 * FIELD and longer < 3 * shorter and is_unclear(ink, noise):
        ink, parts = without_dust(find_ink_in_photo(pixels))
        if (
            max((max(bottom - top, right - left) for top, left, bottom, right in parts), default=0)
            < LEAST_CELLS
        ):
            raise BadImage("nothing in it stands out like a digit")
    rows, columns = box_around(ink)
    if max(ink[rows, columns].shape) > 1.5 * BOX:
        rows, columns = box_around(np.where(ink > EDGE_INK, ink, 0))
    cut = ink[rows, columns].astype(np.float32)
    width, height = (max(1, round(side * BOX / max(cut.shape))) for side in reversed(cut.shape))
    # of Pillow's filters the one that brings enlarged test digits back closest to the originals
    digit = np.asarray(Image.fromarray(cut).resize((width, height), Image.Resampling.HAMMING))
    digit = np.clip(digit / max(float(digit.max()), 1e-6), 0, 1)
    top, left = _corner(digit)
    field = np.zeros((FIELD, FIELD), dtype=np.uint8)
    field[top : top + digit.shape[0], left : left + digit.shape[1]] = np.round(digit * 255)
    tallest = max(
        (bottom - top for top, _, bottom, _ in parts), default=1
    )  # several digits stand side by side
    high = sorted(
        (left, right) for top, left, bottom, right in parts if bottom - top > 0.6 * tallest
    )
    several = any(left >= before for (_, before), (left, _) in itertools.pairwise(high))
    several = several or any(
        right - left > 1.7 * (bottom - top) for top, left, bottom, right in parts
    )
    return field[None], "more than one digit" if several else ""


def is_unclear(ink: np.ndarray, noise: float) -> bool:
    """Whether more than a digit, or nothing, seems to be left of a picture without its background of a given noise.
    Much is noise, or grey (lines, light); or there is ink at the edge of a picture that is not cut close around it.
    """
    if noise > MUCH_NOISE or not ink.any() or ink[ink > 0].mean() < CLEAR:
        return True
    box = ink[box_around(np.where(ink > EDGE_INK, ink, 0))] > EDGE_INK
    fills = (
        min(box.shape[0] / ink.shape[0], box.shape[1] / ink.shape[1]) > 0.75
        and box.mean() > LEAST_FILLED
    )
    return not fills and bool(ink[[0, -1]].any() or ink[:, [0, -1]].any())


def find_ink(away: np.ndarray, noise: float) -> np.ndarray:
    """How far each pixel is on the line from the background's colour to the digit's: float32 (height, width), 0-1.
    Either may be the brighter one, or both have the same grey (red on green). ``away``: the picture without its
    background, (height, width, 3); ``noise``: the background's standard deviation.
    """
    squares = np.einsum("hwc,hwc->hw", away, away)
    if squares.max() < LEAST_CONTRAST**2:
        raise BadImage("one plain colour, no digit in it")
    towards = np.einsum(
        "hwc,hw->c", away, squares
    )  # the strongest pixels say where the digit's colour lies
    ink = np.clip(
        np.einsum("hwc,c->hw", away, towards / max(float(np.linalg.norm(towards)), 1e-12)), 0, None
    )
    full = float(
        np.quantile(ink[ink >= ink.max() / 2], 0.9)
    )  # not the strongest pixel: in a photo it is noise
    ink = np.clip(ink / max(full, 1e-6), 0, 1)
    return np.where(ink > max(LEAST_INK, 4 * noise / max(full, 1e-6)), ink, 0)


def find_ink_in_photo(pixels: np.ndarray) -> np.ndarray:
    """The ink on paper under uneven light, without the lines of the paper: float32 (height, width), at most PHOTO long.
    The background is the median of each place's surroundings, which keeps a shadow's edge and ignores a pen's stroke.
    """
    photo = Image.fromarray(np.round(pixels * 255).astype(np.uint8))
    photo.thumbnail(
        (PHOTO, PHOTO), Image.Resampling.BOX
    )  # a mean of pixels has less noise than each
    small = photo.copy()
    small.thumbnail((GRID, GRID), Image.Resampling.BOX)
    small = small.filter(ImageFilter.MedianFilter(2 * (min(small.size) // 5) + 1))
    light = np.asarray(small.resize(photo.size, Image.Resampling.BILINEAR), dtype=np.float32) / 255
    away = (np.asarray(photo, dtype=np.float32) / 255 - light) / (
        light.mean(axis=2, keepdims=True) + 0.05
    )
    noise = 1.5 * float(np.median(np.abs(away)))
    ink = without_lines(find_ink(away, noise))
    return np.where(ink > LEAST_IN_PHOTO, ink, 0)


def without_lines(ink: np.ndarray) -> np.ndarray:
    """The ink without the lines of ruled or squared paper, turned so that these are level."""
    picture = Image.fromarray(ink)

    def turned(angle: float) -> np.ndarray:  # without the corners that turning leaves empty
        lost = abs(math.tan(math.radians(angle))) / 2
        across, down = int(lost * picture.height), int(lost * picture.width)
        box = (across, down, picture.width - across, picture.height - down)
        return np.asarray(picture.rotate(angle, Image.Resampling.BILINEAR).crop(box))

    angles = (0.0, *np.arange(-12, 12.1, 0.5))  # 0 first: without lines nothing is turned
    level = turned(max(angles, key=lambda angle: float((line_profile(turned(angle)) ** 2).mean())))
    for _ in range(2):
        line = line_profile(level)
        line = np.maximum(line, np.maximum(np.roll(line, 1), np.roll(line, -1)))
        level = np.where(level > 1.6 * line[:, None], level, 0).T
    return level


def line_profile(ink: np.ndarray) -> np.ndarray:
    """How dark a line is that crosses the picture in each row, (height,); 0 where there is none."""
    third = max(1, ink.shape[1] // 3)
    return np.minimum(np.median(ink[:, :third], axis=1), np.median(ink[:, -third:], axis=1))


def edge_colour(pixels: np.ndarray) -> tuple[np.ndarray, float]:
    """The colour of a picture's edge, (3,), and its noise, a standard deviation. Light that falls off is noise, too."""
    thick = max(1, min(pixels.shape[:2]) // 50)
    sides = [pixels[:thick], pixels[-thick:], pixels[:, :thick], pixels[:, -thick:]]
    edge = np.concatenate([side.reshape(-1, 3) for side in sides])
    colour = np.median(edge, axis=0)
    away = np.abs(edge - colour).max(axis=1)
    usual = away <= max(
        3 * float(np.median(away)), 1 / 255
    )  # without the ink of a digit that touches the edge
    return colour, float(away[usual].std())


def without_dust(ink: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """The ink without patches that are too small for a part of the digit, as dust is; one spot would stretch the box.
    And the patches that are left: (top, left, bottom, right) of each, in cells of a coarse grid.
    """
    height, width = ink.shape
    cell = -(-max(height, width) // GRID)
    cells = np.add.reduceat(
        np.add.reduceat(ink, range(0, height, cell)), range(0, width, cell), axis=1
    )
    left, patches = set(map(tuple, np.argwhere(cells).tolist())), []
    while left:  # cells above 0 that hang together, corners included
        patch = [left.pop()]
        for row, column in patch:  # grows while it is walked through
            around = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= around
            patch.extend(around)
        patches.append((sum(cells[at] for at in patch), patch))
    heaviest, keep = (
        max((weight for weight, _ in patches), default=0),
        np.zeros(cells.shape, dtype=bool),
    )
    parts = [np.array(patch) for weight, patch in patches if weight >= LEAST_PATCH * heaviest]
    for part in parts:
        keep[tuple(part.T)] = True
    kept = np.where(keep.repeat(cell, axis=0).repeat(cell, axis=1)[:height, :width], ink, 0)
    return kept, [np.concatenate([part.min(axis=0), part.max(axis=0) + 1]) for part in parts]


def box_around(ink: np.ndarray) -> tuple[slice, slice]:
    """Rows and columns of the smallest box around every pixel above 0; BadImage where there is none."""
    if (box := Image.fromarray(ink > 0).getbbox()) is None:
        raise BadImage("no digit in it")
    return slice(box[1], box[3]), slice(box[0], box[2])


def _corner(digit: np.ndarray) -> tuple[int, int]:
    """Row and column in the field of the digit's upper left corner; inside it wherever the digit's weight lies."""
    mass = max(float(digit.sum()), 1e-6)
    centre = [
        float(digit.sum(axis=1 - axis) @ np.arange(size)) / mass
        for axis, size in enumerate(digit.shape)
    ]
    top, left = (
        min(max(round(CENTRE - at), 0), FIELD - n)
        for at, n in zip(centre, digit.shape, strict=True)
    )
    return top, left
