"""Digits of MNIST written to files in ten ways, as people have them: each takes (28, 28) uint8 and
a path's stem.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

Way = Callable[[np.ndarray, Path, np.random.Generator], Path]


def grow(
    digit: np.ndarray, side: int, method: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """float32 (side, side), 0-1."""
    return np.asarray(Image.fromarray(digit).resize((side, side), method), dtype=np.float32) / 255


def paint(
    ink: np.ndarray, background: tuple[int, int, int], colour: tuple[int, int, int]
) -> Image.Image:
    """RGB: ``background`` where ``ink`` is 0, ``colour`` where it is 1."""
    mixed = np.array(background) * (1 - ink[..., None]) + np.array(colour) * ink[..., None]
    return Image.fromarray(mixed.round().astype(np.uint8))


def save(image: Image.Image, stem: Path, ending: str, **options: object) -> Path:
    path = stem.with_suffix(ending)
    image.save(path, **options)
    return path


def as_it_is(digit: np.ndarray, stem: Path, _: np.random.Generator) -> Path:
    return save(Image.fromarray(digit), stem, ".png")


def black_on_white(digit: np.ndarray, stem: Path, _: np.random.Generator) -> Path:
    return save(paint(grow(digit, 280), (255, 255, 255), (0, 0, 0)), stem, ".png")


def grey_jpeg(digit: np.ndarray, stem: Path, _: np.random.Generator) -> Path:
    return save(Image.fromarray(255 - digit).resize((112, 112)), stem, ".jpg", quality=75)


def see_through(digit: np.ndarray, stem: Path, rng: np.random.Generator) -> Path:
    """The digit lives in the alpha channel alone, in white or in black."""
    shade = 255 * int(rng.integers(2))
    rgba = np.full((84, 84, 4), shade, dtype=np.uint8)
    rgba[..., 3] = (grow(digit, 84) * 255).astype(np.uint8)
    return save(Image.fromarray(rgba), stem, ".png")


def sixteen_bit(digit: np.ndarray, stem: Path, _: np.random.Generator) -> Path:
    """A 12-bit camera's values, dark on bright, in a 16-bit file."""
    return save(Image.fromarray((4000 - grow(digit, 56) * 3000).astype(np.uint16)), stem, ".png")


def palette_gif(digit: np.ndarray, stem: Path, _: np.random.Generator) -> Path:
    return save(paint(grow(digit, 140), (250, 220, 60), (30, 30, 160)).quantize(32), stem, ".gif")


def turned_by_exif(digit: np.ndarray, stem: Path, rng: np.random.Generator) -> Path:
    """The pixels lie rotated or mirrored; the EXIF tag says how to put them right."""
    image = paint(grow(digit, 160), (240, 240, 235), (40, 40, 60))
    orientation = int(rng.integers(2, 9))
    # Of each orientation the Image.Transpose that the viewer's own correction cancels.
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    turned = image.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(turned, stem, ".jpg", exif=exif, quality=85)


def off_centre(digit: np.ndarray, stem: Path, rng: np.random.Generator) -> Path:
    """Somewhere in a wide picture, light on dark."""
    side = int(rng.integers(60, 200))
    field = np.zeros((240, 400), dtype=np.float32)
    top = int(rng.integers(240 - side))
    left = int(rng.integers(400 - side))
    field[top : top + side, left : left + side] = grow(digit, side)
    return save(paint(field, (20, 40, 20), (250, 240, 220)), stem, ".webp", quality=80, method=0)


def bilevel_scan(digit: np.ndarray, stem: Path, _: np.random.Generator) -> Path:
    """Black and white only, as NIST's forms were scanned."""
    ink = grow(digit, 168) > 0.5
    return save(Image.fromarray(~ink), stem, ".tif", compression="group4")


def paper_photo(digit: np.ndarray, stem: Path, rng: np.random.Generator) -> Path:
    """Ink on paper under uneven light, with sensor noise; an odd size, the digit in the middle
    third.
    """
    height = 300
    width = 400
    side = 150
    field = np.zeros((height, width), dtype=np.float32)
    field[75 : 75 + side, 120 : 120 + side] = grow(digit, side)
    across = np.linspace(0, 1, width)[None, :]
    down = np.linspace(0, 1, height)[:, None]
    light = 1 - 0.35 * across * rng.uniform(0.5, 1) - 0.1 * down
    photo = (0.9 - 0.7 * field) * light + rng.normal(0, 0.02, field.shape)
    grey = Image.fromarray((photo.clip(0, 1) * 255).astype(np.uint8))
    return save(grey.convert("RGB"), stem, ".jpeg", quality=80)


WAYS: tuple[Way, ...] = (
    as_it_is,
    black_on_white,
    grey_jpeg,
    see_through,
    sixteen_bit,
    palette_gif,
    turned_by_exif,
    off_centre,
    bilevel_scan,
    paper_photo,
)
