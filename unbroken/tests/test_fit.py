"""The main job as a first user meets it: one command, a trained and tested model, all files, no
account, no network.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import warnings
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from numerals import callbacks
from numerals.data import MNISTDataModule
from numerals.fit import job as fit
from numerals.model import MLP, MNISTClassifier
from tqdm import tqdm
from unbroken.checkpoint.resume import reached_limit
from unbroken.cli import shown_warnings
from unbroken.cli import start as entry
from unbroken.cli.cli import configure, differences
from unbroken.cli.read_checkpoint import load
from unbroken.commands import test as test_command
from unbroken.results.facts import Summary
from unbroken.results.run_result import RunResult
from unbroken.run.main_job import next_commands
from unbroken.run.progress import EpochLines, closing_lines, stopped_lines
from unbroken.run_folder import choose
from unbroken.stopping.ranks import say

from tests.commands import (
    REPORTED,
    SMALL,
    checkpoint,
    command,
    complete,
    facts_of_a_short_run,
    rows,
    run,
    start,
    summary,
)
from tests.trained import trained_checkpoint

# Of an epoch of SMALL, where no more are needed
TEN_STEPS = ["--data.train_samples", "640"]
FILES = ["best.ckpt", "last.ckpt", "config.yaml", "metrics.csv", "summary.json"]
FILES += ["report.html"]
PROMISED = [
    *(
        "run_name",
        "device",
        "precision",
        "world_size",
        "data_source",
        "train_samples",
        "epochs",
        "fit_seconds",
    ),
    *("start_seconds", "best_epoch", "val/accuracy", "test/accuracy", "test/loss"),
    *("throughput/samples_per_sec", "throughput/data_wait_pct"),
    "memory/peak_rss_gib",
    *("git_commit", "versions", "command"),
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run under 16-mixed, started as a user without account, network, GPU or
    terminal does.
    """
    folder = tmp_path_factory.mktemp("fit")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {
        "HOME": str(folder)
    }
    done = run(
        "fit", *REPORTED, "--precision", "16-mixed", "--run_name", "r", cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    (folder / "stdout.txt").write_text(done.stdout)
    return folder / "checkpoints/r"


@pytest.mark.parametrize("columns", [40, 80])
def test_what_a_run_says_is_broken_between_words_on_a_narrow_terminal(
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = Summary("r", True, "cpu", "32-true", 1, 10, 2, 20)
    facts.advice = "74.2 ms a batch, 1 % of it waiting for data. The command tune batch_size helps."
    facts.notes = ["best.ckpt is only the last: there was no metric to follow, for no validation."]
    facts.metrics = {f"test/metric_number_{number}": 0.5 for number in range(6)}
    facts.monitor = "val/a_metric_that_somebody_named"
    facts.best_score = 0.25
    facts.best_epoch = 1
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "last.ckpt").touch()
    (folder / "best.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    whole = [
        " | ".join(f"a part of the first line {number}" for number in range(4)),
        *closing_lines(facts, folder, "python -m digits.test").splitlines(),
        *stopped_lines("python -m digits.fit", folder, 1_234_567, 1_234_000),
    ]
    say(*whole)
    assert capsys.readouterr().out.splitlines() == whole
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say(*whole)
    told = capsys.readouterr().out
    assert told.split() == "\n".join(whole).split()
    # A command stays whole, to be copied.
    commands = [line for line in whole if line.startswith(" ")]
    assert len(commands) == 2
    broken = told.splitlines()
    assert [line for line in broken if line.startswith(" ")] == commands
    assert max(len(line) for line in broken if line not in commands) <= columns


def test_lines_and_warnings_are_written_above_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_warnings, "SHOWN", set())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with tqdm(total=3, file=sys.stdout, leave=False) as bar:
        say("a line")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            shown_warnings.show_in_one_line()
            warnings.showwarning("a fault", UserWarning, "x.py", 1, file=sys.stdout)
        bar.update()
    # What is left of a line is what stands behind the last return to its start.
    first, second, _ = (line.split("\r")[-1] for line in capsys.readouterr().out.split("\n"))
    assert (first, second) == ("a line", "warning: a fault")


def test_a_run_leaves_all_its_files_and_a_summary(finished: Path) -> None:
    assert all((finished / name).is_file() and not (finished / name).is_symlink() for name in FILES)
    facts = summary(finished)
    assert [key for key in PROMISED if key not in facts] == []
    assert facts["data_source"] == "sample"
    assert (finished.parent / "latest").resolve() == finished
    assert list((finished / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU 16-mixed is 16-mixed")
def test_the_effective_precision_is_recorded(finished: Path) -> None:
    assert summary(finished)["precision"] == "bf16-mixed"
    assert checkpoint(finished / "best.ckpt")["run"]["precision"] == "bf16-mixed"


def test_what_a_person_sees_names_accuracy_time_and_the_next_command(finished: Path) -> None:
    shown = (finished.parents[1] / "stdout.txt").read_text()
    for part in (
        "precision bf16-mixed",
        "235,146 parameters",
        "1,600 training samples",
        "data sample",
        "test/accuracy",
    ):
        assert part in shown
    assert "python -m numerals.test" in shown
    assert "wandb sync" in shown
    assert "epoch 3/3" in shown
    # With all monitors on, nothing is lost in a resume.
    assert "a resumed run" not in shown


def test_a_test_draws_no_bar_into_a_pipe(finished: Path) -> None:
    done = run("test", cwd=finished.parents[1])
    assert done.returncode == 0, done.stderr
    assert "test/accuracy" in done.stdout
    assert "it/s" not in done.stdout + done.stderr
    assert "Testing" not in done.stdout + done.stderr


def test_the_config_repeats_the_run(finished: Path, workplace: Path) -> None:
    flags = ["--run_name", "again"]
    flags += ["--report", "false"]
    assert fit.main(["--config", str(finished / "config.yaml"), *flags]) == 0
    again = Path("checkpoints/again")
    ours, theirs = (checkpoint(path / "last.ckpt")["state_dict"] for path in (again, finished))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert rows(again) == rows(finished)


def test_best_and_last_load_as_data_and_the_best_is_by_validation_accuracy(finished: Path) -> None:
    best, last = checkpoint(finished / "best.ckpt"), checkpoint(finished / "last.ckpt")
    accuracies = [float(row["val/accuracy"]) for row in rows(finished) if "val/accuracy" in row]
    assert summary(finished)["val/accuracy"] == max(accuracies)
    assert summary(finished)["best_epoch"] == accuracies.index(max(accuracies))
    assert last["global_step"] == summary(finished)["steps"] >= best["global_step"]


def test_a_bf16_run_predicts_in_float32_what_it_predicted_when_it_was_tested(
    finished: Path,
) -> None:
    loaded = load(fit, finished / "best.ckpt")
    loaded.datamodule.setup("test")
    test_set = loaded.datamodule.splits["test"]
    with torch.no_grad():
        predicted = loaded.module(test_set.images).argmax(dim=1)
    accuracy = float((predicted == test_set.labels).float().mean())
    assert accuracy == pytest.approx(summary(finished)["test/accuracy"], abs=1e-6)


def test_a_checkpoint_that_lightning_loads_standardizes_images_itself_or_fails_loudly(
    finished: Path,
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(
            RuntimeError, match="Missing key"
        ):  # another network than it was trained with
            MNISTClassifier.load_from_checkpoint(finished / "best.ckpt", weights_only=True)
        # one of the same shapes
        MNISTClassifier.load_from_checkpoint(
            finished / "best.ckpt", network=MLP(dropout=0.5), weights_only=True
        )
    assert [str(each.message)[:37] for each in told].count(
        "the checkpoint's network is another t"
    ) == 2
    module = MNISTClassifier.load_from_checkpoint(
        finished / "best.ckpt", network=MLP(), weights_only=True
    ).eval()
    images = torch.randint(256, (20, 1, 28, 28), dtype=torch.uint8)
    torch.testing.assert_close(
        module(images / 255), load(fit, finished / "best.ckpt").module(images)
    )


def test_printed_commands_take_a_name_with_a_space(workplace: Path) -> None:
    folder = Path("checkpoints/my run").absolute()
    folder.mkdir(parents=True)
    for name in ("best.ckpt", "last.ckpt"):
        (folder / name).touch()
    facts = facts_of_a_short_run("my run")
    commands = next_commands(configure(fit, "fit", []))
    assert commands[0] == "python -m numerals.test"
    assert commands[1:] == ["python -m numerals.predict IMAGE.png"]
    lines = [
        *closing_lines(facts, folder, *commands).splitlines(),
        *stopped_lines("python -m numerals.fit", folder, 5, 5),
    ]
    commands = [shlex.split(line) for line in lines if line.startswith("  python")]
    assert len(commands) >= 2
    assert all({"my run", "checkpoints/my run/best.ckpt"} & {*words} for words in commands)


def test_a_small_loss_keeps_its_digits_in_the_lines_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = EpochLines("fit")
    trainer: Any = SimpleNamespace(
        is_global_zero=True,
        current_epoch=1,
        max_epochs=2,
        callback_metrics={"val/loss": torch.tensor(3.04e-05), "val/accuracy": torch.tensor(0.5)},
    )
    lines.on_train_epoch_start(trainer, LightningModule())
    assert capsys.readouterr().out == "epoch 1/2  val/loss 3.04e-05  val/accuracy 0.5000\n"
    facts = facts_of_a_short_run("small")
    facts.monitor = "val/loss"
    facts.best_score = 3.04e-05
    facts.best_epoch = 0
    facts.metrics = {"test/loss": 5.678e-05, "test/accuracy": 0.25}
    told = closing_lines(facts, tmp_path)
    assert "next:" not in told
    look = "  tensorboard --logdir r/tensorboard"
    assert closing_lines(facts, tmp_path, further=[look]) == f"{told}\nnext:\n{look}"
    assert "test/loss 5.68e-05   test/accuracy 0.2500" in told
    assert "val/loss  3.04e-05   (best, epoch 1 of 1)" in told


def test_a_resumed_run_that_is_stopped_before_it_has_read_its_checkpoint_says_how_to_go_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "last.ckpt").touch()
    told = stopped_lines("python -m numerals.fit", tmp_path, 0, None)
    assert "last.ckpt. To go on:" in told[0]
    assert "--ckpt_path auto" in told[1]


@pytest.mark.nightly
def test_two_launches_in_the_same_second_make_two_folders(workplace: Path) -> None:
    processes = [
        start(command("fit", *SMALL, "--max_epochs", "1"), workplace / f"{i}.txt") for i in range(2)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0, 0]
    folders = [path for path in Path("checkpoints").iterdir() if not path.is_symlink()]
    assert len(folders) == 2
    assert all(
        (folder / name).is_file() for folder in folders for name in FILES if name != "report.html"
    )


def test_auto_starts_goes_on_and_says_when_it_is_finished(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run_name", "a", "--ckpt_path", "auto"]
    assert fit.main([*SMALL, *TEN_STEPS, *arguments, "--max_epochs", "1"]) == 0
    first = checkpoint(Path("checkpoints/a/last.ckpt"))
    assert fit.main(arguments) == 0
    assert "already finished" in capsys.readouterr().out
    assert fit.main([*arguments, "--max_epochs", "2"]) == 0
    second = checkpoint(Path("checkpoints/a/last.ckpt"))
    assert second["global_step"] == 2 * first["global_step"]
    assert second["run"]["run_id"] == first["run"]["run_id"]
    steps = [int(row["step"]) for row in rows(Path("checkpoints/a"))]
    assert steps == sorted(steps)
    assert fit.main([*arguments, "--max_steps", "24"]) == 0  # the saved max_epochs no longer counts
    assert summary(Path("checkpoints/a"))["steps"] == 24
    (note,) = choose(workplace, None, "auto").notes
    assert note.startswith("--ckpt_path auto without --run_name: a new run starts, ")


@pytest.mark.nightly
def test_a_finished_run_stays_as_it_is_where_a_new_start_leaves_no_step(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run_name", "a", "--ckpt_path", "auto"]
    assert fit.main([*SMALL, *arguments, "--max_epochs", "2"]) == 0
    before = {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()}
    steps = checkpoint(Path("checkpoints/a/last.ckpt"))["global_step"]
    capsys.readouterr()
    assert fit.main([*arguments, "--model.lr", "0.5"]) == 0
    told = capsys.readouterr().out
    assert "nothing is left to train with model.lr: " in told
    assert "resuming" not in told
    for option, limit in [("--max_epochs", 1), ("--max_steps", steps)]:
        assert entry.exit_code(fit.main, [*arguments, option, str(limit)]) == 2
        told = capsys.readouterr().err
        assert f"{option} must be more than run a has trained already, got {limit}." in told
    assert entry.exit_code(fit.main, [*arguments, "--max_time", "2h"]) == 2
    assert "duration='2h'" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()} == before


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, None),
        ({"max_steps": 30}, "max_steps"),
        ({"max_steps": 31}, None),
        ({"max_epochs": 3}, "max_epochs"),
        ({"max_epochs": 4}, None),
        ({"max_time": "00:00:01:00"}, "max_time"),
        ({"max_time": {"seconds": 61}}, None),
    ],
)
def test_a_limit_that_leaves_no_step_is_named(settings: dict[str, Any], limit: str | None) -> None:
    saved = {
        "global_step": 30,
        "epoch": 3,
        "callbacks": {"Timer": {"time_elapsed": {"train": 60.0}}},
    }
    no_limits = {"max_epochs": -1, "max_steps": -1, "max_time": None}
    assert reached_limit(saved, no_limits | settings) == limit


def test_an_epoch_that_a_limit_has_cut_is_not_done() -> None:
    saved = {
        "global_step": 25,
        "epoch": 3,
        "callbacks": {},
        "run": {"state": {"inside_epoch": {}}},
    }
    assert reached_limit(saved, {"max_epochs": 3, "max_steps": 30, "max_time": None}) is None


@pytest.mark.nightly
def test_a_run_that_was_made_longer_and_killed_is_not_finished(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run_name", "a", "--ckpt_path", "auto"]
    assert fit.main([*SMALL, *arguments, "--max_epochs", "1"]) == 0
    longer = [*arguments, "--max_epochs", "3"]
    words = [sys.executable, "-m", "tests.interrupted", "70", "SIGTERM", *longer]
    assert complete(words).returncode == 143
    capsys.readouterr()
    assert fit.main(longer) == 0
    assert "already finished" not in capsys.readouterr().out
    assert summary(Path("checkpoints/a"))["steps"] == 75


@pytest.mark.nightly
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # pytest.warns tells again what it has caught
def test_a_resumed_run_stays_with_the_digits_that_auto_found(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = list(MNISTDataModule.files)
    monkeypatch.setattr(MNISTDataModule, "missing", lambda self: missing)
    monkeypatch.setattr(MNISTDataModule, "_download", lambda self: 1 / 0)
    arguments = ["--run_name", "a", "--ckpt_path", "auto"]
    with pytest.warns(UserWarning, match="was not found"):
        assert fit.main([*SMALL, "--data.source", "auto", *arguments, "--max_epochs", "1"]) == 0
    missing.clear()  # from now on the full set is there
    assert fit.main([*arguments, "--max_epochs", "2"]) == 0
    assert summary(Path("checkpoints/a"))["data_source"] == "sample"


def test_a_checkpoint_that_is_only_used_compiles_and_downloads_nothing(
    finished: Path, tmp_path: Path
) -> None:
    contents = checkpoint(finished / "best.ckpt")
    network = {"class_path": "tests.other_tasks.Pretrained", "init_args": {"weights": "DEFAULT"}}
    contents["run"]["config"]["model"]["init_args"] |= {"compile": True, "network": network}
    torch.save(contents, tmp_path / "best.ckpt")
    loaded = load(fit, tmp_path / "best.ckpt", ["--trust_checkpoint", "true"])
    assert type(loaded.module.network).__name__ == "Pretrained"
    assert loaded.config.resolved["model"]["init_args"]["compile"] is False


def test_a_typed_flag_beats_file_and_checkpoint_wherever_it_stands(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("slow.yaml").write_text("model: {lr: 0.5, schedule: constant, warmup_fraction: 0}\n")
    quick = [*SMALL, *TEN_STEPS, "--max_epochs", "1", "--model.lr", "0.001"]
    assert fit.main([*quick, "--config", "slow.yaml", "--run_name", "t"]) == 0
    config = yaml.safe_load(Path("checkpoints/t/config.yaml").read_text())
    assert config["model"]["init_args"]["lr"] == 0.001
    capsys.readouterr()
    resume = ["--run_name", "t", "--ckpt_path", "last", "--max_epochs", "2", "--model.lr", "0.003"]
    assert fit.main([*resume, "--model.optimizer_args.eps", "0.1"]) == 0
    assert "model.lr: 0.001 → 0.003" in capsys.readouterr().out
    for group in checkpoint(Path("checkpoints/t/last.ckpt"))["optimizer_states"][0]["param_groups"]:
        assert group["lr"] == pytest.approx(0.003)
        assert group["eps"] == 0.1
    resume = [
        "--run_name",
        "t",
        "--ckpt_path",
        "last",
        "--max_epochs",
        "3",
        "--model.optimizer",
        "SGD",
    ]
    assert fit.main([*resume, "--model.optimizer_args", "{}"]) == 0
    assert "SGD" in capsys.readouterr().out
    state = checkpoint(Path("checkpoints/t/last.ckpt"))["optimizer_states"][0]
    assert "betas" not in state["param_groups"][0]


def test_a_test_says_which_typed_settings_beat_the_checkpoints(
    finished: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(finished / "best.ckpt")
    for typed, said in {
        "7": [f"testing {path} with data.eval_batch_size: 1000 → 7"],
        "1000": [],
    }.items():
        assert (
            test_command.main("numerals", ["--ckpt_path", path, "--data.eval_batch_size", typed])
            == 0
        )
        assert [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("testing")
        ] == said


@pytest.mark.nightly
def test_another_batch_size_goes_on_from_the_right_sample_and_says_so(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = [sys.executable, "-m", "tests.interrupted", "12", "SIGKILL", *SMALL, "--run_name", "b"]
    assert complete([*killed, "--checkpoint_every", "5"]).returncode == -signal.SIGKILL
    assert checkpoint(Path("checkpoints/b/last.ckpt"))["global_step"] == 10
    assert fit.main(["--run_name", "b", "--ckpt_path", "auto", "--data.batch_size", "50"]) == 0
    assert "goes on from the right sample" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags", [["--max_steps", "90"], ["--max_time", "00:00:10:00", "--max_steps", "90"]]
)
def test_a_length_in_steps_or_time_is_the_only_limit(
    workplace: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    unlimited = SMALL[: SMALL.index("--max_epochs")] + SMALL[SMALL.index("--max_epochs") + 2 :]
    assert fit.main([*unlimited, "--data.train_samples", "640", *flags, "--run_name", "r"]) == 0
    assert summary(Path("checkpoints/r"))["steps"] == 90  # in 9 epochs; the default is 4
    assert "epoch 9  train/loss" in capsys.readouterr().out  # of no number of epochs


def max_epochs_of(flags: list[str]) -> int:
    return int(configure(fit, "fit", flags).trainer["max_epochs"])


@pytest.mark.nightly
def test_no_limit_that_is_spelled_out_is_none(workplace: Path) -> None:
    Path("endless.yaml").write_text("trainer: {max_steps: -1, max_time: null}")
    for flags in (["--max_steps", "-1"], ["--trainer.max_steps=-1"], ["--config", "endless.yaml"]):
        assert max_epochs_of(flags) == 4
    assert max_epochs_of(["--config=endless.yaml", "--max_time", "00:01:00:00"]) == -1
    Path("short.yaml").write_text("trainer: {max_steps: 9}")
    assert max_epochs_of(["--config", "short.yaml"]) == -1
    assert max_epochs_of(["--config", "short.yaml", "--max_steps", "-1"]) == 4


def test_what_is_typed_on_top_of_a_checkpoints_configuration_leaves_that_as_it_was(
    workplace: Path,
) -> None:
    callbacks = lambda config: [type(each).__name__ for each in config.trainer["callbacks"]]  # noqa: E731
    before = configure(fit, "fit", ["--trainer.callbacks+=LearningRateMonitor"]).resolved
    base = deepcopy(before)
    after = configure(fit, "fit", ["--trainer.callbacks+=RichModelSummary"], base)
    assert callbacks(after) == ["LearningRateMonitor", "RichModelSummary"]
    assert base == before
    assert len(differences(base, after.resolved)) == 1


SOME_NIGHTLY = [
    pytest.param("1.0", 30, marks=pytest.mark.nightly),
    pytest.param("4", 12, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("batches", "steps"), [("0.5", 15), *SOME_NIGHTLY])
def test_the_schedule_of_overfit_batches_is_as_long_as_its_run(
    workplace: Path, batches: str, steps: int
) -> None:
    few = [
        *SMALL,
        "--data.train_samples",
        "640",
        "--data.eval_batch_size",
        "100",
        "--run_name",
        "r",
    ]
    assert fit.main([*few, "--overfit_batches", batches, "--model.schedule", "linear"]) == 0
    last = checkpoint(Path("checkpoints/r/last.ckpt"))
    assert last["global_step"] == steps
    assert summary(Path("checkpoints/r"))["train_samples"] == steps // 3 * 64
    assert last["lr_schedulers"][0]["_last_lr"][0] == pytest.approx(0, abs=1e-9)


FLAGS = [
    ["--accumulate_grad_batches", "3", "--gradient_clip_val", "0.5"],
    ["--limit_train_batches", "5", "--limit_val_batches", "1"],
    ["--limit_val_batches", "0"],
    ["--max_steps", "30"],
    ["--max_time", "00:00:00:20"],
    ["--val_check_interval", "7"],
    ["--trainer.precision", "bf16-mixed", "--gradient_clip_val", "1"],
    ["--precision", "bf16-true"],
    ["--precision", "64-true"],
    ["--model.activation_checkpointing", "true", "--model.channels_last", "false"],
    ["--data.num_workers", "1", "--data.batch_size", "100"],
    ["--profiler", "simple"],
    ["--overfit_batches", "2"],
    ["--overfit_batches", "0.2", "--log_every_n_steps", "0", "--data.eval_batch_size", "20"],
    ["--tensorboard", "true"],
    ["--logger", "false"],
    ["--trainer.callbacks", "lightning.pytorch.callbacks.TQDMProgressBar"],
    [
        "--model.optimizer",
        "SGD",
        "--model.optimizer_args.momentum",
        "0.9",
        "--model.schedule",
        "cosine",
    ],
]
# The same in few runs: those of a row do not get in each other's way
TOGETHER = [
    [*FLAGS[0], *FLAGS[5], *FLAGS[10], *FLAGS[11], *FLAGS[16]],
    [*FLAGS[1], *FLAGS[3], *FLAGS[14], *FLAGS[17]],
    [*FLAGS[2], *FLAGS[15], *FLAGS[4]],
    [*FLAGS[6], *FLAGS[9], "--model.network", "ConvNet", "--max_steps", "10"],
    [*FLAGS[7], *FLAGS[13]],
    [*FLAGS[8], *FLAGS[12]],
]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "flags", [*TOGETHER, *(pytest.param(flags, marks=pytest.mark.nightly) for flags in FLAGS)]
)
def test_trainer_flags_work_as_they_are(workplace: Path, flags: list[str]) -> None:
    assert fit.main([*SMALL, "--max_epochs", "2", "--run_name", "f", *flags]) == 0
    assert "test/accuracy" in summary(Path("checkpoints/f"))


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what happens without a GPU")
def test_a_step_without_a_gpu_does_not_look_for_one(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    count = torch.cuda.device_count
    monkeypatch.setattr(torch.cuda, "device_count", lambda: asked.append(1) or count())
    assert fit.main([*SMALL, "--run_name", "g"]) == 0
    assert (
        len(asked) < 50
    )  # of 150 steps; torch's optimizers ask at each where the environment says so


def test_the_default_reaches_99_3_percent_on_full_mnist(workplace: Path, mnist_root: Path) -> None:
    assert fit.main(["--data.root", str(mnist_root), "--run_name", "full"]) == 0
    facts = summary(Path("checkpoints/full"))
    assert facts["data_source"] == "mnist"
    assert facts["train_samples"] == 55_000
    # the median of five seeds is above 0.993 (README); one seed may be two deviations below
    assert facts["test/accuracy"] >= 0.992


def test_the_sample_is_learnt() -> None:
    assert summary(trained_checkpoint().parent)["test/accuracy"] >= 0.97  # in three epochs


@pytest.mark.nightly
def test_the_sample_is_learnt_to_98_percent(workplace: Path) -> None:
    assert fit.main(["--data.source", "sample", "--run_name", "sample"]) == 0
    assert summary(Path("checkpoints/sample"))["test/accuracy"] >= 0.98


@pytest.mark.nightly
def test_of_equally_good_epochs_the_last_is_the_best(workplace: Path) -> None:
    assert (
        fit.main([*SMALL, "--run_name", "still", "--model.lr", "1e-12", "--max_epochs", "2"]) == 0
    )
    still = summary(Path("checkpoints/still"))
    assert still["best_epoch"] == 1
    assert still["epochs"] == 2


@pytest.mark.nightly
def test_help_lists_the_flat_flags_and_imports_nothing_that_it_does_not_need(
    workplace: Path,
) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "numerals.fit", "--help"]
    shown = complete(words)
    assert shown.returncode == 0
    imported = {
        line.rpartition("|")[2].strip()
        for line in shown.stderr.splitlines()
        if "import time:" in line
    }
    assert "lightning.pytorch" in imported
    assert not imported & {"wandb", "onnx", "optuna", "jinja2", "tensorboard"}
    for flag in (
        "--precision",
        "--devices",
        "--strategy",
        "--accelerator",
        "--max_epochs",
        "--run_name",
        "--ckpt_path",
    ):
        assert flag in shown.stdout


def test_h_is_one_screen_of_options_that_exist_and_help_has_those_of_model_and_data(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.exit_code(fit.main, ["-h"]) == 0
    screen = capsys.readouterr().out.splitlines()
    assert len(screen) <= 36
    assert max(map(len, screen)) <= 80
    assert entry.exit_code(fit.main, ["--help"]) == 0
    everything = capsys.readouterr().out
    known = set(re.findall(r"--[\w.]+", everything))
    named = {name for line in screen[4:] for name in re.findall(r"--[\w.]+", line)}
    assert len(named) >= 25
    assert named - known <= {
        "--trainer.callbacks",
        "--trainer.callbacks.monitor",
    }  # shown flat; a class's own
    assert {"--model.lr", "--data.root", "--data.batch_size"} <= known
    assert "torch.nn.LogSigmoid" not in everything, "known subclasses fill ten screens"
    assert (
        entry.exit_code(fit.main, ["--model.network.help", "MLP"]) == 0
    )  # torchvision has one, too
    assert "--network.hidden" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_terminal_of_80_columns_keeps_every_epochs_line_and_says_why_training_ended(
    workplace: Path,
) -> None:
    flags = [
        *SMALL,
        "--max_epochs",
        "9",
        "--run_name",
        "seen",
        "--model.lr",
        "1e-9",
        "--data.batch_size",
        "32",
    ]
    stop = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/accuracy"]
    words = command(
        "fit", *flags, *stop, "--trainer.callbacks.mode", "max", "--trainer.callbacks.patience", "1"
    )
    shown = on_a_terminal(words)
    lines = [part for line in shown.split("\r\n") for part in line.split("\r")]
    assert [line for line in lines if len(line) > 80 and line.startswith(("epoch", "    "))] == []
    assert [
        line.split("  ")[0] for line in lines if line.startswith("epoch") and "%" not in line
    ] == [
        *("epoch 1/9", "epoch 2/9"),
    ]
    (bar, *_) = [line for line in lines if "train/loss" in line and "%" in line]
    assert re.search(r"epoch 1: .*/450 \[\d\d:\d\d<\d\d:\d\d", bar), (
        "the time left of the whole run"
    )
    # It is longer than 80 columns, and broken between words.
    assert (
        "stopped early: Monitored metric val/accuracy did not improve in the last 1 records."
        in " ".join(shown.split())
    )


def on_a_terminal(words: list[str]) -> str:
    """What a command shows on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # what Linux raises at the end
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


@pytest.mark.nightly
def test_the_configs_to_debug_and_to_stop_early_do_what_they_say(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    debug, early, best = (
        ["--config", str(ROOT / "configs" / f"{name}.yaml")]
        for name in ("debug", "early_stopping", "best")
    )
    assert fit.main([*SMALL, *debug, "--run_name", "d"]) == 0
    assert summary(Path("checkpoints/d"))["steps"] == 12  # of three epochs
    flags = [
        "--data.train_samples",
        "640",
        "--model.lr",
        "1e-9",
        "--max_epochs",
        "9",
        "--run_name",
        "e",
    ]
    assert fit.main([*SMALL, *early, *flags]) == 0
    assert (
        "stopped early: Monitored metric val/accuracy did not improve in the last 3"
        in capsys.readouterr().out
    )
    assert summary(Path("checkpoints/e"))["epochs"] == 4
    joined = configure(fit, "fit", [*best, *early]).trainer["callbacks"]
    assert [type(callback).__name__ for callback in joined] == [
        "EMAWeightAveraging",
        "EarlyStopping",
    ]


@pytest.mark.nightly
def test_a_time_limit_that_ends_a_run_is_said(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*SMALL, "--max_epochs", "100000", "--max_time", "00:00:00:01", "--run_name", "short"]
    # A shape of the rate would need the number of steps, which a time limit does not tell.
    flags += ["--accelerator", "cpu", "--model.schedule", "constant"]
    flags += ["--model.warmup_fraction", "0"]
    assert fit.main(flags) == 0
    told = capsys.readouterr().out
    assert "stopped early: --max_time is over." in told
    assert re.search(r"stopped after step [\d,]+; saved in \S+/short/last.ckpt. To go on:", told)
    (command,) = re.findall(
        r"^  python -m numerals.fit (.*) --max_time DD:HH:MM:SS$", told, re.MULTILINE
    )
    assert fit.main([*command.split(), "--max_time", "00:00:00:02"]) == 0
    assert "going on from step" in capsys.readouterr().out


class Counts(Callback):
    """A callback of the user's own that is always on."""

    steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        Counts.steps += 1

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        result.summary.metrics["mine/steps"] = float(self.steps)

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        assert result.folder is not None
        (result.folder / "mine.txt").write_text(str(self.steps))


class FailsAtTheEnd(Callback):
    """A callback whose part of the result fails."""

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        raise OSError("no room")


def test_callbacks_of_yours_that_are_always_on_take_part_in_a_run(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callbacks.always_on() == []
    monkeypatch.setattr("numerals.fit.always_on", lambda: [FailsAtTheEnd(), Counts()])
    with pytest.warns(UserWarning, match=r"FailsAtTheEnd could not .* \(OSError: no room\)"):
        assert fit.main([*SMALL, "--max_epochs", "1", "--run_name", "r"]) == 0
    facts = summary(Path("checkpoints/r"))
    assert facts["mine/steps"] == facts["steps"] == 25
    assert Path("checkpoints/r/mine.txt").read_text() == "25"


@pytest.mark.parametrize(("limit", "samples"), [([], "200"), (["--limit_test_batches", "1"], "")])
def test_a_test_of_a_part_does_not_claim_all_samples(
    finished: Path, workplace: Path, limit: list[str], samples: str
) -> None:
    words = ["--ckpt_path", str(finished / "best.ckpt"), "--data.eval_batch_size", "10"]
    assert test_command.main("numerals", [*words, *limit, "--output", "out.csv"]) == 0
    header, row = Path("out.csv").read_text().splitlines()
    facts = dict(zip(header.split(","), row.split(","), strict=True))
    assert facts.get("test_samples", "") == samples
