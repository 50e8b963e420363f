from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
import torch
import yaml
from matplotlib.figure import Figure
from numerals.fit import job as fit
from PIL import Image
from unbroken.cli import start as entry
from unbroken.errors import UserError
from unbroken.machine import threads

from tests import made_data
from tests.commands import Process, complete, popen
from tests.promises import ROOT

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402
from unbroken.commands.sweep import command as sweep  # noqa: E402
from unbroken.commands.sweep import results, trials  # noqa: E402
from unbroken.commands.sweep import study as studies  # noqa: E402
from unbroken.commands.sweep.space import Space, read_space  # noqa: E402
from unbroken.commands.sweep.trials import RunningTrial, environment_of  # noqa: E402

SPACE = """
metric: {name: val/accuracy, goal: maximize}
parameters:
  model.lr: {distribution: log_uniform_values, min: 0.00000001, max: 0.01}
early_terminate: {type: hyperband, min_iter: 1}
"""


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Options of a sweep whose trials take a second or two, besides starting up."""
    made_data.make_tensor_files(tmp_path / "my data")
    (tmp_path / "space.yaml").write_text(SPACE)
    config = str(ROOT / "configs" / "examples" / "tensor_dataset.yaml")
    data = ["--config", config, "--data.root", str(tmp_path / "my data"), "--data.batch_size", "20"]
    short = ["--max_epochs", "3", "--accelerator", "cpu", "--model.schedule", "constant"]
    short += ["--report", "false"]
    return [
        "--space",
        str(tmp_path / "space.yaml"),
        "--root",
        str(tmp_path),
        "--name",
        "lr",
        *data,
        *short,
    ]


def run(words: list[str]) -> subprocess.Popen[str]:
    packages = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": packages, "WANDB_MODE": "disabled"}
    command = [sys.executable, "-m", "numerals.sweep", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT
    )


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep in this process starts its trials as forks."""

    def forked(words: list[str], stdout: Any, env: dict[str, str], **_: Any) -> Process:
        return popen(
            words, stdout.fileno(), stdout.fileno(), env={**env, "WANDB_MODE": "disabled"}, cwd=ROOT
        )

    monkeypatch.setattr(
        trials, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": forked})
    )


@pytest.mark.usefixtures("forked_trials")
def test_a_sweep_ends_with_a_table_a_picture_and_the_command_of_its_best_trial(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*flags, "--trials", "3", "--jobs", "2", "--output", str(tmp_path / "trials.json")]
    assert entry.exit_code(partial(sweep.main, "numerals"), words) == 0
    told = capsys.readouterr().out
    assert {t.state.name for t in open_study(tmp_path).trials} <= {"COMPLETE", "PRUNED"}, told
    assert_complete(tmp_path, told, 3)


@pytest.mark.nightly  # the one above with fresh processes and a kill
@pytest.mark.parametrize("count", [2, 8])
def test_a_sweep_survives_a_kill_stops_early_and_beats_its_worst_start(
    tmp_path: Path, flags: list[str], count: int
) -> None:
    output = str(tmp_path / "trials.json")
    trials_and_jobs = ["--trials", str(count), "--jobs", "2"]
    killed = run([*flags, *trials_and_jobs])
    while (
        not (tmp_path / "lr" / f"trial-{min(3, count - 1):03}" / "metrics.csv").exists()
        and killed.poll() is None
    ):
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    begun = open_study(tmp_path).trials
    assert [t for t in begun if t.state.name == "WAITING"], "to go on"

    # the same name is enough to go on, even while the orphaned trials are still saving
    told, _ = (job := run([*flags[:6], *trials_and_jobs, "--output", output])).communicate(
        timeout=240
    )
    assert job.returncode == 0, told
    assert f"going on with lr: {len(begun)} of {count} trials were begun." in told
    found = open_study(tmp_path).trials
    assert len(found) == count
    assert {t.state.name for t in found} <= {"COMPLETE", "PRUNED"}, told
    for before, after in zip(begun, found, strict=False):
        assert before.params == after.params
    assert_complete(tmp_path, told, count)


def assert_complete(tmp_path: Path, told: str, count: int) -> None:
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("lr/trial-*/summary.json")]
    assert summaries
    assert not [name for summary in summaries for name in summary if name.startswith("test/")]
    tested = re.search(r"best: +python -m numerals\.test --ckpt_path (\S+)", told)
    assert tested
    assert Path(tested[1]).is_file()
    rows = json.loads((tmp_path / "trials.json").read_text())
    assert len(rows) == count
    seconds = {f"trial-{row['trial']:03}": row["seconds"] for row in rows}
    assert {
        summary["run_name"]: summary["fit_seconds"] for summary in summaries
    }.items() <= seconds.items()
    assert [row["val/accuracy"] for row in rows] == sorted(
        (row["val/accuracy"] for row in rows), reverse=True
    )
    first = next(row for row in rows if row["trial"] == 0)
    worst_start = min(row["val/accuracy"] for row in rows if row["trial"] < 3)
    assert rows[0]["val/accuracy"] > worst_start, first
    words = shlex.split(told.rstrip().splitlines()[-1])
    assert words[:4] == ["python", "-m", "numerals.fit", "--config"]
    assert str(tmp_path / "my data") in words
    # What is trained follows the metric by which it has won, and is no trial.
    assert words[-4:] == ["--monitor", "val/accuracy", "--mode", "max"]
    assert "--max_epochs" not in words
    assert "to train it without the trials' limits (--max_epochs 3):" in told
    with Image.open(tmp_path / "lr" / "sweep.png") as picture:
        assert picture.width > 600
        assert len(picture.convert("RGB").getcolors(1_000_000)) > 50


def open_study(tmp_path: Path) -> optuna.Study:
    space = read_space(tmp_path / "space.yaml")
    return studies.open_study(tmp_path / "lr", space, trials=8, seed=0)


def test_a_trial_that_a_killed_sweep_left_goes_on_with_its_own_values(tmp_path: Path) -> None:
    space = Space({"lr": FloatDistribution(0.0, 1.0)})
    study = studies.open_study(tmp_path, space, trials=8, seed=0)
    finished, cut_off = study.ask(space.parameters), study.ask(space.parameters)
    half_drawn = study.ask()
    cut_off.report(0.5, 0)
    study.tell(finished, 0.25)
    values = [trial.params for trial in study.trials]
    assert values[2] == {}

    for seed in (1, 2):  # killed again, before it has asked
        study = studies.open_study(tmp_path, space, trials=8, seed=seed)
        assert [t.state.name for t in study.trials] == ["COMPLETE", "WAITING", "WAITING"]
    trial, drawn = study.ask(space.parameters), study.ask(space.parameters)
    assert (trial.number, drawn.number) == (cut_off.number, half_drawn.number)
    assert trial.params == values[1]
    assert drawn.params.keys() == {"lr"}, "killed before all its values were drawn"
    assert study.ask(space.parameters).number == 3
    trial.report(0.75, 1)
    study.tell(trial.number, 0.75)
    assert study.trials[trial.number].intermediate_values == {0: 0.5, 1: 0.75}
    assert [t.state.name for t in study.trials] == ["COMPLETE", "COMPLETE", "RUNNING", "RUNNING"]


@pytest.mark.parametrize("method", ["bayes", "random"])
def test_a_sweep_that_goes_on_draws_what_it_has_not_drawn(tmp_path: Path, method: Any) -> None:
    space = Space({"lr": FloatDistribution(0.0, 1.0)}, method=method)
    for _ in range(4):  # two trials, then two more, ...
        study = studies.open_study(tmp_path, space, trials=20, seed=0)
        for _ in range(2):
            asked = studies.next_trial(study, space)
            study.tell(asked, 0.5)
    drawn = [trial.params["lr"] for trial in study.trials]
    assert len(set(drawn)) == 8, drawn


def test_a_new_sweep_with_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    space = Space({"lr": FloatDistribution(0.0, 1.0)})
    drawn = []
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        (tmp_path / name).mkdir()
        study = studies.open_study(tmp_path / name, space, trials=20, seed=seed)
        drawn.append(studies.next_trial(study, space).params["lr"])
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_grid_tries_every_setting_once_also_after_a_kill(tmp_path: Path) -> None:
    text = "{method: grid, parameters: {size: {values: [8, 16, 32]}, num: {min: 1, max: 2}}}"
    (tmp_path / "s.yaml").write_text(text)
    space = read_space(tmp_path / "s.yaml")
    assert studies.number_of_trials(space, 20) == 6
    assert studies.number_of_trials(space, 4) == 4
    study = studies.open_study(tmp_path, space, trials=20, seed=0)
    for number in range(3):
        asked = studies.next_trial(study, space)
        if number != 1:
            study.tell(asked, 0.5)
    # The sweep is killed while its second trial runs.
    study = studies.open_study(tmp_path, space, trials=20, seed=0)
    interrupted = studies.next_trial(study, space)
    assert interrupted.params == {"size": 8, "num": 2}
    while studies.has_next_trial(study, space, 20):
        study.tell(studies.next_trial(study, space), 0.5)
    tried = [(trial.params["size"], trial.params["num"]) for trial in study.trials]
    assert tried == [(8, 1), (8, 2), (16, 1), (16, 2), (32, 1), (32, 2)]


def test_a_value_reaches_fit_as_it_would_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials.subprocess, "Popen", FakeProcess)
    text = "{parameters: {a: {values: [null]}, b: true, c: {values: [[1, 2]]}, d: 1e-3, e: None}}"
    (tmp_path / "s.yaml").write_text(text)
    space = read_space(tmp_path / "s.yaml")
    study = studies.open_study(tmp_path, space, trials=1, seed=0)
    running = RunningTrial(studies.next_trial(study, space), space, tmp_path, ["numerals.fit"], {})
    typed = [word for word in running.process.command if re.match("--[a-e]=", word)]
    assert typed == ["--a=null", "--b=true", "--c=[1, 2]", "--d=1e-3", "--e=None"]


def test_what_is_not_used_of_a_sweep_file_is_named(tmp_path: Path) -> None:
    text = SPACE + "program: train.py\nrun_cap: 7\n"
    (tmp_path / "s.yaml").write_text(text.replace("goal:", "target: 0.9, goal:"))
    assert read_space(tmp_path / "s.yaml").notes == [
        "the best trial has the largest val/accuracy.",
        f"{tmp_path}/s.yaml: program, run_cap: for W&B alone, not used here.",
        f"{tmp_path}/s.yaml: metric.target: not used here.",
        "a trial that is worse than the median of the others is stopped early, "
        "after 1 epoch or later (not by `type: hyperband`).",
    ]


@pytest.mark.parametrize(
    ("metric", "goal", "note"),
    [
        ("{name: val/loss}", "minimize", "smallest val/loss: W&B minimizes where metric has no"),
        ("{name: val/f1, goal: maximize}", "maximize", "largest val/f1."),
        ("{goal: minimize}", "minimize", "smallest val/accuracy."),
        ("{}", "maximize", "largest val/accuracy."),
    ],
)
def test_a_metric_without_a_goal_is_minimized_as_in_wandb_and_the_sweep_says_so(
    metric: str, goal: str, note: str, tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text(f"{{parameters: {{x: 1}}, metric: {metric}}}")
    space = read_space(tmp_path / "s.yaml")
    assert space.goal == goal
    assert space.notes[0].startswith(f"the best trial has the {note}")


def test_a_sweep_needs_no_symbolic_links_and_no_signal_to_a_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("this file system has no symbolic links")

    started: list[dict[str, Any]] = []

    class Noted(FakeProcess):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(command)
            started.append(options)

    monkeypatch.setattr(os, "symlink", refused)
    monkeypatch.setattr(trials.subprocess, "Popen", Noted)
    monkeypatch.setattr(trials.sys, "platform", "win32")
    space = Space({"lr": FloatDistribution(0.0, 1.0)})
    study = studies.open_study(tmp_path, space, trials=1, seed=0)
    RunningTrial(studies.next_trial(study, space), space, tmp_path, ["numerals.fit"], {})
    assert len(study.trials) == 1
    assert started[0]["preexec_fn"] is None


def test_a_sweep_killed_while_it_wrote_goes_on_at_once(tmp_path: Path) -> None:
    space = Space({"lr": FloatDistribution(0.0, 1.0)})
    studies.open_study(tmp_path, space, trials=1, seed=0)
    (tmp_path / "journal.log.lock").touch()
    began = time.monotonic()
    studies.next_trial(studies.open_study(tmp_path, space, trials=1, seed=0), space)
    assert time.monotonic() - began < 20  # Optuna itself would wait for 30 s


class FakeProcess:
    """A process of fit; ``poll`` gives its exit code once it is set."""

    exit_code: int | None = None

    def __init__(self, command: list[str], **_: Any) -> None:
        self.command, self.signals = command, []

    def poll(self) -> int | None:
        return self.exit_code

    def terminate(self) -> None:
        self.signals.append(signal.SIGTERM)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningTrial:
    """The fourth trial of a sweep; those before it had an error of 0.1 in each of two epochs."""
    monkeypatch.setattr(trials.subprocess, "Popen", FakeProcess)
    space = Space({"model.lr": FloatDistribution(0.0, 1.0)}, "val/error", goal="minimize")
    study = studies.open_study(tmp_path, space, trials=8, seed=0)
    for _ in range(3):
        good = study.ask()
        for epoch in (0, 1):
            good.report(0.1, epoch)
        study.tell(good, 0.1)
    fit_words = ["numerals.fit", "--max_epochs", "2"]
    running = RunningTrial(study.ask(space.parameters), space, tmp_path, fit_words, {})
    running.folder.mkdir()
    (running.folder / "config.yaml").write_text(
        yaml.safe_dump({"trainer": {"max_epochs": 2, "max_steps": -1}})
    )
    return running


def write_metrics(trial: RunningTrial, *rows: str) -> None:
    (trial.folder / "metrics.csv").write_text(
        "\n".join(["step,epoch,train/loss,val/error", *rows]) + "\n"
    )


def test_every_trial_follows_the_metric_of_the_sweep_file(trial: RunningTrial) -> None:
    words = " ".join(trial.process.command)
    assert "-m numerals.fit --limit_test_batches=0 --max_epochs 2 --model.lr=" in words
    assert "--monitor val/error --mode min " in words
    assert "--run_name trial-003 --ckpt_path auto" in words


def test_an_epoch_is_reported_once_it_is_over_by_its_last_value(trial: RunningTrial) -> None:
    write_metrics(trial, "4,0,2.0,0.05", "9,0,1.5,0.04")
    assert not trial.watch()
    assert trial.reported == set()
    write_metrics(trial, "4,0,2.0,0.05", "9,0,1.5,0.04", "14,1,1.5,")
    trial.watch()
    assert trial.trial.study.trials[3].intermediate_values == {0: 0.04}
    assert not trial.process.signals  # it is better than those before


def test_a_hopeless_trial_is_stopped_and_is_told_as_stopped_early(
    trial: RunningTrial, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(trial, "9,0,1.5,0.9", "14,1,1.5,")
    assert [trial.watch(), trial.watch()] == [False, False]
    assert trial.process.signals == [signal.SIGTERM]
    trial.process.exit_code = 143
    assert trial.watch()
    assert trial.trial.study.trials[3].state.name == "PRUNED"
    assert capsys.readouterr().out.endswith("stopped after 1 epochs\n")


@pytest.mark.parametrize("text", ["step,epoch\n1,no number\n", "step,epoch\n1,2,3\n", "\0" * 2**21])
def test_rows_that_no_trial_has_written_are_none(trial: RunningTrial, text: str) -> None:
    (trial.folder / "metrics.csv").write_text(text)
    assert trial.rows() == []
    assert not trial.watch()


def test_no_signal_is_sent_after_the_training(trial: RunningTrial) -> None:
    write_metrics(trial, "9,0,1.5,0.9", "19,1,1.5,0.9", "20,2,,")
    trial.watch()
    assert trial.reported == {0, 1}
    assert not trial.process.signals


@pytest.mark.parametrize("exit_code", [143, 130, -15])
def test_a_trial_stopped_by_a_signal_after_its_training_counts_as_finished(
    trial: RunningTrial, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(trial, "9,0,1.5,0.3", "19,1,1.5,0.2")
    trial.process.exit_code = exit_code
    assert trial.watch()
    assert trial.trial.study.trials[3].state.name == "COMPLETE"
    assert trial.trial.study.trials[3].value == 0.2
    assert capsys.readouterr().out.endswith("done\n")


def test_a_trials_seconds_are_those_of_its_training_in_all_its_parts(trial: RunningTrial) -> None:
    write_metrics(trial, "9,0,1.5,0.3", "19,1,1.5,0.2")
    torch.save({"callbacks": {"RunTimer": {"seconds": 75.5}}}, trial.folder / "last.ckpt")
    trial.process.exit_code = 0
    trial.watch()
    rows = {row["trial"]: row for row in results.result_rows(trial.trial.study, trial.space)}
    assert (rows[3]["seconds"], rows[3]["state"]) == (75.5, "done")
    assert "seconds" not in rows[0]  # nothing tells


def test_a_trial_killed_in_training_has_failed(trial: RunningTrial) -> None:
    write_metrics(trial, "9,0,1.5,0.3", "14,1,1.5,")
    trial.process.exit_code = 143
    trial.watch()
    assert trial.trial.study.trials[3].state.name == "FAIL"


def test_a_trial_that_is_refused_once_others_have_trained_has_failed_alone(
    trial: RunningTrial, capsys: pytest.CaptureFixture[str]
) -> None:
    trial.log_path.write_text("error: the GPU has no memory left.\n")
    trial.process.exit_code = 2
    assert trial.watch()
    assert trial.trial.study.trials[3].state.name == "FAIL"
    assert capsys.readouterr().out.endswith("failed (the GPU has no memory left.)\n")


def test_the_first_trial_that_is_refused_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials.subprocess, "Popen", FakeProcess)
    space = Space({"lr": FloatDistribution(0.0, 1.0)})
    study = studies.open_study(tmp_path, space, trials=2, seed=0)
    for _ in range(2):
        running = RunningTrial(
            studies.next_trial(study, space), space, tmp_path, ["numerals.fit"], {}
        )
        running.log_path.write_text("error: unknown option --lrr.\n")
        running.process.exit_code = 2
        with pytest.raises(UserError, match="unknown option --lrr"):
            running.watch()


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("Traceback ...\nValueError: 3 is odd\n\n", " trial-000: ValueError: 3 is odd"),
        ("error: no disk\nwandb: done\n", " trial-000: no disk"),
        ("", ""),
    ],
)
def test_a_sweep_of_which_every_trial_failed_says_why_the_first_did(
    tmp_path: Path, log: str, told: str
) -> None:
    study = optuna.create_study()
    for number in range(2):
        study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
        (tmp_path / f"{trials.TRIAL.format(number)}.log").write_text(log)
    space = Space({})
    with pytest.raises(UserError) as error:
        sweep.say_what_is_best("numerals", study, tmp_path, space, [])
    assert str(error.value) == f"no trial finished; see {tmp_path}/*.log." + told


def test_a_metric_that_is_not_logged_ends_the_sweep_with_those_that_are(
    trial: RunningTrial,
) -> None:
    (trial.folder / "metrics.csv").write_text("step,epoch,train/loss,val/loss\n9,0,2.0,1.0\n")
    trial.process.exit_code = 0
    with pytest.raises(
        UserError, match=r"metric val/error is not logged. trial-003 logged train/loss, val/loss\."
    ):
        trial.watch()


def test_a_value_that_is_no_number_is_no_result(trial: RunningTrial) -> None:
    write_metrics(trial, "9,0,1.5,nan", "19,1,1.5,nan")
    trial.process.exit_code = 0
    trial.watch()
    assert trial.trial.study.trials[3].state.name == "FAIL"


def test_a_resumed_sweep_waits_for_the_process_that_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.wait_until_free(tmp_path / "none")  # no such run yet
    holder = filelock.FileLock(tmp_path / ".lock", thread_local=False)
    holder.acquire()
    threading.Timer(0.5, holder.release).start()
    trials.wait_until_free(tmp_path)
    with filelock.FileLock(tmp_path / ".lock"):
        monkeypatch.setattr(trials, "FREE_SECONDS", 0.3)
        with pytest.raises(
            UserError, match="still written by a process of the sweep that was killed"
        ):
            trials.wait_until_free(tmp_path)


def test_trials_of_a_sweep_share_the_cores_and_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "available_cores", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("OMP_NUM_THREADS", threads.OURS):
        monkeypatch.setenv(name, "4")
    environment = environment_of(3, 2, tmp_path / "lr")
    assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("2", "1")
    assert environment["WANDB_RUN_GROUP"] == "lr"
    assert environment_of(0, 8, tmp_path)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the user's
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    environment = environment_of(0, 2, tmp_path)
    assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("3", "5")
    # SLURM sets a list for every job.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, GPU-a1")
    given = [environment_of(slot, 2, tmp_path)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert given == ["7", "GPU-a1", "7"]


def test_the_picture_shows_every_trial(tmp_path: Path) -> None:
    space = Space(
        {"lr": FloatDistribution(0.1, 1.0, log=True), "size": CategoricalDistribution([1, 2])}
    )
    study = studies.open_study(tmp_path, space, trials=8, seed=0)
    for number in range(6):
        asked = study.ask(space.parameters)
        for epoch in range(3 if number % 2 else 1):
            asked.report(0.5 + 0.1 * number - 0.3 / (epoch + 1), epoch)
        study.tell(
            asked, **({"values": 0.5} if number % 2 else {"state": optuna.trial.TrialState.PRUNED})
        )
    results.draw(tmp_path / "sweep.png", study, space, "six trials")
    with Image.open(tmp_path / "sweep.png") as picture:
        assert picture.width > 900
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1_000_000)}
    assert {(0xC1, 0x27, 0x2D), (0x33, 0x65, 0x8A), (0xB0, 0xB7, 0xBF)} <= colours


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("low", "high"), [(0.0012, 0.011), (0.001, 0.1), (0.002, 0.009), (1e-8, 1.0)]
)
def test_no_label_of_the_picture_covers_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: float, high: float
) -> None:
    space = Space(
        {"lr": FloatDistribution(low, high, log=True), "decay": FloatDistribution(low, high)}
    )
    study = studies.open_study(tmp_path, space, trials=3, seed=0)
    for place in (0.3, 0.9):
        value = low + place * (high - low)
        study.enqueue_trial({"lr": value, "decay": value})
        asked = study.ask(space.parameters)
        asked.report(place, 0)
        study.tell(asked, place)
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    results.draw(tmp_path / "sweep.png", study, space, "two trials")
    drawn[0].draw_without_rendering()
    axis = drawn[0].axes[1]
    left, right = axis.get_xlim()
    assert (left, right) == (low, high)
    texts = [tick.label1 for tick in (*axis.xaxis.get_major_ticks(), *axis.xaxis.get_minor_ticks())]
    texts = [
        text
        for text in texts
        if text.get_visible() and text.get_text() and left <= text.get_position()[0] <= right
    ]
    boxes = sorted((text.get_window_extent().x0, text.get_window_extent().x1) for text in texts)
    assert boxes
    assert all(before[1] < after[0] for before, after in pairwise(boxes))


def test_the_sweep_file_is_the_working_folders_else_the_repositorys(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> None:
        raise UserError(f"reads {path}")

    with monkeypatch.context() as patch:  # installed by pip: there is no repository
        patch.setattr(sweep, "folder_of", lambda package: workplace / "site-packages" / package)
        with pytest.raises(
            UserError, match=r"--space: configs/sweep.yaml cannot be read: .* Name a file"
        ):
            sweep.main("numerals", [])
    monkeypatch.setattr(sweep, "read_space", read)
    with pytest.raises(UserError, match=f"^reads {Path(__file__).parent}/configs/sweep.yaml$"):
        sweep.main("numerals", [])
    (workplace / "configs").mkdir()
    (workplace / "configs" / "sweep.yaml").write_text(SPACE)
    with pytest.raises(UserError, match=r"^reads configs/sweep.yaml$"):
        sweep.main("numerals", [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials", "0"], "--trials must be at least 1, got 0."),
        (["--jobs", "-1"], "--jobs must be at least 1, got -1."),
        (["--name", "../x"], "--name must be 1 to 100 letters"),
        (["--run_name", "x"], "--run_name is set for every trial"),
        (["--monitor", "x"], "--monitor is set for every trial. Use `metric:` of the sweep file"),
        (["--seed", "-1"], "--seed must be from 0 to 4294967295, got -1."),
        (["--space", "missing.yaml"], "--space: missing.yaml cannot be read"),
        (["--space", sys.executable], "is not valid YAML."),
        (["--space", os.sep], f"--space must be an ordinary file, got {os.sep}."),
    ],
)
def test_bad_options_are_told_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    assert entry.exit_code(partial(sweep.main, "numerals"), words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not list(workplace.iterdir())


def test_a_sweep_without_optuna_says_how_to_install_it() -> None:
    code = "import runpy, sys; sys.modules['optuna'] = None; "
    code += "runpy.run_module('numerals.sweep', run_name='__main__')"
    ended = complete([sys.executable, "-c", code], cwd=ROOT, fresh=True)
    assert ended.returncode == 2
    assert ended.stderr == "error: a local sweep needs Optuna. Install it: pip install optuna\n"


def test_what_fit_refuses_ends_the_sweep_before_a_trial_starts_and_leaves_no_folder(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "subprocess", None)
    assert (
        entry.exit_code(
            partial(sweep.main, "numerals"), [*flags, "--trials", "1", "--model.lrr", "1"]
        )
        == 2
    )
    lines = capsys.readouterr().err.splitlines()
    assert (
        "unknown option --model.lrr" in [line for line in lines if line.startswith("error: ")][-1]
    )
    assert not (tmp_path / "lr").exists()


def test_an_option_that_the_sweep_file_alone_names_is_told_with_its_file(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "subprocess", None)
    file = tmp_path / "space.yaml"
    file.write_text("parameters: {model.depth_of_trees: {values: [1, 2]}}\n")
    with pytest.raises(UserError) as error:
        sweep.main("numerals", [*flags, "--trials", "1"])
    told = f"{file} searches what fit refuses: unknown option --model.depth_of_trees."
    assert str(error.value).startswith(told)
    assert str(error.value).endswith("Change the file, or name another one by --space.")


def test_the_picture_has_room_for_choices_that_no_trial_drew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
    )
    space = Space({"size": CategoricalDistribution(["a", "b", "c"])})
    study = studies.open_study(tmp_path, space, trials=2, seed=0)
    study.enqueue_trial({"size": "a"})
    asked = study.ask(space.parameters)
    asked.report(0.5, 0)
    study.tell(asked, 0.5)
    results.draw(tmp_path / "sweep.png", study, space, "one trial")
    low, high = figures[0].axes[1].get_xlim()
    assert low <= 0
    assert high >= 2


def test_a_sweep_goes_on_with_an_argument_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    arguments = ["--data.root", os.fsdecode(b"d\xff")]
    for asked in (arguments, []):
        found, lock = sweep.claim(tmp_path / "lr", tmp_path / "space.yaml", asked)
        lock.release()
        assert found == arguments


def test_another_space_or_other_options_need_another_name(tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPACE)
    sweep.claim(tmp_path / "lr", space, ["--max_epochs", "3"])[1].release()
    arguments, lock = sweep.claim(tmp_path / "lr", space, [])
    assert arguments == ["--max_epochs", "3"]
    with pytest.raises(UserError, match="another process is sweeping there"):
        sweep.claim(tmp_path / "lr", space, [])
    lock.release()
    with pytest.raises(UserError, match="was begun with `--max_epochs 3`"):
        sweep.claim(tmp_path / "lr", space, ["--max_epochs", "4"])
    space.write_text(SPACE.replace("0.01", "0.1"))
    with pytest.raises(UserError, match="another search space"):
        sweep.claim(tmp_path / "lr", space, [])


def test_options_that_somebody_else_has_begun_a_sweep_with_are_used_only_where_they_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPACE)
    theirs = tmp_path / "theirs"
    words = ["--model", "theirs.evil.Net"]
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state-of-another"))
        patch.setenv("LOCALAPPDATA", str(tmp_path / "state-of-another"))
        sweep.claim(theirs, space, words)[1].release()
    for _ in range(2):
        with pytest.raises(UserError, match="without a seal of yours"):
            sweep.claim(theirs, space, [])
    # Without a seal they are those of an older version, or of a machine without a key.
    record = json.loads((theirs / "sweep.json").read_text())
    (theirs / "sweep.json").write_text(json.dumps({**record, "seal": None}))
    with pytest.raises(UserError, match="without a seal of yours"):
        sweep.claim(theirs, space, [])
    for typed in (words, []):
        found, lock = sweep.claim(theirs, space, typed)
        lock.release()
        assert found == words


@pytest.mark.parametrize("name", ["sweep.png", "journal.log", "trial-000.log", ".lock"])
def test_a_sweep_writes_through_no_link(name: str, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "precious").write_text("text")
    sweep.claim(tmp_path / "lr", tmp_path / "space.yaml", [])[1].release()
    (tmp_path / "lr" / name).unlink(missing_ok=True)
    (tmp_path / "lr" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="is a link out of the run's folder"):
        sweep.claim(tmp_path / "lr", tmp_path / "space.yaml", [])
    assert (tmp_path / "precious").read_text() == "text"


def test_a_trial_gets_no_option_that_the_space_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trials.subprocess, "Popen", FakeProcess)
    space = Space({"lr": FloatDistribution(0.0, 1.0)}, "val/error", goal="minimize")
    study = studies.open_study(tmp_path, space, trials=2, seed=0)
    evil = {"model": CategoricalDistribution(["theirs.evil.Net"])}
    asked = study.ask({**evil, **space.parameters})
    ended = study.ask(evil)
    ended.report(0.1, 0)
    study.tell(ended, 0.1)
    running = RunningTrial(asked, space, tmp_path, ["numerals.fit"], {})
    command = running.process.command  # type: ignore[attr-defined]
    assert not [word for word in command if "evil" in word]
    assert [word for word in command if word.startswith("--lr=")]
    assert "theirs.evil.Net" not in str(results.result_rows(study, space))
    results.draw(tmp_path / "sweep.png", study, space, "lr")
    sweep.say_what_is_best("numerals", study, tmp_path, space, [])
    assert "evil" not in capsys.readouterr().out


def test_a_folder_that_is_no_sweep_s_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.ckpt").write_text("a run's")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "nowhere").symlink_to("gone")
    for name in ("run", "file", "nowhere"):
        assert (
            entry.exit_code(
                lambda _, name=name: bool(sweep.claim(Path(name), Path("space.yaml"), [])), []
            )
            == 2
        )
        assert re.match(
            rf"error: .*{name}.* Choose another name\.|error: {name}: File exists\.",
            capsys.readouterr().err,
        )
    assert os.listdir("run") == ["last.ckpt"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sweep.json", '{"fit": ["--max'),
        ("sweep.json", "[1]"),
        ("sweep.json", '{"fit": null, "space": ""}'),
        ("journal.log", "garbage{\n"),
        ("journal.log", '{"op_code": 99}\n'),
        ("journal.log", "\0"),
    ],
)
def test_damaged_files_of_a_sweep_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)

    def begin(_: list[str]) -> int:
        sweep.claim(tmp_path / "lr", tmp_path / "space.yaml", [])[1].release()
        space = read_space(tmp_path / "space.yaml")
        return bool(studies.open_study(tmp_path / "lr", space, trials=1, seed=0))

    assert begin([])
    (tmp_path / "lr" / name).write_text(text)
    assert entry.exit_code(begin, []) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(rf"error: --name lr: .*{name} .*Choose another name\.\n", line)


def test_a_sweep_killed_as_it_begins_leaves_no_half_written_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    with monkeypatch.context() as patch:
        patch.setattr("unbroken.tables.os.replace", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            sweep.claim(tmp_path / "lr", tmp_path / "space.yaml", [])
    assert not (tmp_path / "lr" / "sweep.json").exists()
    sweep.claim(tmp_path / "lr", tmp_path / "space.yaml", ["--max_epochs", "3"])[1].release()


@pytest.mark.parametrize(
    ("entry", "parameter"),
    [
        ({"values": [1, 2]}, CategoricalDistribution([1, 2])),
        ({"value": "a"}, CategoricalDistribution(["a"])),
        ([0.1, 0.2], CategoricalDistribution([0.1, 0.2])),
        (
            {"values": [datetime.date(2020, 1, 1), "a"]},
            CategoricalDistribution(["2020-01-01", "a"]),
        ),
        ({"min": 1, "max": 5}, IntDistribution(1, 5)),
        ({"min": 0.5, "max": 5}, FloatDistribution(0.5, 5)),
        (
            {"distribution": "log_uniform_values", "min": 0.1, "max": 5},
            FloatDistribution(0.1, 5, log=True),
        ),
    ],
)
def test_wandbs_distributions_are_understood(entry: dict, parameter: Any, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"parameters": {"x": entry}}))
    assert read_space(tmp_path / "s.yaml").parameters == {"x": parameter}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters: {x: {distribution: q_normal}}", "x.distribution must be one of"),
        ("parameters: {x: {min: 1e-4, max: 1}}", "write 0.0001"),
        ("parameters: {x: {min: 3, max: 1}}", "min below max"),
        ("parameters: {x: {min: .nan, max: 1}}", "min below max"),
        ("parameters: {x: {min: -1.0e+308, max: 1.0e+308}}", "min below max"),
        ("parameters: {x: &x {values: [*x]}}", "is not valid YAML"),
        (
            "parameters: {x: {distribution: int_uniform, min: 1.5, max: 4}}",
            "whole numbers min below max",
        ),
        ("parameters: {x: {values: []}}", "x.values must be a non-empty list"),
        ("parameters: {x: {values: 5}}", "x.values must be a non-empty list"),
        ("parameters: {}", "must have a section `parameters:`"),
        ("{method: gird, parameters: {x: 1}}", "method must be one of .* Did you mean grid?"),
        ("{metod: grid, parameters: {x: 1}}", "unknown section `metod:`. Did you mean method?"),
        ("{method: grid, parameters: {x: {min: 0.1, max: 1}}}", "x needs values in a grid"),
        ("parameters: {x: {min: 1, max: 9, q: 2}}", "x.q cannot be used"),
        ("parameters: {x: {values: [1, 2], distribution: normal}}", "x.distribution must be"),
        ("method: grid", "must have a section `parameters:`"),
        ("[1, 2]", "must have a section `parameters:`"),
        (
            "{parameters: {x: 1}, early_terminate: {min_iter: -5}}",
            "min_iter must be an integer of at least 1",
        ),
        (
            "{parameters: {x: 1}, early_terminate: {min_iter: soon}}",
            "min_iter must be an integer of at least 1",
        ),
        (
            "{parameters: {x: 1}, early_terminate: soon}",
            "min_iter must be an integer of at least 1",
        ),
        ("{parameters: {x: 1}, metric: {goal: large}}", "metric must be"),
        ("{parameters: {x: 1}, metric: accuracy}", "metric must be"),
        ("{parameters: {x: 1}, metric: {name: [1]}}", r"metric.name must be a text, got \[1\]"),
        ("{parameters: {x: 1}, metric: {name: ''}}", "metric.name must be a text, got"),
    ],
)
def test_a_bad_sweep_file_is_told_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_space(tmp_path / "s.yaml")


@pytest.mark.nightly
def test_the_command_that_wandbs_agent_would_run_is_one_that_fit_understands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from unbroken.cli.cli import configure
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    content = yaml.safe_load((ROOT / "configs" / "sweep.yaml").read_text())
    space = read_space(ROOT / "configs" / "sweep.yaml")
    values = {
        name: {
            "value": found.choices[0] if isinstance(found, CategoricalDistribution) else found.low
        }
        for name, found in space.parameters.items()
    }
    words = create_sweep_command(list(content["command"]))
    flags = create_sweep_command_args({"args": values})["args"]
    assert words == ["${env}", "${interpreter}", "-m", "project.fit", trials.NO_TEST, "${args}"]
    monkeypatch.chdir(ROOT)
    config = configure(fit, "fit", [trials.NO_TEST, *flags])
    assert config.trainer["limit_test_batches"] == 0
    assert config.resolved["model"]["init_args"]["lr"] == values["model.lr"]["value"]
    assert config.resolved["data"]["init_args"]["batch_size"] == values["data.batch_size"]["value"]
    assert (ROOT / content["program"]).is_file()
