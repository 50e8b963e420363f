"""Image files as people have them: found from files, folders and globs, and read into one kind of array.

Only Pillow's raster decoders are allowed. Its EPS reader would start Ghostscript on a stranger's file.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from project.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "AVIF", "JPEG2000", "ICO", "TGA", "PCX")
# A 12-megapixel photo as floats takes 150 MB. A digit that fills a fiftieth of it is still 40 pixels high at this size.
LONGEST_SIDE = 2048


class BadImage(Exception):
    """A file that holds no usable image. The message is the reason, without the file's name."""


def find_images(arguments: Iterable[str]) -> list[Path]:
    """Files meant by the command line's words: files, folders (and what is below them) and globs, each file once.

    A file that was named is returned whatever its ending, so that it can be reported when it is no image; of a folder
    only files with an image's ending are taken, hidden ones not.

    Raises:
        UserError: A folder without images, a glob that matches nothing, a name that does not exist.
    """
    found: dict[Path, None] = {}
    for argument in arguments:
        path = Path(argument).expanduser()
        if path.is_dir():
            paths = _images_below(path)
            if not paths:
                raise UserError(f"IMAGE {argument} is a folder without image files ({' '.join(sorted(_endings()))}).")
        elif path.exists() or not glob.has_magic(argument):
            paths = [path]  # a missing file is reported with the bad ones: the others are still worth reading
        else:
            paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            if not paths:
                raise UserError(f"IMAGE {argument} matches no file. Check the folder, or name the files.")
            paths = [file for match in paths for file in (_images_below(match) if match.is_dir() else [match])]
        found.update(dict.fromkeys(paths))
    return list(found)


def _images_below(folder: Path) -> list[Path]:
    endings = _endings()
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in endings and path.is_file() and not path.name.startswith(".")
    )


def _endings() -> set[str]:
    from PIL import Image

    Image.init()
    return {ending for ending, name in Image.registered_extensions().items() if name in FORMATS}


def read_image(path: Path) -> np.ndarray:
    """Pixels of an image file as float32 (height, width, 3) in 0-1, upright, transparency filled in.

    The first frame of an animation is taken, EXIF rotation is applied, 16-bit grey keeps its precision. Transparent
    images stand on white where what they show is dark and on black where it is bright, whichever makes it visible.
    An image of more than ``LONGEST_SIDE`` pixels is reduced.

    Raises:
        BadImage: The file is missing, is no image, is damaged, or claims more pixels than Pillow's limit.
    """
    from PIL import Image, ImageOps

    try:
        Image.init()
        with Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or 0):
                raise BadImage(f"{image.width} x {image.height} pixels: more than {Image.MAX_IMAGE_PIXELS:,}")
            image.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))  # lets a JPEG decode at half size or less
            pixels = _to_array(ImageOps.exif_transpose(image))
    except BadImage:
        raise
    except FileNotFoundError:
        raise BadImage("no such file") from None
    except IsADirectoryError:
        raise BadImage("a folder, not a file") from None
    except Image.UnidentifiedImageError:
        raise BadImage("not an image that can be read") from None
    except Image.DecompressionBombError:
        raise BadImage(f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels") from None
    except (
        Exception
    ) as error:  # Pillow's decoders raise whatever they stumble over: OSError, ValueError, SyntaxError ...
        raise BadImage(f"damaged: {' '.join(str(error).split()) or type(error).__name__}") from None
    return pixels


def _to_array(image: Image.Image) -> np.ndarray:
    """float32 (height, width, 3) in 0-1 of an upright Pillow image of any mode."""
    factor = -(-max(image.size) // LONGEST_SIDE)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return np.repeat(_deep_grey(image)[::factor, ::factor, None], 3, axis=2)
    has_alpha = image.has_transparency_data
    image = image.convert("RGBA" if has_alpha else "RGB")
    if factor > 1:
        image = image.reduce(factor)
    pixels = np.asarray(image, dtype=np.float32) / 255
    if not has_alpha:
        return pixels
    colours, alpha = pixels[..., :3], pixels[..., 3:]  # (height, width, 3), (height, width, 1)
    weight = float(alpha.sum())
    brightness = float((colours * alpha).sum()) / (3 * weight) if weight else 0.0
    ground = 1.0 if brightness < 0.5 else 0.0
    return colours * alpha + ground * (1 - alpha)


def _deep_grey(image: Image.Image) -> np.ndarray:
    """float32 (height, width) in 0-1 of a grey image of 16 or 32 bits. ``convert("L")`` would clip it at 255."""
    values = np.asarray(image).astype(np.float32)
    if not np.isfinite(values).all():
        raise BadImage("pixels that are not finite numbers")
    if image.mode.startswith("I;16"):
        return values / 65535
    # "I" and "F" have no fixed white; only contrast matters for what follows
    low, high = float(values.min()), float(values.max())
    return (values - low) / max(high - low, 1e-12)


def fit_picture(pixels: np.ndarray, image_shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 (channels, height, width) for any network of grey or RGB images: the largest middle part of that shape.

    Args:
        pixels: float32 (height, width, 3) in 0-1, as :func:`read_image` returns it.
        image_shape: Channels (1 or 3), height and width that the network was trained on.
    """
    from PIL import Image, ImageOps

    channels, height, width = image_shape
    picture = Image.fromarray(np.round(pixels * 255).astype(np.uint8))
    fitted = ImageOps.fit(picture.convert("L" if channels == 1 else "RGB"), (width, height))
    return np.asarray(fitted).reshape(height, width, channels).transpose(2, 0, 1)
