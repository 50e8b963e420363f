"""Turn a checkpoint into ONNX, torch.export and safetensors files, checked on the test set.

python -m NAME.export
python -m NAME.export --ckpt_path checkpoints/mine/best.ckpt --output_dir exported
python -m NAME.export --formats safetensors     # the weights alone, of any module
python -m NAME.export --hub mine                # a folder for the Hugging Face Hub

Writes model.onnx, model.pt2 and model.safetensors beside the checkpoint. The first two are the
module's own `forward`. Of an image classifier it takes `images`, float32 in 0-1, (batch, channels,
height, width), and returns `logits` (batch, classes).

With --hub, a folder of its own: the weights of the whole module, config.json, and a model card.
huggingface_hub uploads it as it is: hf upload ME/mine mine
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.cli.parser import CommandParser, add_checkpoint
from unbroken.cli.start import quick_imports
from unbroken.errors import UserError, nearest, printable, require
from unbroken.tables import Row, check_output, format_table, refuse_file_of_others, write_rows

if TYPE_CHECKING:
    from unbroken.cli.read_checkpoint import Loaded

# The file of each format, and the packages that it needs and training does not
FILES = {"onnx": "model.onnx", "pt2": "model.pt2", "safetensors": "model.safetensors"}
# A key of what each file says of itself: without it, somebody else wrote the file.
MARK = b"unbroken_version"
PACKAGES = {
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "pt2": (),
    "safetensors": ("safetensors",),
}


def main(package: str, argv: list[str]) -> int:
    """Export as ``argv`` says.

    Returns 1, and leaves no new file, where an export disagrees with the checkpoint.
    """
    args = parse(package, argv)
    if args.hub is not None:
        return export_to_hub(package, args)
    args.formats = args.formats or list(FILES)
    check_packages(args.formats)
    with quick_imports():
        from unbroken.mirror.store import is_address
        from unbroken.run_folder import find_checkpoint

    if args.output_dir is None and is_address(args.ckpt_path or ""):
        raise UserError("--output_dir is needed where the checkpoint is in a mirror.")
    checkpoint = find_checkpoint(args.ckpt_path)
    loaded = load_module(package, checkpoint, args)
    folder = Path(args.output_dir) if args.output_dir else checkpoint.parent
    for name in args.formats:
        refuse_file_of_others(folder / FILES[name], MARK, "--output_dir")
    if args.formats == ["safetensors"]:
        make_folder(folder)
        return export_weights(loaded, folder, args.output)
    return export_all(loaded, folder, args.formats, args.output)


def parse(package: str, argv: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = CommandParser(package, "export", __doc__)
    add_checkpoint(parser)
    parser.add_argument(
        "--output_dir",
        metavar="DIR",
        type=check_output_dir,
        help="folder for the model's files (default: the checkpoint's)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=check_table,
        help="also write the table of the comparison: .json or .csv; "
        "--output_dir says where the model's files go",
    )
    parser.add_argument(
        "--formats",
        metavar="LIST",
        type=check_formats,
        help=f"any of {','.join(FILES)} (default: all)",
    )
    parser.add_argument(
        "--hub",
        metavar="DIR",
        help="instead, write a folder for the Hugging Face Hub: weights, configuration, model card",
    )
    parser.add_argument(
        "--data.root", metavar="DIR", help="where the test set is (default: as in training)"
    )
    parser.add_argument(
        "--data.source",
        metavar="SOURCE",
        help="which test set (default: as in training)",
    )
    return parser.parse_args(argv)


def export_to_hub(package: str, args: argparse.Namespace) -> int:
    """Write the folder that ``--hub`` names, and say how it is uploaded."""
    for name in ("output_dir", "output", "formats"):
        if getattr(args, name) is not None:
            raise UserError(f"--hub writes a folder of its own: remove --{name}.")
    check_packages(["safetensors"])
    with quick_imports():
        from unbroken.commands.export.hub import FILES as HUB_FILES
        from unbroken.commands.export.hub import check_hub, write_hub
        from unbroken.run_folder import find_checkpoint

    folder = check_hub(args.hub)
    loaded = load_module(package, find_checkpoint(args.ckpt_path), args)
    is_new = not folder.exists()
    make_folder(folder, "--hub")
    try:
        write_hub(loaded, folder)
    except BaseException:
        if is_new:
            folder.rmdir()
        raise
    for name in HUB_FILES:
        megabytes = (folder / name).stat().st_size / 1e6
        print(f"{os.path.relpath(folder / name)}  {megabytes:,.2f} MB")
    print("Loaded again from there, it is the checkpoint's module, bit for bit.")
    print(f"Add a licence to README.md. To upload: hf upload ME/{folder.name} {args.hub}")
    return 0


def check_output_dir(text: str) -> str:
    """The value of ``--output_dir``; a UserError where it looks like the table's file."""
    is_table = Path(text).suffix.lower() in (".json", ".csv") and not os.path.isdir(text)
    hint = f" The table of the comparison is a file of its own: --output {text}"
    require(not is_table, "--output_dir", "be a folder for the model's files", text, hint)
    return text


def check_table(text: str) -> Path:
    """The value of ``--output``; a UserError, which names ``--output_dir``, where it is no
    table.
    """
    try:
        return check_output(text)
    except UserError as error:
        raise UserError(
            f"{error} It is the table of the comparison; --output_dir says where the model's "
            "files go."
        ) from None


def check_formats(text: str) -> list[str]:
    """The formats in a list with commas, each once, in the order of ``FILES``."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        must = f"be any of {', '.join(FILES)}"
        require(name in FILES, "--formats", must, name or "nothing", nearest(name, FILES))
    return [name for name in FILES if name in names]


def check_packages(formats: Sequence[str]) -> None:
    """A UserError where a format's packages are not installed."""
    missing = []
    for name in formats:
        missing += [each for each in PACKAGES[name] if importlib.util.find_spec(each) is None]
    if missing:
        raise UserError(
            f"export needs {', '.join(missing)}, which training does not. "
            f"Run pip install {' '.join(missing)}, or leave formats out with --formats."
        )


def load_module(package: str, checkpoint: Path, args: argparse.Namespace) -> Loaded:
    """The checkpoint's module and data module, with the options that were typed."""
    from unbroken import contract
    from unbroken.cli.read_checkpoint import load
    from unbroken.commands.program_of import program_of

    of_the_checkpoint = ("data.root", "data.source", "trust_checkpoint")
    typed = {
        name: value for name, value in vars(args).items() if name in of_the_checkpoint and value
    }
    words = [f"--{name}={value}" for name, value in typed.items()]
    loaded = load(program_of(package), checkpoint, words)
    data: Any = loaded.datamodule
    names_data = any(name.startswith("data.") for name in typed)
    was_sample = loaded.run.get("data_source") == "sample"
    if was_sample and not names_data and isinstance(data, contract.StaysWithSource):
        # `auto` would look for the full set first.
        data.stay_with("sample")
    return loaded


def make_folder(folder: Path, option: str = "--output_dir") -> None:
    """Make the folder; a UserError where no file can be written into it."""
    try:
        str(folder).encode()  # torch ends the process where a name is not UTF-8
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name is not UTF-8"
        raise UserError(
            f"{option} must be a folder you may write to, got {folder} ({reason})."
        ) from None


def export_weights(loaded: Loaded, folder: Path, table: Path | None) -> int:
    """Write the weights alone. They are the same bits, so that nothing is traced."""
    from unbroken.commands.export.compare import compare_weights
    from unbroken.commands.export.write import metadata, write_weights

    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
        written = Path(scratch) / FILES["safetensors"]
        write_weights(written, loaded, metadata(loaded))
        return finish([compare_weights(written, loaded)], Path(scratch), folder, table)


def export_all(loaded: Loaded, folder: Path, formats: Sequence[str], table: Path | None) -> int:
    """Trace the module, write the files, and compare them with it.

    Where the module cannot be traced, its weights are written nevertheless, and the error says so.
    """
    from unbroken.commands.export.compare import CannotRun, compare
    from unbroken.commands.export.samples import OtherLayers, find_samples
    from unbroken.commands.export.trace import trace
    from unbroken.commands.export.write import write_files

    try:
        samples = find_samples(loaded)
        program = trace(loaded, samples)
    except OtherLayers:
        raise
    except UserError as error:
        if "safetensors" not in formats:
            raise
        make_folder(folder)
        export_weights(loaded, folder, None)
        raise UserError(
            f"{error} model.safetensors, which needs no tracing, was written nevertheless."
        ) from error
    make_folder(folder)
    count = len(samples.inputs[0])
    path = printable(str(loaded.path))
    print(f"{path}: comparing the exports on {count:,} samples ({samples.source})", flush=True)
    for output in samples.outputs:
        if output.key in samples.names:
            print(f"the output {output.key} is called {output.name}: an input has its name")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
        written = {name: Path(scratch) / FILES[name] for name in formats}
        write_files(written, loaded, program, samples)
        try:
            rows = compare(written, loaded, samples)
        except CannotRun:
            # The other formats are good nevertheless.
            written.pop("onnx").unlink()
            if written and finish(compare(written, loaded, samples), Path(scratch), folder, table):
                return 1
            raise
        return finish(rows, Path(scratch), folder, table)


def finish(rows: Sequence[Row], scratch: Path, folder: Path, table: Path | None) -> int:
    """Print the comparison, and put the files in their place if all of them agree."""
    if table:
        write_rows(table, rows)
    print(format_table(rows))
    if not all(row["agrees"] for row in rows):
        print(
            "error: an export disagrees with the checkpoint, see above; nothing was written.",
            flush=True,
        )
        return 1
    for name in FILES.values():
        if (scratch / name).exists():
            os.replace(scratch / name, folder / name)
            megabytes = (folder / name).stat().st_size / 1e6
            print(f"{os.path.relpath(folder / name)}  {megabytes:,.2f} MB")
    return 0
