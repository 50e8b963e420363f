"""Turn a checkpoint into ONNX, torch.export and safetensors files, checked against it on the test images.

python -m project.export
python -m project.export --ckpt_path checkpoints/mine/best.ckpt --output_dir exported

Writes model.onnx, model.pt2 and model.safetensors beside the checkpoint. The first two take `images`, float32 in 0-1,
(batch, channels, height, width), and give `logits` (batch, classes): normalisation is inside.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

NAMES = ("model.onnx", "model.pt2", "model.safetensors")


def main(argv: list[str]) -> int:
    """Export as ``argv`` says. Returns 1, and leaves no new file, where an export disagrees with the checkpoint."""
    from project.engine.command import CommandParser, add_checkpoint, add_output

    parser = CommandParser("project.export", __doc__)
    add_checkpoint(parser)
    parser.add_argument("--output_dir", metavar="DIR", help="folder for the files (default: the checkpoint's)")
    add_output(parser)
    parser.add_argument("--data.root", metavar="DIR", help="where the test images are (default: as in training)")
    parser.add_argument(
        "--data.source", metavar="auto|mnist|sample", help="which test images (default: as in training)"
    )
    args = parser.parse_args(argv)

    from project.engine.command import quick_imports
    from project.tables import check_output, format_table, write_rows

    output = check_output(args.output) if args.output else None

    with quick_imports():
        from project.engine.checkpoint_files import load
        from project.engine.run_folder import find_checkpoint
        from project.export_files import require_packages

    require_packages()
    checkpoint = find_checkpoint(args.ckpt_path)
    folder = writable_folder(Path(args.output_dir) if args.output_dir else checkpoint.parent)
    typed = {name: getattr(args, name) for name in ("data.root", "data.source")}
    loaded = load(checkpoint, [word for name, value in typed.items() if value for word in (f"--{name}", value)])

    from project.export_files import (
        InferenceGraph,
        compare,
        metadata,
        test_images,
        write_onnx,
        write_pt2,
        write_safetensors,
    )

    images, labels, source = test_images(loaded, as_in_training=not any(typed.values()))
    graph = InferenceGraph(loaded)
    facts = metadata(loaded, images, labels, source)
    print(f"{checkpoint}: exporting, then comparing on {len(images):,} {source} images", flush=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
        onnx, pt2, safetensors = (Path(scratch) / name for name in NAMES)
        exported = graph.export()
        write_onnx(onnx, exported, facts)
        write_pt2(pt2, exported, facts)
        write_safetensors(safetensors, loaded, facts)
        rows = compare(loaded, images, onnx, pt2, safetensors)
        print(format_table(rows))
        if output:
            write_rows(output, rows)
        if not all(row["agrees"] for row in rows):
            print("error: an export disagrees with the checkpoint, see above; nothing was written.", flush=True)
            return 1
        for name in NAMES:
            os.replace(Path(scratch) / name, folder / name)
    for name in NAMES:
        print(f"{os.path.relpath(folder / name)}  {(folder / name).stat().st_size / 1e6:,.2f} MB")
    return 0


def writable_folder(folder: Path) -> Path:
    """``folder``, made if it is missing.

    Raises:
        UserError: It cannot be made or written to.
    """
    from project.errors import UserError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir must be a folder that can be made, got {folder} ({error.strerror}).") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output_dir must be a folder you may write to, got {folder}. Name another one.")
    return folder


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
