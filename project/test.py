"""A checkpoint's metrics on the test set. Needs only the checkpoint.

python -m project.test
python -m project.test --ckpt_path checkpoints/mine/best.ckpt --data.root data --output metrics.json
python -m project.test --devices 2 --strategy ddp
"""

from pathlib import Path

from project.engine.command import prepare_process, run

prepare_process(__name__)  # threads and signals, before torch is imported

from project import tables
from project.engine.cli import CommandLine, configure
from project.engine.ranks import decided_by_rank_zero, is_rank_zero, say
from project.engine.restore import ROOT, find_checkpoint, load
from project.engine.exact_checkpoint import ExactCheckpoint
from project.engine.summary import device_name, samples_of
from project.engine.trainer import (
    build_trainer,
    float32_products,
    lacks_for_test,
    refusals_as_errors,
    trainer_flags,
)
from project.errors import UserError


def main(argv: list[str]) -> int:
    """Test as ``argv`` says; returns the exit code."""
    line = CommandLine(argv)
    output = tables.check_output(asked) if (asked := line.value("output")) else None
    if line.asks_for_help:
        configure(argv, "project.test")
    wanted = (
        line.value("ckpt_path"),
        Path(line.value("trainer.default_root_dir") or ROOT),
        line.value("run_name"),
    )
    path = Path(decided_by_rank_zero(lambda: str(find_checkpoint(*wanted))))
    loaded = load(path, argv, again=True)
    if missing := lacks_for_test(loaded.module, loaded.datamodule):
        raise UserError(f"--ckpt_path {path}: there is nothing to test, {missing}.")
    say(*([f"testing {path} with {', '.join(loaded.changes)}"] if loaded.changes else []))
    flags = trainer_flags(loaded.config) | {"logger": False, "enable_model_summary": False}
    flags["precision"] = flags["precision"] or (
        "64-true" if loaded.run.get("precision") == "64-true" else None
    )
    trainer = build_trainer(flags | {"callbacks": [ExactCheckpoint(None), *flags["callbacks"]]})
    with (
        refusals_as_errors(path),
        float32_products(),
    ):  # like fit's own test; --precision still chooses autocast
        found = trainer.test(
            loaded.module, loaded.datamodule, ckpt_path=path, weights_only=True, verbose=False
        )
    facts = {
        "checkpoint": str(path),
        "run_name": loaded.run.get("run_name"),
        "data_source": getattr(loaded.datamodule, "data_source", None),
        "test_samples": samples_of(trainer.test_dataloaders)
        if trainer.limit_test_batches == 1.0
        else None,
        "device": device_name(trainer),
        "precision": trainer.precision,
        "world_size": trainer.world_size,
        **{name: value for metrics in found for name, value in metrics.items()},
    }
    if is_rank_zero():
        print(tables.format_table([facts]))
        if output:
            tables.write_rows(output, facts)
    return 0


if __name__ == "__main__":
    run(main)
