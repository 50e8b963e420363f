"""Promise 2, where a run has chosen something by itself: the choice is made once, by rank zero, and
belongs to the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from numerals.fit import job as fit
from unbroken import ExactCheckpoint
from unbroken.checkpoint.not_exact import what_is_not_exact
from unbroken.chosen import Chosen
from unbroken.cli import trainer_flags
from unbroken.cli.cli import configure
from unbroken.machine import hardware, threads

from tests.commands import CPU2, TINY, assert_same_run, checkpoint, command, complete, run_ranks
from tests.plain_module import Regression
from tests.stopped_runs import SHORT, error_of, resume, train, train_until

# Sixteen steps
STEPS = [*TINY, *SHORT, "--data.batch_size", "8", "--max_epochs", "2"]
AUTO = [*STEPS, "--precision", "auto"]


def measure(patch: pytest.MonkeyPatch, cost: float) -> None:
    """Let this machine be one that measures this cost of half precision."""
    patch.setattr(hardware, "cpu_computes", lambda _: True)
    patch.setattr(hardware, "cost_on_cpu", lambda _: cost)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two CPU threads compute, and the user has not said how many should."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(threads.OURS, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.nightly
def test_five_resumes_train_in_the_precision_that_was_measured_first(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(monkeypatch, 6.0)
    undisturbed = train("undisturbed", *AUTO)
    train_until(2, "stopped", *AUTO)
    for number, step in enumerate((4, 6, 9, 12)):
        # Half precision seems to be worth it at every second start.
        measure(monkeypatch, (0.5, 6.0)[number % 2])
        train_until(step, "stopped", "--ckpt_path", "auto", *AUTO)
    measure(monkeypatch, 0.5)
    stopped = resume("stopped", *AUTO)
    assert checkpoint(stopped / "last.ckpt")["run"]["precision"] == "32-true"
    assert_same_run(undisturbed, stopped)


def test_a_typed_precision_wins_over_the_one_that_the_run_chose() -> None:
    words = [*AUTO, "--precision", "64-true"]
    config = configure(fit, "fit", words, chosen=Chosen({"precision": "bf16-mixed"}))
    assert config.trainer["precision"] == "64-true"


@pytest.mark.nightly
def test_two_ranks_train_in_the_precision_that_rank_zero_has_measured(workplace: Path) -> None:
    typed = [*STEPS, "--precision", "bf16-mixed", "--run_name", "typed"]
    told = run_ranks("fit", *typed)
    assert told.returncode == 0, told.stderr
    environment = {**os.environ, "COSTS": "0.5,6.0"}
    told = run_ranks("tests.measured_anew", *AUTO, "--run_name", "auto", env=environment)
    assert told.returncode == 0, told.stderr
    assert precisions() == ["bf16-mixed", "bf16-mixed"]
    assert_same_run(Path("checkpoints/typed"), Path("checkpoints/auto"))


@pytest.mark.nightly
def test_ranks_that_lightning_starts_train_with_what_rank_zero_has_chosen(workplace: Path) -> None:
    words = command("fit", *AUTO, *CPU2, "--run_name", "run")
    words[2] = "tests.measured_anew"
    for costs, more in (("6.0,0.5", []), ("0.5,0.5", ["--ckpt_path", "auto"])):
        longer = ["--max_epochs", "3"] if more else []
        environment = {**os.environ, "COSTS": costs}
        told = complete([*words, *more, *longer], env=environment)
        assert told.returncode == 0, told.stderr
        assert precisions() == ["32-true", "32-true"]


def precisions() -> list[str]:
    """What two ranks have trained in."""
    return [Path(f"rank-{rank}.txt").read_text().split()[0] for rank in (0, 1)]


@pytest.mark.nightly
def test_a_resume_where_there_are_other_cores_computes_with_the_threads_of_the_first_start(
    workplace: Path, two_threads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*STEPS, "--model.network.hidden", "[256, 128]", "--data.batch_size", "32"]
    undisturbed = train("undisturbed", *flags)
    train_until(2, "stopped", *flags)
    torch.set_num_threads(1)
    capsys.readouterr()
    stopped = resume("stopped", *flags)
    assert torch.get_num_threads() == 2
    assert (
        "2 CPU threads compute, as when this run began: another number rounds sums differently."
        " This machine would take 1: OMP_NUM_THREADS=1"
    ) in capsys.readouterr().out.splitlines()
    assert_same_run(undisturbed, stopped)


def test_a_number_of_threads_that_the_user_sets_wins_and_is_part_of_the_run_from_then_on(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    chosen = Chosen({"threads": 1, "ranks": 1})
    trainer_flags.keep_threads(chosen, ranks=1)
    assert torch.get_num_threads() == 2
    assert chosen.values["threads"] == 2


def test_what_a_process_above_shares_out_is_not_the_users_number_of_threads(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in threads_of_a_process_above().items():
        monkeypatch.setenv(name, value)
    trainer_flags.keep_threads(Chosen({"threads": 1, "ranks": 1}), ranks=1)
    assert torch.get_num_threads() == 1


def threads_of_a_process_above() -> dict[str, str]:
    """The environment in which a sweep, whose threads nobody has set, starts one of two trials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "4")
        patch.setenv(threads.OURS, "4")
        return threads.share(2)


def test_a_number_of_threads_that_this_machine_cannot_have_stays_that_of_the_run(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    chosen = Chosen({"threads": 9, "ranks": 1})
    trainer_flags.keep_threads(chosen, ranks=1)
    assert torch.get_num_threads() == 2
    assert chosen.values["threads"] == 9
    trainer_flags.keep_threads(Chosen({"threads": 8, "ranks": 1}), ranks=1)
    assert torch.get_num_threads() == 8


def test_another_number_of_ranks_shares_the_cores_anew(two_threads: None) -> None:
    chosen = Chosen({"threads": 1, "ranks": 2})
    trainer_flags.keep_threads(chosen, ranks=1)
    assert torch.get_num_threads() == 2
    assert chosen.values == {"threads": 2, "ranks": 1}


def test_a_script_that_goes_on_with_other_threads_is_told_so(
    workplace: Path, two_threads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for epochs, count in ((1, 2), (2, 1)):
        torch.set_num_threads(count)
        keep = ExactCheckpoint("run", monitor="val_loss", mode="min")
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[keep],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Regression(0), ckpt_path=keep.resume_from)
    assert (
        "1 CPU threads compute, and this run had 2: they round sums differently, so the resume is"
        " not exact. OMP_NUM_THREADS=2 makes it exact."
    ) in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("began", "typed", "gpus", "kept"),
    [
        # Lightning would take the GPUs that are here now, and all of them.
        ({"accelerator": "cpu"}, {}, 4, {"accelerator": "cpu"}),
        ({"accelerator": "cuda", "devices": 2}, {}, 4, {"accelerator": "cuda", "devices": 2}),
        # What is not here cannot be kept.
        ({"accelerator": "cuda", "devices": 4}, {}, 2, {"accelerator": "cuda"}),
        ({"accelerator": "cuda", "devices": 4}, {}, 0, {}),
        # What is typed wins.
        ({"accelerator": "cuda", "devices": 2}, {"accelerator": "cpu"}, 4, {}),
        ({"accelerator": "cuda", "devices": 2}, {"devices": 3}, 4, {"accelerator": "cuda"}),
        ({}, {}, 4, {}),
    ],
)
def test_auto_means_the_devices_with_which_the_run_began(
    began: dict[str, Any],
    typed: dict[str, Any],
    gpus: int,
    kept: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
    flags = {"accelerator": "auto", "devices": "auto", **typed}
    expected = {**flags, **kept}
    trainer_flags.keep_devices(flags, Chosen(began))
    assert flags == expected
    told = capsys.readouterr().out
    assert ("began on cuda, which is not here" in told) == (gpus == 0 and bool(began))
    assert ("began on the CPU, and stays there" in told) == (began == {"accelerator": "cpu"})


@pytest.mark.parametrize(("device", "says"), [("cuda", True), ("cpu", False)])
def test_a_run_whose_algorithms_are_measured_at_every_start_says_so(
    device: str, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    trainer: Any = SimpleNamespace(
        callbacks=[],
        world_size=1,
        strategy=SimpleNamespace(root_device=torch.device(device), model=None),
        reload_dataloaders_every_n_epochs=0,
        _val_check_time_interval=None,
    )
    line = (
        "a resume is not exact with --benchmark true: cuDNN measures at every start which of its"
        " algorithms are the fastest."
    )
    assert what_is_not_exact(trainer) == [line] * says


def test_a_run_records_the_device_that_auto_has_found(two_threads: None) -> None:
    flags: dict[str, Any] = {"accelerator": "auto", "devices": "auto", "callbacks": None}
    chosen = Chosen()
    trainer = trainer_flags.build_trainer({**flags, "logger": False}, chosen)
    found = {"accelerator": trainer.strategy.root_device.type, "threads": 2}
    assert found.items() <= chosen.values.items()


def test_choices_of_a_kind_that_no_run_makes_are_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_until(2, "run", *STEPS)
    saved = checkpoint(run / "last.ckpt")
    saved["run"]["chosen"]["threads"] = "many"
    torch.save(saved, run / "last.ckpt")
    line = error_of(capsys, "--run_name", "run", "--ckpt_path", "last", main=fit.main)
    assert "run.chosen.threads" in line
