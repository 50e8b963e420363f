"""One picture of many prepared images, each with its label: what the network was shown, at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

TILE, CAPTION, MARGIN = 84, 30, 8  # pixels: image, two lines of text below it, space around
MOST = 1000  # images on a sheet; it would be no glance with more
UNSURE = 0.9  # probability below which a label is coloured


def draw_contact_sheet(path: Path, images: Sequence[np.ndarray], rows: Sequence[dict[str, Any]]) -> None:
    """Draw the first ``MOST`` images with label, probability and file name; unsure ones in orange.

    Args:
        path: PNG file to write.
        images: uint8 (channels, height, width) each.
        rows: Rows of :func:`project.predict.predict_files`, one per image.
    """
    shown = list(zip(images, rows, strict=True))[:MOST]
    columns = max(1, min(20, math.ceil(math.sqrt(1.5 * len(shown)))))
    wide, high = TILE + MARGIN, TILE + CAPTION + MARGIN
    height = max(1, math.ceil(len(shown) / columns)) * high + MARGIN
    sheet = Image.new("RGB", (columns * wide + MARGIN, height), "white")
    pen = ImageDraw.Draw(sheet)
    font, small = ImageFont.load_default(14), ImageFont.load_default(10)
    for index, (image, row) in enumerate(shown):
        left, top = MARGIN + index % columns * wide, MARGIN + index // columns * high
        sheet.paste(_tile(image), (left, top))
        label = str(row.get("digit", row.get("label")))
        colour = "black" if row["probability"] >= UNSURE else "#c05000"
        text = _fitting(f"{label}  {row['probability']:.0%}", font)
        pen.text((left, top + TILE + 1), text, fill=colour, font=font)
        pen.text((left, top + TILE + 17), _fitting(Path(row["file"]).name, small), fill="grey", font=small)
    sheet.save(path)


def _tile(image: np.ndarray) -> Image.Image:
    pixels = image.transpose(1, 2, 0)  # (height, width, channels)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).convert("RGB")
    return picture.resize((TILE, TILE), Image.Resampling.NEAREST)


def _fitting(text: str, font: Any) -> str:
    """The text, its middle left out where it is wider than a tile."""
    whole, keep = text, len(text)
    while font.getlength(text) > TILE and keep > 2:
        keep -= 1
        text = f"{whole[: keep // 2]}…{whole[-(keep // 2) :]}"
    return text
