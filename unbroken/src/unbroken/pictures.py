"""The one way in which a picture of any format, size and colours is read: for training, for a test
and for a prediction. A network that is trained on pictures read in one way is wrong on pictures
read in another.

``predict`` reads this file before torch is imported, so it imports nothing that takes long.
"""

import functools
import math
import multiprocessing
import os
import re
import stat
import struct
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from unbroken.errors import BadImage, printable
from unbroken.lines import write_lines

# The formats of Pillow that are read. Its reader of EPS is not among them: it would start
# Ghostscript, a whole programming language, on a stranger's file.
FORMATS = (
    "PNG",
    "JPEG",
    "GIF",
    "BMP",
    "DIB",
    "TIFF",
    "WEBP",
    "PPM",
    "AVIF",
    "JPEG2000",
    "ICO",
    "TGA",
    "PCX",
    # What telephones write. Pillow reads it with the help of a package.
    "HEIF",
)
HEIF_PACKAGE = "pillow_heif"
HEIF_ENDINGS = (".heic", ".heif")

# Longer sides are reduced to this many pixels. A fiftieth of it still has 40 pixels, and
# 12 megapixels as floats would take 150 MB.
LONGEST_SIDE = 2048
# Bytes of a picture's pixels while it is decoded
MOST_DECODED = 2**29
# A decoder that holds more than a byte for each eight bits
DECODER_BYTES = {"JPEG2000": 4}
# How files begin that are icons, and those PNG files that may stand in them
ICON_MAGIC = b"\0\0\1\0"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# The names of a pipe that was given to this process, as by ``<(cat picture.png)``
GIVEN_PIPE = re.compile("/dev/stdin|/dev/fd/[0-9]+|/proc/self/fd/[0-9]+")
# The number of the tag that says how a camera was held
ORIENTATION = 0x0112


@functools.cache
def image_endings() -> set[str]:
    """The endings of the files that can be read as pictures, such as ``.png``."""
    endings = Image.registered_extensions()
    found = {ending for ending, name in endings.items() if name in FORMATS}
    # A file that only lacks a package is not left out without a word.
    return found | set(HEIF_ENDINGS)


@functools.cache
def readable_formats() -> list[str]:
    """Those of :data:`FORMATS` that are read here."""
    Image.init()
    with suppress(ImportError):
        import_module(HEIF_PACKAGE).register_heif_opener()
    return [name for name in FORMATS if name in Image.OPEN]


def read_picture(path: str | Path) -> Image.Image:
    """A picture file as an 8-bit RGB image of Pillow's: what :func:`read_pixels` gives, rounded.

    Raises:
        BadImage: where the file holds no image that can be read.
    """
    return to_image(read_pixels(path))


def read_pixels(path: str | Path) -> np.ndarray:
    """Pixels of a picture file as float32 (height, width, 3) in 0-1.

    It is turned upright by EXIF, 16 bits are scaled, and what is transparent is blended. Of an
    animation it is the first frame. A side longer than ``LONGEST_SIDE`` is reduced.

    Raises:
        BadImage: where the file holds no image that can be read.
    """
    refuse_what_has_no_end(path)
    most = Image.MAX_IMAGE_PIXELS or math.inf
    try:
        # Pillow decodes an icon as it opens it.
        if pixels_of_icon(path) > most:
            raise Image.DecompressionBombError
        with Image.open(path, formats=readable_formats()) as image:
            if image.width * image.height > most:
                raise Image.DecompressionBombError
            if decoded_bytes(image) > MOST_DECODED:
                raise BadImage(f"more than {MOST_DECODED:,} bytes while it is decoded")
            # A JPEG is then decoded at half its size or less.
            image.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))
            pixels = to_pixels(image)
            say_that_frames_are_left_out(path, image)
            return pixels
    # Pillow's decoders raise whatever they meet: OSError, ValueError, SyntaxError and others.
    except Exception as error:
        reason = why_unreadable(error, most)
        if isinstance(error, Image.UnidentifiedImageError) and lacks_a_package(path):
            reason = "HEIC, which is read once pillow-heif is installed: pip install pillow-heif"
        raise BadImage(reason) from None


def refuse_what_has_no_end(path: str | Path) -> None:
    """A BadImage for what is no ordinary file, such as a named pipe: to open it would wait for
    ever.
    """
    # What is not there, and a folder, are told by who opens them.
    with suppress(OSError, ValueError):
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or GIVEN_PIPE.fullmatch(str(path))):
            raise BadImage("no ordinary file")


def pixels_of_icon(path: str | Path) -> int:
    """The pixels of the largest picture in a file of icons, by that picture's own header; 0 for
    another file. The sizes that the file names for its icons may be others.
    """
    # A pipe is read once.
    if not os.path.isfile(path):
        return 0
    found = 0
    with open(path, "rb") as file:
        start = file.read(6)
        count = int.from_bytes(start[4:], "little") if start.startswith(ICON_MAGIC) else 0
        entries = [file.read(16) for _ in range(count)]
        for entry in entries:
            file.seek(int.from_bytes(entry[12:], "little"))
            head = file.read(24).ljust(24, b"\0")
            if head.startswith(PNG_MAGIC):
                width, height = struct.unpack_from(">II", head, 16)
            else:
                # Below the lines of such a picture stand as many of its mask.
                width, lines = struct.unpack_from("<ii", head, 4)
                height = lines // 2
            found = max(found, abs(width * height))
    return found


def decoded_bytes(image: Image.Image) -> int:
    """How many bytes a picture's pixels take while it is decoded."""
    sample = 4 if image.mode in ("I", "F") else 2 if image.mode.startswith("I;16") else 1
    sample *= DECODER_BYTES.get(image.format or "", 1)
    return image.width * image.height * len(image.getbands()) * sample


def lacks_a_package(path: str | Path) -> bool:
    """Whether a picture is of a kind that is read once a package is installed."""
    is_heif = Path(path).suffix.lower() in HEIF_ENDINGS
    return is_heif and "HEIF" not in readable_formats()


def say_that_frames_are_left_out(path: str | Path, image: Image.Image) -> None:
    """Say once in a process that of a file with several frames the first alone is used. A worker
    of a loader says nothing.
    """
    if Said.of_frames or multiprocessing.parent_process() is not None:
        return
    # Pillow looks at the second frame for it, which may be damaged.
    with suppress(Exception):
        Said.of_frames = bool(getattr(image, "is_animated", False))
    if Said.of_frames:
        write_lines(
            f"{printable(str(path))} has several frames. Of each such file the first alone is"
            " used.",
            sys.stderr,
        )


class Said:
    """What this process has said already."""

    of_frames = False


def why_unreadable(error: Exception, most_pixels: float) -> str:
    """The reason for which an image could not be read, in words."""
    if isinstance(error, BadImage):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image that can be read"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {most_pixels:,} pixels"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"damaged: {reason}"


def as_plain(image: Image.Image) -> Image.Image:
    """A Pillow image of any mode as 8-bit grey or RGB, by the rules of :func:`read_pixels`."""
    is_plain = image.mode in ("L", "RGB") and not image.has_transparency_data
    if is_plain and is_upright(image) and max(image.size) <= LONGEST_SIDE:
        return image
    return to_image(to_pixels(image))


def is_upright(image: Image.Image) -> bool:
    """Whether an image shows what a camera saw, as far as EXIF says."""
    return bool(image.getexif().get(ORIENTATION, 1) == 1)


def to_image(pixels: np.ndarray) -> Image.Image:
    """Pixels (height, width, 3) in 0-1 as an 8-bit RGB image."""
    return Image.fromarray(np.round(pixels * 255).astype(np.uint8))


def to_pixels(image: Image.Image) -> np.ndarray:
    """A Pillow image of any mode as float32 (height, width, 3) in 0-1, upright by EXIF."""
    # Pillow would copy one that is upright.
    if not is_upright(image):
        image = ImageOps.exif_transpose(image)
    factor = math.ceil(max(image.size) / LONGEST_SIDE)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return deep_grey_to_pixels(image, factor)
    return colours_to_pixels(image, factor)


def deep_grey_to_pixels(image: Image.Image, factor: int) -> np.ndarray:
    """Grey of 16 or 32 bits with its precision; ``convert("L")`` would clip it at 255."""
    grey = every_nth(image, factor).astype(np.float32)  # (height, width)
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


def every_nth(image: Image.Image, factor: int) -> np.ndarray:
    """Every ``factor``-th pixel of every ``factor``-th line."""
    if factor == 1:
        return np.asarray(image)
    # Line by line: Pillow makes two copies of what it gives to NumPy.
    lines = [
        np.asarray(image.crop((0, top, image.width, top + 1)))[:, ::factor]
        for top in range(0, image.height, factor)
    ]
    return np.concatenate(lines)


def colours_to_pixels(image: Image.Image, factor: int) -> np.ndarray:
    """Colours. A transparent image stands on white where what it shows is dark, else on black."""
    if not image.has_transparency_data:
        # A large picture that is reduced as RGBA takes a gigabyte.
        opaque = image if image.mode in ("L", "RGB") else image.convert("RGB")
        image, factor = opaque.reduce(factor), 1
    # Pillow would copy one that is RGBA already.
    clear = image if image.mode == "RGBA" else image.convert("RGBA")
    pixels = np.asarray(clear.reduce(factor), dtype=np.float32) / 255
    colours = pixels[..., :3]  # (height, width, 3)
    alpha = pixels[..., 3:]  # (height, width, 1)
    visible = colours * alpha
    brightness = float(visible.sum()) / max(3 * float(alpha.sum()), 1e-12)
    background = 1.0 if brightness < 0.5 else 0.0
    return visible + background * (1 - alpha)
