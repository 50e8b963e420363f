"""Reads an image file of any format, size and colours."""

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from unbroken.commands.predict.files import FORMATS
from unbroken.errors import BadImage

# Longer sides are reduced to this many pixels. A fiftieth of it still has 40 pixels, and
# 12 megapixels as floats would take 150 MB.
LONGEST_SIDE = 2048


def read_image(path: Path) -> np.ndarray:
    """Pixels of an image file as float32 (height, width, 3) in 0-1, upright by EXIF.

    Of an animation it is the first frame. A side longer than ``LONGEST_SIDE`` is reduced.

    Raises:
        BadImage: where the file holds no image that can be read.
    """
    most = Image.MAX_IMAGE_PIXELS or math.inf
    try:
        Image.init()
        formats = [name for name in FORMATS if name in Image.OPEN]
        with Image.open(path, formats=formats) as image:
            if image.width * image.height > most:
                raise Image.DecompressionBombError
            # A JPEG is then decoded at half its size or less.
            image.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))
            return to_pixels(ImageOps.exif_transpose(image))
    # Pillow's decoders raise whatever they meet: OSError, ValueError, SyntaxError and others.
    except Exception as error:
        raise BadImage(why_unreadable(error, most)) from None


def why_unreadable(error: Exception, most_pixels: float) -> str:
    """The reason for which an image could not be read, in words."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image that can be read"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {most_pixels:,} pixels"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"damaged: {reason}"


def to_pixels(image: Image.Image) -> np.ndarray:
    """A Pillow image of any mode as float32 (height, width, 3) in 0-1."""
    factor = math.ceil(max(image.size) / LONGEST_SIDE)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return deep_grey_to_pixels(image, factor)
    return colours_to_pixels(image, factor)


def deep_grey_to_pixels(image: Image.Image, factor: int) -> np.ndarray:
    """Grey of 16 or 32 bits with its precision; ``convert("L")`` would clip it at 255."""
    grey = np.asarray(image).astype(np.float32)[::factor, ::factor]  # (height, width)
    if not np.isfinite(grey).all():
        raise ValueError("pixels that are not finite numbers")
    if image.mode.startswith("I;16"):
        low = 0.0
        high = 65535.0
    else:
        # "I" and "F" have no fixed white; only contrast matters for what follows.
        low = float(grey.min())
        high = float(grey.max())
    scaled = (grey - low) / max(high - low, 1e-12)
    return np.repeat(scaled[..., None], 3, axis=2)


def colours_to_pixels(image: Image.Image, factor: int) -> np.ndarray:
    """Colours. A transparent image stands on white where what it shows is dark, else on black."""
    pixels = np.asarray(image.convert("RGBA").reduce(factor), dtype=np.float32) / 255
    colours = pixels[..., :3]  # (height, width, 3)
    alpha = pixels[..., 3:]  # (height, width, 1)
    visible = colours * alpha
    brightness = float(visible.sum()) / max(3 * float(alpha.sum()), 1e-12)
    background = 1.0 if brightness < 0.5 else 0.0
    return visible + background * (1 - alpha)
