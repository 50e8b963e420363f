"""A checkpoint's metrics on the test set. Needs only the checkpoint.

python -m NAME.test
python -m NAME.test --ckpt_path checkpoints/mine/best.ckpt --data.root data --output metrics.json
python -m NAME.test --devices 2 --strategy ddp
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from unbroken import ExactCheckpoint, contract, tables
from unbroken.cli.cli import configure
from unbroken.cli.read_checkpoint import Loaded, load
from unbroken.cli.refusals import refusals_as_errors
from unbroken.cli.trainer_flags import bar_for_a_terminal, build_trainer, trainer_flags
from unbroken.cli.typed import CommandLine
from unbroken.commands.program_of import program_of
from unbroken.errors import UserError
from unbroken.loading.samplers import cut_of, reads_all
from unbroken.mirror.store import is_address, without_password
from unbroken.results.facts import beside_facts, device_name, samples_of
from unbroken.run.final_test import as_test, float32_products, lacks_for_test
from unbroken.run_folder import ROOT, find_checkpoint
from unbroken.stopping import signals
from unbroken.stopping.ranks import decided_by_rank_zero, is_rank_zero, say


def main(package: str, argv: list[str]) -> int:
    """Test as ``argv`` says; returns the exit code."""
    # From now on a signal ends the process also while it waits for other ranks inside a library.
    signals.watch()
    program = program_of(package)
    line = CommandLine(argv)
    asked = line.value("output")
    output = None if asked is None else tables.check_output(asked)
    if line.asks_for_help:
        configure(program, "test", argv)
    path = wanted_checkpoint(line)
    asked_for = line.value("ckpt_path") or ""
    shown = without_password(asked_for) if is_address(asked_for) else str(path)
    loaded = load(program, path, argv, again=True)
    missing = lacks_for_test(loaded.module, loaded.datamodule)
    if missing:
        raise UserError(f"--ckpt_path {shown}: there is nothing to test, {missing}.")
    if loaded.changes:
        say(f"testing {shown} with {', '.join(loaded.changes)}")
    trainer = build(loaded)
    # In float32, like the test at the end of fit. --precision still chooses what autocast does.
    with refusals_as_errors(path), float32_products(), loaded.as_judged(trainer):
        found = trainer.test(
            loaded.module, loaded.datamodule, ckpt_path=path, weights_only=True, verbose=False
        )
    data = loaded.datamodule
    facts: dict[str, Any] = {
        "checkpoint": shown,
        "run_name": loaded.run.get("run_name"),
        "data_source": data.data_source if isinstance(data, contract.NamesSource) else None,
        "test_samples": tested_samples(trainer),
        "device": device_name(trainer),
        "precision": trainer.precision,
        "world_size": trainer.world_size,
    }
    metrics: dict[str, Any] = {}
    for of_one_loader in found:
        metrics |= {as_test(name): value for name, value in of_one_loader.items()}
    facts |= beside_facts(facts, metrics)
    if is_rank_zero():
        if output is not None:
            tables.write_rows(output, facts)
        print(tables.format_table([facts]))
    return 0


def wanted_checkpoint(line: CommandLine) -> Path:
    """The file that the command line means, the same one on all ranks."""
    ckpt_path = line.value("ckpt_path")
    root = Path(line.value("trainer.default_root_dir") or ROOT)
    run_name = line.value("run_name")

    def find() -> str:
        return str(find_checkpoint(ckpt_path, root, run_name))

    return Path(decided_by_rank_zero("checkpoint", find))


def build(loaded: Loaded) -> Trainer:
    """The Trainer of a test. Without a typed precision it is float32, or float64 where the run's
    was.
    """
    flags = trainer_flags(loaded.config)
    flags["logger"] = False
    flags["enable_model_summary"] = False
    flags["enable_progress_bar"] = bar_for_a_terminal(flags)
    flags["precision"] = loaded.precision(flags["precision"])
    flags["callbacks"] = [ExactCheckpoint(None, seed=loaded.config.seed), *flags["callbacks"]]
    return build_trainer(flags)


def tested_samples(trainer: Trainer) -> int | None:
    """Samples that were tested; None where only a part of the test set was tested, or nobody knows
    how many it has.
    """
    loader = trainer.test_dataloaders
    samples = samples_of(loader)
    batch_size, drops_last = cut_of(loader)
    if samples is None or batch_size is None or not reads_all(trainer.limit_test_batches):
        return None
    return samples - samples % batch_size if drops_last else samples
