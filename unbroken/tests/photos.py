"""Photographs of digits on paper, as a phone takes them: made from MNIST's with a fixed seed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

KINDS = ("uneven light", "ruled paper", "noise")
HEIGHT = 480
WIDTH = 640
PENS = [(0.1, 0.1, 0.12), (0.12, 0.18, 0.5), (0.35, 0.35, 0.36)]  # black, blue, pencil
LINES = [(0.45, 0.6, 0.85), (0.6, 0.6, 0.62)]  # blue, grey


def photograph(digits: list[np.ndarray], kind: str, rng: np.random.Generator) -> Image.Image:
    """An RGB photograph, 640 x 480, of a page with digits, (28, 28) uint8 each, side by side; none
    is a bare page.
    """
    # Several digits are smaller, so that they fit side by side.
    side = int(rng.integers(140, 330)) if len(digits) < 2 else 150
    ink = Image.new("L", (WIDTH, HEIGHT))
    left = int((WIDTH - side * max(1, len(digits))) * rng.uniform(0.3, 0.7))
    top = int((HEIGHT - side) * rng.uniform(0.2, 0.8))
    for place, digit in enumerate(digits):
        written = Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC)
        ink.paste(written, (left + place * side, top))
    coverage = np.asarray(ink, dtype=np.float32)[..., None] / 255
    page = np.full((HEIGHT, WIDTH, 3), rng.uniform(0.8, 0.97), dtype=np.float32)
    if kind == "ruled paper":
        page = draw_lines(page, rng)
    pen = np.array(PENS[rng.integers(3)], dtype=np.float32)
    page = page * (1 - coverage) + pen * coverage
    angle = rng.uniform(-8, 8)
    photo = Image.fromarray((page * 255).astype(np.uint8))
    # The page is turned about its middle and enlarged, so that no corner is empty.
    photo = photo.rotate(angle, Image.Resampling.BICUBIC, expand=False)
    photo = photo.resize((WIDTH * 5 // 4, HEIGHT * 5 // 4))
    photo = photo.crop((WIDTH // 8, HEIGHT // 8, WIDTH // 8 + WIDTH, HEIGHT // 8 + HEIGHT))
    most_blur = 4 if kind == "noise" else 2
    photo = photo.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, most_blur)))
    brightness = light(rng, strong=kind == "uneven light")
    seen = np.asarray(photo, dtype=np.float32) / 255 * brightness[..., None]
    tint = [1, rng.uniform(0.85, 1), rng.uniform(0.65, 1)]  # of a lamp
    seen *= np.array(tint, dtype=np.float32)
    noise = rng.uniform(0.05, 0.12) if kind == "noise" else 0.015
    seen += rng.normal(0, noise, seen.shape).astype(np.float32)
    return as_jpeg(seen, quality=int(rng.integers(60, 95)))


def as_jpeg(seen: np.ndarray, quality: int) -> Image.Image:
    """Pixels in 0-1, (height, width, 3), after they were saved as JPEG."""
    file = io.BytesIO()
    Image.fromarray((seen.clip(0, 1) * 255).astype(np.uint8)).save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def draw_lines(page: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The page with blue or grey lines, two of three times ruled, else squared."""
    colour = np.array(LINES[rng.integers(2)], dtype=np.float32)
    gap = int(rng.integers(45, 110))
    thick = int(rng.integers(2, 5))
    on = np.zeros((HEIGHT, WIDTH), dtype=bool)
    on[np.arange(HEIGHT) % gap < thick] = True
    if rng.random() < 1 / 3:
        on[:, np.arange(WIDTH) % gap < thick] = True
    return np.where(on[..., None], colour, page)


def light(rng: np.random.Generator, strong: bool) -> np.ndarray:
    """Brightness (height, width): it falls off to one side, less at the corners, and under a
    shadow's soft edge.
    """
    y, x = np.meshgrid(np.linspace(-1, 1, HEIGHT), np.linspace(-1, 1, WIDTH), indexing="ij")
    turn = rng.uniform(0, 2 * np.pi)
    along = (np.cos(turn) * x + np.sin(turn) * y) / np.sqrt(2)
    much = rng.uniform(0.25, 0.45) if strong else 0.1
    bright = (1 - much * (along + 1) / 2) * (1 - much / 4 * (x**2 + y**2))
    if strong:  # the shadow of a hand or of the phone
        turn = rng.uniform(0, 2 * np.pi)
        edge = rng.uniform(-0.5, 0.5)
        soft = rng.uniform(0.02, 0.2)
        beyond = (np.cos(turn) * x + np.sin(turn) * y - edge) / soft
        bright *= 1 - rng.uniform(0.25, 0.45) / (1 + np.exp(-beyond.clip(-30, 30)))
    return bright.astype(np.float32)


def take_photographs(
    images: np.ndarray, labels: np.ndarray, folder: Path, every: int = 1
) -> dict[Path, int]:
    """60 photographs of one digit each, twenty of every kind, or each ``every``-th of them: file →
    label.
    """
    taken = {}
    for number in range(0, 60, every):
        rng = np.random.default_rng(number)
        label = number % 10
        kind = KINDS[number // 20]
        digit = images[rng.choice(np.flatnonzero(labels == label))]
        path = folder / f"{kind.replace(' ', '_')}_{number:02}.png"
        photograph([digit], kind, rng).save(path, compress_level=1)
        taken[path] = label
    return taken
