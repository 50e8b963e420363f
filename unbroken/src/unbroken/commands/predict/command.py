"""Label image files of any size, format and colours, or what a predict_dataloader gives.

python -m NAME.predict picture.png
python -m NAME.predict scans/ "photos/*.jpg" --output labels.csv
python -m NAME.predict scans/ --contact_sheet prepared.png     # what the network is shown
python -m NAME.predict --output answers.csv                    # what predict_dataloader gives

The module's `predict_step` answers, and its answer becomes the columns. What turns a file into an
input is the data module's `prepare_file(path)`, or its `prepare_image(pixels)`; without either, the
middle of the picture is scaled. The column `note` says where a label is unsure, and what the data
module has to say of a picture.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from unbroken.cli.parser import CommandParser, add_checkpoint, add_output, trusting
from unbroken.cli.start import quick_imports
from unbroken.commands.predict.files import find_files
from unbroken.errors import require
from unbroken.tables import Row, format_table, printable, write_rows


def main(package: str, argv: list[str]) -> int:
    """Predict as ``argv`` says. Returns 2 where a file had to be skipped."""
    args = parse(package, argv)
    if not args.images:
        return predict_what_the_data_give(package, args)
    # A mistyped word is told at once, before torch is imported, which takes seconds.
    find_files(args.images)

    with quick_imports():
        from unbroken import contract
        from unbroken.cli.read_checkpoint import load
        from unbroken.commands.predict.labelling import predict_files
        from unbroken.commands.program_of import program_of
        from unbroken.run_folder import find_checkpoint

    loaded = load(program_of(package), find_checkpoint(args.ckpt_path), trusting(args))
    reads_any_file = isinstance(loaded.datamodule, contract.PreparesFiles)
    paths, empty = find_files(args.images, only_images=not reads_any_file)
    labelled = predict_files(loaded, paths)
    # With nothing to write, an older file stays what it is.
    if labelled.rows:
        # Files come first: what reads the terminal's lines, such as head, may not read on.
        if args.output:
            write_rows(args.output, labelled.rows)
        print(format_table(labelled.rows))
        print_notes(labelled.rows)
        if args.contact_sheet:
            from unbroken.commands.predict.contact_sheet import draw_contact_sheet

            draw_contact_sheet(args.contact_sheet, labelled.inputs, labelled.rows)
    for folder in empty:
        print(f"skipped: {folder}", file=sys.stderr)
    for path, reason in labelled.skipped:
        print(f"skipped {printable(str(path))}: {printable(reason)}", file=sys.stderr)
    if not labelled.skipped:
        return 0
    print(
        f"error: {len(labelled.skipped)} of {len(paths)} files could not be read, see above.",
        file=sys.stderr,
    )
    return 2


def predict_what_the_data_give(package: str, args: argparse.Namespace) -> int:
    """Predict the batches of the ``predict_dataloader``; returns the exit code."""
    require(not args.contact_sheet, "--contact_sheet", "draw files", "no IMAGE")
    with quick_imports():
        from unbroken.cli.read_checkpoint import load
        from unbroken.commands.predict.loader import predict_loaders
        from unbroken.commands.program_of import program_of
        from unbroken.run_folder import find_checkpoint

    loaded = load(program_of(package), find_checkpoint(args.ckpt_path), trusting(args))
    rows = predict_loaders(loaded)
    if rows:
        if args.output:
            write_rows(args.output, rows)
        print(format_table(rows))
    return 0


def parse(package: str, argv: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = CommandParser(package, "predict", __doc__)
    parser.add_argument(
        "images",
        nargs="*",
        metavar="IMAGE",
        help="files, folders (with what is below them) and globs; without any, the batches of the"
        " predict_dataloader of the data module or module",
    )
    add_checkpoint(parser)
    add_output(parser)
    add_output(
        parser, "--contact_sheet", (".png",), "draw the prepared images with their predictions"
    )
    return parser.parse_args(argv)


def print_notes(rows: Sequence[Row]) -> None:
    """Print how often each note stands in the table; nothing where there is none."""
    notes = Counter(row["note"] for row in rows if row.get("note"))
    if notes:
        counts = ", ".join(f"{count} {note}" for note, count in notes.most_common())
        print(f"of {len(rows)} files: {counts}")
