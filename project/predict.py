"""Label image files: any size, format and colours.

python -m project.predict digit.png
python -m project.predict scans/ "photos/*.jpg" --output labels.csv
python -m project.predict scans/ --contact_sheet prepared.png     # what the network is shown
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from project.engine.checkpoint_files import Loaded


BATCH_SIZE = 256
DIGITS = [str(digit) for digit in range(10)]


def main(argv: list[str]) -> int:
    """Predict as ``argv`` says. Returns 2 where a file had to be skipped."""
    from project.engine.command import CommandParser, add_checkpoint, add_output, quick_imports
    from project.tables import check_output, format_table, write_rows

    parser = CommandParser("project.predict", __doc__)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders (with what is below them) and globs")
    add_checkpoint(parser)
    add_output(parser)
    parser.add_argument("--contact_sheet", metavar="FILE.png", help="draw the prepared images with their labels")
    args = parser.parse_args(argv)
    output = check_output(args.output) if args.output else None
    sheet = check_output(args.contact_sheet, (".png",), "--contact_sheet") if args.contact_sheet else None

    from project.image_files import find_images

    paths = find_images(args.images)

    with quick_imports():
        from project.engine.checkpoint_files import load
        from project.engine.run_folder import find_checkpoint

    loaded = load(find_checkpoint(args.ckpt_path))
    rows, prepared, bad = predict_files(loaded, paths)
    if rows:
        print(format_table(rows))
    for path, reason in bad:
        print(f"skipped {path}: {reason}", file=sys.stderr)
    if output and rows:  # with nothing to write, an older file stays
        write_rows(output, rows)
    if sheet and rows:
        from project.contact_sheet import draw_contact_sheet

        draw_contact_sheet(sheet, prepared, rows)
    if bad:
        print(f"error: {len(bad)} of {len(paths)} files could not be read, see above.", file=sys.stderr)
        return 2
    return 0


def predict_files(
    loaded: Loaded, paths: list[Path]
) -> tuple[list[dict[str, Any]], list[np.ndarray], list[tuple[Path, str]]]:
    """Label image files, a batch at a time.

    Returns:
        One row per readable file (``file``, ``digit`` or for other classes ``label``, ``probability``, ``runner_up``,
        ``runner_up_probability``), its prepared image, uint8 (channels, height, width), and the files that were
        skipped with the reason. Everything in the order of ``paths``.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    from project.image_files import BadImage, read_image

    prepare = choose_preparation(loaded.datamodule)
    rows: list[dict[str, Any]] = []
    images: list[np.ndarray] = []
    good: list[Path] = []
    bad: list[tuple[Path, str]] = []
    for path in tqdm(paths, unit="file", desc="predict", leave=False, disable=None):  # no bar in a log file
        try:
            images.append(prepare(read_image(path)))
            good.append(path)
        except BadImage as error:
            bad.append((path, str(error)))
        if len(images) - len(rows) == BATCH_SIZE:
            rows += label_batch(loaded, good[len(rows) :], images[len(rows) :])
    if len(images) > len(rows):
        rows += label_batch(loaded, good[len(rows) :], images[len(rows) :])
    return rows, images, bad


def label_batch(loaded: Loaded, paths: list[Path], images: list[np.ndarray]) -> list[dict[str, Any]]:
    """Rows of one batch of prepared images, uint8 (channels, height, width) each."""
    import numpy as np
    import torch

    names = loaded.datamodule.class_names
    name_column = "digit" if names == DIGITS else "label"
    with torch.inference_mode():
        batch = loaded.datamodule.normalize(torch.from_numpy(np.stack(images)))  # (batch, channels, height, width)
        probabilities = loaded.module(batch).float().softmax(dim=1)
    top = probabilities.topk(min(2, len(names)), dim=1)
    return [
        {
            "file": str(path),
            name_column: names[classes[0]],
            "probability": values[0],
            "runner_up": names[classes[-1]],
            "runner_up_probability": values[-1],
        }
        for path, values, classes in zip(paths, top.values.tolist(), top.indices.tolist(), strict=True)
    ]


def choose_preparation(datamodule: Any) -> Callable[[np.ndarray], np.ndarray]:
    """How a picture, float32 (height, width, 3) in 0-1, becomes an input, uint8 (channels, height, width).

    A data module's own ``prepare_image`` if it has one; MNIST's way for the ten digits at 28x28; else cut and scaled.
    """
    from project.data.digits import prepare_digit
    from project.image_files import fit_picture

    if hasattr(datamodule, "prepare_image"):
        return datamodule.prepare_image
    shape = tuple(datamodule.image_shape)
    if datamodule.class_names == DIGITS and shape == (1, 28, 28):
        return lambda pixels: prepare_digit(pixels)[None]
    return lambda pixels: fit_picture(pixels, shape)


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
