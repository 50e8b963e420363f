"""Label image files of any size, format and colours.

python -m project.predict digit.png
python -m project.predict scans/ "photos/*.jpg" --output labels.csv
python -m project.predict scans/ --contact_sheet prepared.png     # what the network is shown

The module's `predict_step` answers, and its answer becomes the columns. What turns a file into an input is the data
module's `prepare_file(path)`, or its `prepare_image(pixels)`; without either, the middle of the picture is scaled.
The column `note` says where a label is unsure, or a picture shows more than one digit.
"""

from __future__ import annotations

import glob
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from project.engine.command import CommandParser, add_checkpoint, add_output, quick_imports, run
from project.errors import BadImage, UserError, require
from project.tables import Row, format_cell, format_table, write_rows

if TYPE_CHECKING:
    from torch import Tensor

    from project.engine.restore import Loaded

BATCH_SIZE = 256
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
)
LONGEST_SIDE = (
    2048  # a digit of a fiftieth of it still has 40 pixels; 12 megapixels as floats take 150 MB
)
DIGITS = [str(digit) for digit in range(10)]
# The contact sheet, in pixels: an image, two lines of text below it, space around. It shows the first MOST_SHOWN.
TILE, CAPTION, MARGIN, MOST_SHOWN = 84, 30, 8, 1000
# Probability below which a label is unsure, and coloured: 90 % of the wrong labels of the default network on MNIST's
# test set are, and 3 % of the right ones.
UNSURE, UNSURE_COLOUR = 0.7, "#c05000"


def main(argv: list[str]) -> int:
    """Predict as ``argv`` says. Returns 2 where a file had to be skipped."""
    parser = CommandParser("project.predict", __doc__)
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="files, folders (with what is below them) and globs",
    )
    add_checkpoint(parser)
    add_output(parser)
    add_output(
        parser, "--contact_sheet", (".png",), "draw the prepared images with their predictions"
    )
    args = parser.parse_args(argv)
    find_files(args.images)  # a mistyped word is told before torch is imported

    with quick_imports():
        from project.engine.restore import find_checkpoint, load

    allowed = ["--allow_imports", args.allow_imports] if args.allow_imports else []
    loaded = load(find_checkpoint(args.ckpt_path), allowed)
    paths = find_files(args.images, only_images=not hasattr(loaded.datamodule, "prepare_file"))
    rows, inputs, bad = predict_files(loaded, paths)
    if rows:  # with nothing to write, older files stay
        print(format_table(rows))
        if notes := Counter(row["note"] for row in rows if row.get("note")):
            print(
                f"of {len(rows)} files: "
                + ", ".join(f"{count} {note}" for note, count in notes.most_common())
            )
        if args.output:
            write_rows(args.output, rows)
        if args.contact_sheet:
            draw_contact_sheet(args.contact_sheet, inputs, rows)
    for path, reason in bad:
        print(f"skipped {path}: {reason}", file=sys.stderr)
    if bad:
        print(
            f"error: {len(bad)} of {len(paths)} files could not be read, see above.",
            file=sys.stderr,
        )
    return 2 if bad else 0


def predict_files(
    loaded: Loaded, paths: Sequence[Path]
) -> tuple[list[Row], list[Tensor], list[tuple[Path, str]]]:
    """One row per readable file (``file``, what :func:`columns` makes of the answer, beside a label a ``note``), the
    first ``MOST_SHOWN`` inputs, and the files that were skipped with the reason. Everything in the order of ``paths``.
    """
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]

    prepare, says = choose_preparation(loaded)
    print(says)
    good, bad = list[tuple[Path, str]](), list[tuple[Path, str]]()  # with a note, or the reason
    inputs, batch = list[torch.Tensor](), list[torch.Tensor]()  # the first ones; some of one shape
    answers: list[tuple[Any, int]] = []  # and how many inputs each is for
    for path in tqdm(
        paths, unit="file", desc="predict", leave=False, disable=None
    ):  # no bar in a log file
        try:
            made, note = prepare(path)
            prepared = torch.as_tensor(made)
        except Exception as error:  # somebody else's reader fails in its own ways on a damaged file
            kind = "" if isinstance(error, BadImage | UserError) else f"{type(error).__name__}: "
            bad.append((path, kind + " ".join(str(error).split())))
            continue
        if batch and (len(batch) == BATCH_SIZE or batch[0].shape != prepared.shape):
            answers.append((predict_batch(loaded, torch.stack(batch)), len(batch)))
            batch = []
        good.append((path, note))
        batch.append(prepared)
        inputs += [prepared] if len(inputs) < MOST_SHOWN else []
    if batch:
        answers.append((predict_batch(loaded, torch.stack(batch)), len(batch)))
    found: Any = (
        getattr(loaded.module, "class_names", None)
        or getattr(loaded.datamodule, "class_names", None)
        or ()
    )
    names = (
        list(found) if all(are_probabilities(answer, len(found)) for answer, _ in answers) else []
    )
    rows: list[dict[str, Any]] = []
    for answer, count in answers:
        table = columns(answer, names)
        if {len(values) for values in table.values()} != {count}:
            got = tuple(answer.shape) if hasattr(answer, "shape") else type(answer).__name__
            must = f"must return a tensor or a dict of tensors with an entry for each of {count} inputs, got {got}."
            raise UserError(f"{type(loaded.module).__name__}.predict_step {must}")
        rows += [
            dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)
        ]
    for row, (_, note) in zip(rows, good, strict=True):
        if "probability" in row:
            row["note"] = note or (
                f"unsure (below {UNSURE:.0%})" if row["probability"] < UNSURE else ""
            )
    return (
        [{"file": str(path), **row} for (path, _), row in zip(good, rows, strict=True)],
        inputs,
        bad,
    )


def predict_batch(loaded: Loaded, batch: Tensor) -> Any:
    """What ``predict_step`` returns for a batch of inputs, without targets."""
    import torch

    try:
        with torch.inference_mode():
            return loaded.module.predict_step(batch, 0)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        must = f"must take a batch of inputs alone, got {tuple(batch.shape)} of {batch.dtype}"
        raise UserError(
            f"{type(loaded.module).__name__}.predict_step {must} ({reason})."
        ) from error


def are_probabilities(answer: Any, classes: int) -> bool:
    """Whether an answer is a tensor (batch, classes) of probabilities: sigmoids of several labels do not sum to 1."""
    fits = getattr(answer, "ndim", 0) == 2 and answer.shape[1] == classes
    return fits and bool(
        (answer >= 0).all() and ((answer.float().sum(dim=1) - 1).abs() < 1e-3).all()
    )


def columns(answer: Any, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The columns of a batch's answer: name → one value per file. Of probabilities of the classes ``names`` the two
    largest; else ``prediction``, or a dict's keys, of tensors (batch,); with ``_0``, ``_1``, ... of (batch, n).
    """
    table: dict[str, Any] = {}
    if names:
        top = answer.float().topk(min(2, len(names)), dim=1)
        for label, chance, place in (
            ("label", "probability", 0),
            ("runner_up", "runner_up_probability", -1),
        ):
            label = "digit" if label == "label" and names == DIGITS else label  # feature: mnist
            table[label] = [names[index] for index in top.indices[:, place].tolist()]
            table[chance] = top.values[:, place].tolist()
        return table
    for name, values in (answer if isinstance(answer, Mapping) else {"prediction": answer}).items():
        if getattr(values, "ndim", 0) == 2:
            parts = values.unbind(dim=1)
            table |= {
                f"{name}_{i}" if len(parts) > 1 else str(name): part.tolist()
                for i, part in enumerate(parts)
            }
        else:
            table[str(name)] = values.tolist() if hasattr(values, "tolist") else values
    return {
        name: values if isinstance(values, list | tuple) else [] for name, values in table.items()
    }


def find_files(arguments: Iterable[str], only_images: bool = False) -> list[Path]:
    """Files meant by the command line's words: files, folders (and what is below, not hidden) and globs, each once.
    A file that was named is returned in any case, even a missing one, to be reported with others that cannot be read.
    """
    found: list[Path] = []
    endings = {ending for ending, name in Image.registered_extensions().items() if name in FORMATS}
    for argument in arguments:
        require(argument, "IMAGE", "be a file, a folder or a pattern", "nothing")
        word = os.path.expanduser(argument)  # Path.expanduser() raises where there is no such user
        is_glob = glob.has_magic(word) and not os.path.exists(word)
        files: list[Path] = []
        for path in map(Path, sorted(glob.glob(word, recursive=True)) if is_glob else [word]):
            below = sorted(
                file for file in path.rglob("[!.]*") if file.is_file()
            )  # nothing of what is no folder
            files += [file for file in below if not only_images or file.suffix.lower() in endings]
            files += [] if path.is_dir() else [path]
        if not files:
            kind = (
                f"with an image's ending ({' '.join(sorted(endings))})" if only_images else "in it"
            )
            reason = "matches no file" if is_glob else f"is a folder without files {kind}"
            raise UserError(f"IMAGE {argument} {reason}. Check the folder, or name the files.")
        found += files
    return list(dict.fromkeys(found))


def choose_preparation(loaded: Loaded) -> tuple[Callable[[Path], tuple[Any, str]], str]:
    """What turns a file into an input, of images uint8 or float in 0-1, and a note, often empty; and that in words. The
    data module's ``prepare_file(path)``, else its ``prepare_image(pixels)``, where pixels are float32 (height, width,
    3) in 0-1; else MNIST's way for the ten digits at 28x28; else its ``image_shape``, to cut and scale to.
    """
    data: Any = loaded.datamodule
    owner = "the data module" if data is None else type(data).__name__
    if hasattr(data, "prepare_file"):
        return lambda path: (data.prepare_file(path), ""), f"inputs: {owner}.prepare_file"
    if hasattr(data, "prepare_image"):
        return lambda path: (
            data.prepare_image(read_image(path)),
            "",
        ), f"inputs: {owner}.prepare_image"
    shape = tuple(getattr(data, "image_shape", ()))  # feature: images
    if shape == (1, 28, 28) and getattr(data, "class_names", None) == DIGITS:  # feature: mnist
        from project.data.digits import find_digit

        return lambda path: find_digit(
            read_image(path)
        ), "inputs: each digit scaled and centred as in MNIST"
    if len(shape) == 3 and shape[0] in (1, 3):  # feature: images
        from project.data.images import fit_image

        def fitted(path: Path) -> tuple[Any, str]:
            return fit_image(
                Image.fromarray(np.round(read_image(path) * 255).astype(np.uint8)), shape
            ), ""

        return (
            fitted,
            f"inputs: the largest middle part of each picture, scaled to {' x '.join(map(str, shape))}",
        )
    give = f"Give {owner} a method prepare_file(path) that returns the input as a tensor, without a batch dimension."
    raise UserError(
        f"predict does not know how a file becomes an input of {type(loaded.module).__name__}. {give}"
    )


def read_image(path: Path) -> np.ndarray:
    """Pixels of an image file, an animation's first frame, as float32 (height, width, 3) in 0-1, upright by EXIF. A
    side longer than ``LONGEST_SIDE`` is reduced. Of Pillow's readers only those in ``FORMATS`` are used: the one of EPS
    would start Ghostscript on a stranger's file. A BadImage where no image can be had.
    """
    most = Image.MAX_IMAGE_PIXELS or math.inf
    try:
        Image.init()
        with Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
            if image.width * image.height > most:
                raise Image.DecompressionBombError
            image.draft(
                "RGB", (LONGEST_SIDE, LONGEST_SIDE)
            )  # lets a JPEG decode at half size or less
            return to_pixels(ImageOps.exif_transpose(image))
    except (
        Exception
    ) as error:  # Pillow's decoders raise whatever they meet: OSError, ValueError, SyntaxError ...
        reasons: dict[type[Exception], str] = {
            Image.UnidentifiedImageError: "not an image that can be read"
        }
        reasons |= {
            FileNotFoundError: "no such file",
            Image.DecompressionBombError: f"more than {most:,} pixels",
        }
        damaged = f"damaged: {' '.join(str(error).split()) or type(error).__name__}"
        raise BadImage(reasons.get(type(error), damaged)) from None


def to_pixels(image: Image.Image) -> np.ndarray:
    """float32 (height, width, 3) in 0-1 of a Pillow image of any mode; 16-bit grey keeps its precision. Transparent
    images stand on white where what they show is dark, and on black where it is bright.
    """
    factor = -(-max(image.size) // LONGEST_SIDE)
    if image.mode in ("I", "F") or image.mode.startswith(
        "I;16"
    ):  # convert("L") would clip it at 255
        grey = np.asarray(image).astype(np.float32)[::factor, ::factor]  # (height, width)
        if not np.isfinite(grey).all():
            raise ValueError("pixels that are not finite numbers")
        # "I" and "F" have no fixed white; only contrast matters for what follows
        low, high = (
            (0.0, 65535.0)
            if image.mode.startswith("I;16")
            else (float(grey.min()), float(grey.max()))
        )
        return np.repeat(((grey - low) / max(high - low, 1e-12))[..., None], 3, axis=2)
    pixels = np.asarray(image.convert("RGBA").reduce(factor), dtype=np.float32) / 255
    colours, alpha = pixels[..., :3], pixels[..., 3:]  # (height, width, 3), (height, width, 1)
    brightness = float((colours * alpha).sum()) / max(3 * float(alpha.sum()), 1e-12)
    return colours * alpha + (brightness < 0.5) * (1 - alpha)


def draw_contact_sheet(path: Path, inputs: Sequence[Tensor], rows: Sequence[Row]) -> None:
    """Draw inputs, (channels, height, width) uint8 or float, with the first columns of their rows and files' names."""
    across = min(20, max(3, math.ceil(math.sqrt(1.5 * len(inputs)))))
    down, high = math.ceil(len(inputs) / across), TILE + CAPTION + MARGIN
    sheet = Image.new(
        "RGB", (MARGIN + across * (TILE + MARGIN), MARGIN + down * high + 16), "white"
    )
    pen, fonts = ImageDraw.Draw(sheet), {size: ImageFont.load_default(size) for size in (10, 14)}
    for index, (image, row) in enumerate(zip(inputs, rows, strict=False)):
        require(
            image.ndim == 3,
            "--contact_sheet",
            "draw images (channels, height, width)",
            tuple(image.shape),
        )
        pixels = (image if len(image) == 3 else image[:1].expand(3, -1, -1)).float()
        if (
            image.is_floating_point()
        ):  # in 0-1, unless somebody's own preparation has normalised them
            low, most = min(0.0, float(pixels.min())), max(1.0, float(pixels.max()))
            pixels = (pixels - low) / (most - low) * 255
        left, top = MARGIN + index % across * (TILE + MARGIN), MARGIN + index // across * high
        tile = Image.fromarray(pixels.byte().permute(1, 2, 0).numpy())
        sheet.paste(tile.resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
        said = [
            f"{value:.0%}" if name == "probability" else format_cell(value)
            for name, value in row.items()
        ][1:3]
        colour = UNSURE_COLOUR if row.get("note") else "black"
        pen.text((left, top + TILE + 1), cut("  ".join(said), 11), fill=colour, font=fonts[14])
        pen.text(
            (left, top + TILE + 17),
            cut(format_cell(Path(row["file"]).name), 15),
            fill="grey",
            font=fonts[10],
        )
    if "probability" in rows[0]:
        pen.text(
            (MARGIN, sheet.height - 20), f"at least {UNSURE:.0%} sure", fill="black", font=fonts[14]
        )
        pen.text(
            (2 * TILE, sheet.height - 20),
            "less sure, or several digits",
            fill=UNSURE_COLOUR,
            font=fonts[14],
        )
    sheet.save(path)


def cut(text: str, most: int) -> str:
    """The text, its middle left out where it has more than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2) + 1 :]}"


if __name__ == "__main__":
    run(main)
