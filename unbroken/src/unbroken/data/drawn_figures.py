"""A figure that somebody drew or wrote, found in a picture and shown as sets of 28 × 28 pixels show
theirs.

Such sets are made from black and white images that "were size normalized to fit in a 20x20 pixel
box while preserving their aspect ratio", with anti-aliasing, and then centred in 28x28 pixels by
their centre of mass (http://yann.lecun.com/exdb/mnist). In the files the box is drawn around every
pixel above 0, and the centre of mass, in indices from 0, rounds to 14.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter
from unbroken.errors import BadImage

# The sizes of such a set, in pixels.
FIELD = 28
BOX = 20
CENTRE = 14

# The least contrast between figure and background, of 0-1. Below it, which is about 10 grey levels
# of 255, a picture is empty.
LEAST_CONTRAST = 0.04

# The share of full ink from which a pixel is the figure's. The ringing of JPEG and of enlargements
# is below.
LEAST_INK = 0.15

# The share of full ink at the edge of a figure that is larger than the set's, whose blur would
# widen the box. Enlarged test images come back 5.9 to 7.0 grey levels of 255 from the originals,
# instead of 6.3 to 9.3; 0.3 and 0.5 are no better.
EDGE_INK = 0.4

# The mean of a clear picture's ink. It is at least 0.58 on one colour, mostly less in photographs.
CLEAR = 0.56

# The share that a figure fills of a picture that is cut close around it. Lines on paper fill less.
LEAST_FILLED = 0.12

# How much of its picture's height and width a figure takes that is cut out closely.
CUT_CLOSE = 0.75

# The standard deviation of a noisy background, of 0-1.
MUCH_NOISE = 0.04

# The share of full ink in a photograph below which there is only noise, and what lines leave.
LEAST_IN_PHOTO = 0.3

# The share of the largest patch's ink below which a patch is dust. The bar of a broken 5 has more.
LEAST_PATCH = 0.03

# Pixels along the longer side of a reduced photograph.
PHOTO = 256

# Cells along the longer side of the grid on which patches are told apart.
GRID = 96

# Cells that the largest patch of a photograph measures. The largest of mere noise is smaller.
LEAST_CELLS = 5


class Patch(NamedTuple):
    """The box around ink that hangs together, in cells of a coarse grid; bottom and right are
    outside.
    """

    top: int
    left: int
    bottom: int
    right: int

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def width(self) -> int:
        return self.right - self.left


def find_figure(pixels: np.ndarray, what: str = "figure") -> tuple[np.ndarray, str]:
    """The figure of a picture, as sets of 28 × 28 pixels show theirs.

    It may be dark on light or light on dark, of any size and colour, also in a photograph.

    Args:
        pixels: The picture, float32 (height, width, 3) in 0-1. An image of such a set comes out
            unchanged.
        what: The word for a figure in the note, such as ``digit``.

    Returns:
        The figure, uint8 (1, 28, 28), bright on black; and a note where there seem to be several
        figures, which the image then shows.

    Raises:
        BadImage: Nothing stands out from the background.
    """
    if is_of_such_a_set(pixels):
        return np.round(pixels[..., 0] * 255).astype(np.uint8)[None], ""
    ink, patches = find_patches(pixels)
    rows, columns = box_around(ink)
    if max(ink[rows, columns].shape) > 1.5 * BOX:
        rows, columns = box_around(np.where(ink > EDGE_INK, ink, 0))
    figure = scaled_to_box(ink[rows, columns])
    top, left = corner_in_field(figure)
    height, width = figure.shape
    field = np.zeros((FIELD, FIELD), dtype=np.uint8)
    field[top : top + height, left : left + width] = np.round(figure * 255)
    note = f"more than one {what}" if are_several(patches) else ""
    return field[None], note


def is_of_such_a_set(pixels: np.ndarray) -> bool:
    """Whether a picture is of such a set already: it is grey, of that size, and its figure is where
    the set's makers put it.
    """
    grey = pixels[..., 0]
    is_grey = np.ptp(pixels, axis=2).max() == 0
    if grey.shape != (FIELD, FIELD) or not grey.any() or not is_grey:
        return False
    rows, columns = box_around(grey)
    figure = grey[rows, columns]
    return max(figure.shape) == BOX and (rows.start, columns.start) == corner_in_field(figure)


def find_patches(pixels: np.ndarray) -> tuple[np.ndarray, list[Patch]]:
    """The ink of a picture, (height, width) in 0-1, without dust; and the patches that it is made
    of.
    """
    background, noise = edge_colour(pixels)
    ink, patches = without_dust(find_ink(pixels - background, noise))
    shorter, longer = sorted(ink.shape)
    may_be_photo = shorter > 2 * FIELD and longer < 3 * shorter
    if not may_be_photo or not is_unclear(ink, noise):
        return ink, patches
    ink, patches = without_dust(find_ink_in_photo(pixels))
    largest = max((max(patch.height, patch.width) for patch in patches), default=0)
    if largest < LEAST_CELLS:
        raise BadImage("nothing in it stands out like a drawn figure")
    return ink, patches


def scaled_to_box(ink: np.ndarray) -> np.ndarray:
    """The figure, so large that its longer side is :data:`BOX`, and with 1 as its strongest ink.

    Takes the ink inside its box, (height, width) in 0-1; returns float32 in 0-1.
    """
    cut = ink.astype(np.float32)
    height, width = cut.shape
    longer = max(cut.shape)
    size = (max(1, round(width * BOX / longer)), max(1, round(height * BOX / longer)))
    # Of Pillow's filters this one brings enlarged test images back closest to the originals.
    figure = np.asarray(Image.fromarray(cut).resize(size, Image.Resampling.HAMMING))
    strongest = max(float(figure.max()), 1e-6)
    return np.clip(figure / strongest, 0, 1)


def are_several(patches: list[Patch]) -> bool:
    """Whether a picture seems to show several figures: tall ones side by side, or a wide one."""
    tallest = max((patch.height for patch in patches), default=1)
    tall = sorted((patch.left, patch.right) for patch in patches if patch.height > 0.6 * tallest)
    for (_, right_of_one), (left_of_next, _) in itertools.pairwise(tall):
        if left_of_next >= right_of_one:
            return True
    return any(patch.width > 1.7 * patch.height for patch in patches)


def is_unclear(ink: np.ndarray, noise: float) -> bool:
    """Whether more than a figure, or nothing, seems to be left of a picture without its background.

    What is too much is noise, or grey from lines or light, or ink at the edge of a picture that is
    not cut close around its figure.

    Args:
        ink: (height, width) in 0-1.
        noise: Standard deviation of the background that was taken away.
    """
    if noise > MUCH_NOISE or not ink.any():
        return True
    if ink[ink > 0].mean() < CLEAR:
        return True
    strong = box_around(np.where(ink > EDGE_INK, ink, 0))
    figure = ink[strong] > EDGE_INK
    of_height = figure.shape[0] / ink.shape[0]
    of_width = figure.shape[1] / ink.shape[1]
    is_cut_close = min(of_height, of_width) > CUT_CLOSE and figure.mean() > LEAST_FILLED
    touches_the_edge = bool(ink[[0, -1]].any() or ink[:, [0, -1]].any())
    return touches_the_edge and not is_cut_close


def find_ink(away: np.ndarray, noise: float) -> np.ndarray:
    """How far each pixel is on the line from the background's colour to the figure's.

    Either may be the brighter one, or both have the same grey (red on green).

    Args:
        away: The picture without its background, (height, width, 3).
        noise: Standard deviation of the background.

    Returns:
        float32 (height, width) in 0-1.

    Raises:
        BadImage: The picture is of one colour.
    """
    squares = np.einsum("hwc,hwc->hw", away, away)
    if squares.max() < LEAST_CONTRAST**2:
        raise BadImage("one plain colour, nothing drawn in it")
    # The strongest pixels say where the figure's colour lies.
    towards = np.einsum("hwc,hw->c", away, squares)
    direction = towards / max(float(np.linalg.norm(towards)), 1e-12)
    ink = np.clip(np.einsum("hwc,c->hw", away, direction), 0, None)
    # Full ink is not the strongest pixel, which in a photograph is noise.
    strong = ink[ink >= ink.max() / 2]
    full = max(float(np.quantile(strong, 0.9)), 1e-6)
    ink = np.clip(ink / full, 0, 1)
    least = max(LEAST_INK, 4 * noise / full)
    return np.where(ink > least, ink, 0)


def find_ink_in_photo(pixels: np.ndarray) -> np.ndarray:
    """The ink on paper under uneven light, without the lines of the paper.

    The background is the median of each place's surroundings, which keeps a shadow's edge and
    ignores a pen's stroke.

    Args:
        pixels: float32 (height, width, 3) in 0-1.

    Returns:
        float32 (height, width) in 0-1, reduced to at most PHOTO pixels along the longer side.
    """
    photo = Image.fromarray(np.round(pixels * 255).astype(np.uint8))
    # A mean of pixels has less noise than each of them.
    photo.thumbnail((PHOTO, PHOTO), Image.Resampling.BOX)
    small = photo.copy()
    small.thumbnail((GRID, GRID), Image.Resampling.BOX)
    window = 2 * (min(small.size) // 5) + 1
    small = small.filter(ImageFilter.MedianFilter(window))
    light = np.asarray(small.resize(photo.size, Image.Resampling.BILINEAR), dtype=np.float32) / 255
    brightness = light.mean(axis=2, keepdims=True) + 0.05
    away = (np.asarray(photo, dtype=np.float32) / 255 - light) / brightness
    noise = 1.5 * float(np.median(np.abs(away)))
    ink = without_lines(find_ink(away, noise))
    return np.where(ink > LEAST_IN_PHOTO, ink, 0)


def without_lines(ink: np.ndarray) -> np.ndarray:
    """The ink without the lines of ruled or squared paper, turned so that these are level."""
    # 0 comes first, so that a picture without lines is not turned.
    angles = [0.0, *np.arange(-12, 12.1, 0.5)]
    best = max(angles, key=lambda angle: levelness(turned(ink, angle)))
    level = turned(ink, best)
    # First the level lines, then, with rows and columns exchanged, those that stand upright.
    for _ in range(2):
        line = line_profile(level)
        above = np.roll(line, 1)
        below = np.roll(line, -1)
        line = np.maximum(line, np.maximum(above, below))
        level = np.where(level > 1.6 * line[:, None], level, 0).T
    return level


def turned(ink: np.ndarray, angle: float) -> np.ndarray:
    """The ink turned by an angle in degrees, without the corners that turning leaves empty."""
    picture = Image.fromarray(ink)
    lost = abs(math.tan(math.radians(angle))) / 2
    across = int(lost * picture.height)
    down = int(lost * picture.width)
    box = (across, down, picture.width - across, picture.height - down)
    return np.asarray(picture.rotate(angle, Image.Resampling.BILINEAR).crop(box))


def levelness(ink: np.ndarray) -> float:
    """How strong the level lines of a picture are."""
    return float((line_profile(ink) ** 2).mean())


def line_profile(ink: np.ndarray) -> np.ndarray:
    """How dark a line is that crosses the picture in each row, (height,); 0 where there is none."""
    third = max(1, ink.shape[1] // 3)
    on_the_left = np.median(ink[:, :third], axis=1)
    on_the_right = np.median(ink[:, -third:], axis=1)
    return np.minimum(on_the_left, on_the_right)


def edge_colour(pixels: np.ndarray) -> tuple[np.ndarray, float]:
    """The colour of a picture's edge, (3,), and its noise, a standard deviation.

    Light that falls off is noise, too.
    """
    thick = max(1, min(pixels.shape[:2]) // 50)
    sides = [pixels[:thick], pixels[-thick:], pixels[:, :thick], pixels[:, -thick:]]
    edge = np.concatenate([side.reshape(-1, 3) for side in sides])
    colour = np.median(edge, axis=0)
    away = np.abs(edge - colour).max(axis=1)
    # Without the ink of a figure that touches the edge.
    usual = away <= max(3 * float(np.median(away)), 1 / 255)
    return colour, float(away[usual].std())


def without_dust(ink: np.ndarray) -> tuple[np.ndarray, list[Patch]]:
    """The ink without patches that are too small for a part of the figure, as dust is, and the
    patches that are left.

    One spot of dust would stretch the box.
    """
    height, width = ink.shape
    cell = -(-max(height, width) // GRID)  # pixels along its side, rounded up
    # The sum of the ink in each cell.
    rows = np.add.reduceat(ink, range(0, height, cell))
    cells = np.add.reduceat(rows, range(0, width, cell), axis=1)

    patches = [np.array(patch) for patch in connected_cells(cells)]  # each (count, 2)
    weights = [sum(cells[row, column] for row, column in patch) for patch in patches]
    heaviest = max(weights, default=0)
    keep = np.zeros(cells.shape, dtype=bool)
    boxes = []
    for patch, weight in zip(patches, weights, strict=True):
        if weight < LEAST_PATCH * heaviest:
            continue
        keep[patch[:, 0], patch[:, 1]] = True
        top, left = patch.min(axis=0).tolist()
        bottom, right = (patch.max(axis=0) + 1).tolist()
        boxes.append(Patch(top, left, bottom, right))
    keep_pixels = keep.repeat(cell, axis=0).repeat(cell, axis=1)[:height, :width]
    return np.where(keep_pixels, ink, 0), boxes


def connected_cells(cells: np.ndarray) -> list[list[tuple[int, int]]]:
    """The cells above 0, (row, column) each, in lists of those that hang together, corners
    included.
    """
    left = {(row, column) for row, column in np.argwhere(cells).tolist()}
    patches = []
    while left:
        patch = [left.pop()]
        for row, column in patch:  # the list grows while it is walked through
            around = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= around
            patch.extend(around)
        patches.append(patch)
    return patches


def box_around(ink: np.ndarray) -> tuple[slice, slice]:
    """Rows and columns of the smallest box around every pixel above 0; BadImage where there is
    none.
    """
    box = Image.fromarray(ink > 0).getbbox()
    if box is None:
        raise BadImage("nothing drawn in it")
    left, top, right, bottom = box
    return slice(top, bottom), slice(left, right)


def corner_in_field(figure: np.ndarray) -> tuple[int, int]:
    """Row and column of the figure's upper left corner in the field, where its centre of mass is
    in the middle.

    The figure stays inside the field, wherever its weight lies.
    """
    mass = max(float(figure.sum()), 1e-6)
    height, width = figure.shape
    row = float(figure.sum(axis=1) @ np.arange(height)) / mass
    column = float(figure.sum(axis=0) @ np.arange(width)) / mass
    top = min(max(round(CENTRE - row), 0), FIELD - height)
    left = min(max(round(CENTRE - column), 0), FIELD - width)
    return top, left
