"""One picture of all inputs with their predictions: what the network was shown."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from unbroken.commands.predict.answers import UNSURE
from unbroken.errors import require
from unbroken.tables import Row, format_cell

# In pixels: an image, two lines of text below it, the space around, the line at the bottom.
TILE = 84
CAPTION = 30
MARGIN = 8
LEGEND = 16
LEGEND_WIDTH = 380
MOST_SHOWN = 1000
UNSURE_COLOUR = "#c05000"


def draw_contact_sheet(path: Path, inputs: Sequence[Tensor], rows: Sequence[Row]) -> None:
    """Draw inputs, (channels, height, width) uint8 or float, with their predictions and names.

    There may be more ``rows`` than ``inputs``.
    """
    across = min(20, max(3, math.ceil(math.sqrt(1.5 * len(inputs)))))
    down = math.ceil(len(inputs) / across)
    # A few pictures are narrower than the legend.
    width = max(LEGEND_WIDTH, MARGIN + across * (TILE + MARGIN))
    height = MARGIN + down * (TILE + CAPTION + MARGIN) + LEGEND
    sheet = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (image, row) in enumerate(zip(inputs, rows, strict=False)):
        left = MARGIN + index % across * (TILE + MARGIN)
        top = MARGIN + index // across * (TILE + CAPTION + MARGIN)
        sheet.paste(tile_of(image), (left, top))
        write_caption(pen, row, left, top + TILE)
    if "probability" in rows[0]:
        bottom = sheet.height - 20
        sure = f"at least {UNSURE:.0%} sure"
        unsure = "less sure, or with a note"
        pen.text((MARGIN, bottom), sure, fill="black", font=font(14))
        pen.text((2 * TILE, bottom), unsure, fill=UNSURE_COLOUR, font=font(14))
    sheet.save(path)


def tile_of(image: Tensor) -> Image.Image:
    """An input as a square of ``TILE`` pixels."""
    shape = tuple(image.shape)
    must = "draw images (channels, height, width)"
    require(image.ndim == 3, "--contact_sheet", must, shape)
    colours = image if len(image) == 3 else image[:1].expand(3, -1, -1)
    pixels = colours.float()
    if image.is_floating_point():
        # They are in 0-1, unless somebody's own preparation has normalised them.
        low = min(0.0, float(pixels.min()))
        high = max(1.0, float(pixels.max()))
        pixels = (pixels - low) / (high - low) * 255
    tile = Image.fromarray(pixels.byte().permute(1, 2, 0).numpy())
    return tile.resize((TILE, TILE), Image.Resampling.NEAREST)


def write_caption(pen: ImageDraw.ImageDraw, row: Row, left: int, top: int) -> None:
    """Write the first two columns of a row, and below them the file's name."""
    texts = []
    for name in [name for name in row if name != "file"][:2]:
        value = row[name]
        texts.append(f"{value:.0%}" if name == "probability" else format_cell(value))
    colour = UNSURE_COLOUR if row.get("note") else "black"
    prediction = shortened("  ".join(texts), 14)
    pen.text((left, top + 1), prediction, fill=colour, font=font(14))
    name = shortened(format_cell(Path(row["file"]).name), 10)
    pen.text((left, top + 17), name, fill="grey", font=font(10))


@functools.cache
def font(size: int) -> Any:
    """A font in a size in pixels: that of matplotlib, which has the letters of most alphabets, or
    Pillow's own, which has those of English.
    """
    # A report draws with matplotlib. Who predicts may not have it.
    with contextlib.suppress(ImportError, OSError):
        import matplotlib

        file = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
        return ImageFont.truetype(str(file), size)
    return ImageFont.load_default(size)


def shortened(text: str, size: int) -> str:
    """The text in a font of that size, its middle left out where it is wider than a tile."""
    shown = text
    kept = len(text)
    while kept > 1 and font(size).getlength(shown) > TILE + MARGIN - 2:
        kept -= 1
        shown = f"{text[: kept // 2]}…{text[-(kept - kept // 2) :]}"
    return shown
