"""The main job: train, keep the best checkpoint, test it once at the end, print a summary.

python -m project.fit
python -m project.fit --precision 16-mixed
python -m project.fit --config configs/fast.yaml --data.root data
python -m project.fit --run_name mine --ckpt_path auto
torchrun --nproc_per_node 4 -m project.fit --strategy ddp
"""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; returns the exit code."""
    import os

    from project.errors import UserError
    from project.imports import quick_imports

    with quick_imports():
        from project import summary, training
        from project.callbacks.throughput import ThroughputMonitor
        from project.cli import read_configuration
        from project.ranks import is_rank_zero
        from project.trainer import find, make_trainer

    cli, run, changes = read_configuration(argv, "project.fit")
    speaking = is_rank_zero()
    for line in [*run.notes, *([f"resuming {run.name} with {', '.join(changes)}"] if changes else [])]:
        if speaking:
            print(line, flush=True)
    if run.finished and not any(line.startswith("trainer.max_") for line in changes):
        if speaking:
            print(f"run {run.name} is already finished: see {os.path.relpath(run.folder)}/summary.json.")
        return 0
    try:
        if speaking:
            run.create()
        trainer = make_trainer(cli, run)
        facts = training.train(cli, run, trainer)
    except UserError:
        run.discard()
        raise
    if trainer.is_global_zero:
        advice = find(trainer, ThroughputMonitor).advice()
        print(summary.closing_lines(facts, run.folder, training.wandb_folder(run), advice))
    return 0


if __name__ == "__main__":
    from project.entry import run

    run(main)
