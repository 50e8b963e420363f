"""A checkpoint's metrics on the test set; everything that is needed is in the checkpoint.

python -m project.test
python -m project.test --ckpt_path checkpoints/mine/best.ckpt --data.root data --output metrics.json
python -m project.test --devices 2 --strategy ddp
"""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """Test as ``argv`` says; returns the exit code."""
    from pathlib import Path

    from project.engine.command import quick_imports

    with quick_imports():
        from project import tables
        from project.engine import checkpoint_files as checkpoints
        from project.engine import summary
        from project.engine.checkpointing import GracefulStop
        from project.engine.cli import TestCLI, for_loading, typed_or_configured, typed_value
        from project.engine.ranks import decided_by_rank_zero, is_rank_zero
        from project.engine.run_folder import ROOT, find_checkpoint
        from project.engine.trainer import build_trainer, trainer_flags

    if output := typed_value(argv, "--output"):
        tables.check_output(output)
    ckpt_path, run_name = (typed_or_configured(argv, name) for name in ("ckpt_path", "run_name"))
    root = Path(typed_or_configured(argv, "trainer.default_root_dir") or ROOT)
    if "--help" in argv or "-h" in argv:
        TestCLI(argv, "project.test")
    path = Path(decided_by_rank_zero(lambda: str(find_checkpoint(ckpt_path, root, run_name))))
    record = checkpoints.record(path)
    # the training run's Trainer flags are of its machine and its job; what is typed here counts
    base = {key: value for key, value in for_loading(record["config"]).items() if key != "trainer"}
    cli = TestCLI(argv, "project.test", base=base)
    checkpoints.load_weights(cli.model, path)
    flags = trainer_flags(cli) | {
        "logger": False,
        "callbacks": [GracefulStop()],
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = build_trainer(flags)
    (metrics,) = trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    facts = {
        "checkpoint": str(path),
        "run_name": record.get("run_name"),
        "data_source": cli.datamodule.data_source,
        "test_samples": cli.datamodule.num_samples("test"),
        "device": summary.device_name(trainer),
        "precision": trainer.precision,
        "world_size": trainer.world_size,
        **metrics,
    }
    if is_rank_zero():
        print(tables.format_table([facts]))
        if output:
            tables.write_rows(output, facts)
    return 0


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
