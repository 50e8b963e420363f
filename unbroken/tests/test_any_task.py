"""Any LightningModule, any loader, any metric: what is exact, and what is said in one line where it
is not.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from numerals.fit import job as fit
from unbroken import ExactCheckpoint
from unbroken.checkpoint.following import Best
from unbroken.cli import start as entry
from unbroken.cli.cli import configure
from unbroken.cli.read_checkpoint import load, start_from
from unbroken.commands import test as test_command
from unbroken.machine import threads
from unbroken.run.main_job import the
from unbroken.stopping import signals

from tests.commands import add_callbacks, assert_same_run, checkpoint, rows, run_ranks, summary
from tests.odd_modules import Untested
from tests.other_tasks import LOADERS, Composed, Plateaus, Rates, Told
from tests.stopped_runs import RUNS, SHORT, error_of, resume, train, train_until

LINE = [
    "--model",
    "tests.other_tasks.Line",
    "--data",
    "tests.other_tasks.Loaders",
    "--accelerator",
    "cpu",
]


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


# Loaders


# Inside an epoch, in the validation at its end, inside another; and killed there with the epoch's
# end saved
STOPS = [(6, False, "batch"), (13, False, "validation"), (20, False, "batch"), (20, True, "epoch")]


# These run with every change, the others nightly.
QUICK_LOADERS = ("by epoch", "stream with state")


def loaders_and_stops() -> list[Any]:
    """Each loader, stopped at the first moment and at the others."""
    found = []
    for kind in LOADERS:
        if kind != "stream":
            marks = () if kind in QUICK_LOADERS else pytest.mark.nightly
            found.append(pytest.param(kind, STOPS[:1], marks=marks))
            found.append(pytest.param(kind, STOPS[1:], marks=pytest.mark.nightly))
    return found


@pytest.mark.daily(1)
@pytest.mark.parametrize(("kind", "stops"), loaders_and_stops())
def test_a_stopped_run_with_a_loader_of_ones_own_is_bit_identical(
    kind: str, stops: list[tuple[int, bool, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*LINE, *SHORT, "--data.kind", kind]
    reference = train("reference", *flags)
    for batch, dies, place in stops:
        name = f"stopped-{batch}-{place}"
        state = checkpoint(train_until(batch, name, *flags, dies=dies) / "last.ckpt")
        assert (state["global_step"], state["run"]["state"]["place"]) == (
            13 if dies else batch,
            place,
        )
        assert_same_run(reference, resume(name))
    assert "goes on from" not in capsys.readouterr().out.replace("going on from step", "")
    assert {
        "train_loss_step",
        "train_loss_epoch",
        "train_error",
        "train_largest",
        "train_samples",
    } <= {name for row in rows(reference) for name in row}
    assert [float(row["train_samples"]) for row in rows(reference) if "train_samples" in row] == [
        101.0
    ] * 3


@pytest.mark.nightly
def test_a_value_that_pythons_own_max_reduces_goes_on_in_its_epoch() -> None:
    flags = ["--model", "tests.other_tasks.Builtins", *LINE[2:], *SHORT]
    reference = train("reference", *flags)
    train_until(6, "stopped", *flags)
    assert_same_run(reference, resume("stopped"))


@pytest.mark.nightly
def test_a_sum_over_a_group_of_ones_own_is_said_to_begin_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--model", "tests.other_tasks.Grouped", *LINE[2:], *SHORT]
    reference = train("reference", *flags)
    train_until(6, "stopped", *flags)
    capsys.readouterr()
    resumed = resume("stopped")
    said = "train_grouped is logged with a sync_dist_group: in this epoch its sum begins anew."
    assert capsys.readouterr().out.splitlines().count(said) == 1
    different = [
        a.keys() & {"train_grouped"}
        for a, b in zip(rows(reference), rows(resumed), strict=True)
        if a != b
    ]
    assert different == [{"train_grouped"}], "of the interrupted epoch alone, nothing else"
    train_until(20, "at the end", *flags, dies=True)  # goes on from the first epoch's end
    resume("at the end")
    assert said not in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sampler with state", marks=pytest.mark.nightly),
        pytest.param("sized stream with state", marks=pytest.mark.nightly),
        "loader with state",
    ],
)
def test_a_limited_epoch_ends_where_its_loader_goes_on(kind: str) -> None:
    flags = [*LINE, *SHORT, "--data.kind", kind, "--limit_train_batches", "5"]
    reference = train("reference", *flags)
    train_until(5, "stopped", *flags)
    assert_same_run(reference, resume("stopped"))
    train_until(8, "killed", *flags, dies=True)
    assert_same_run(reference, resume("killed"))


LIGHTNINGS_CALLBACKS = """
trainer:
  callbacks:
    - {class_path: EarlyStopping, init_args: {monitor: val_told, patience: 2}}
    - {class_path: LearningRateMonitor}
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("batch", "dies"),
    [(15, False), (26, False), (30, True)],
)
def test_lightnings_callbacks_and_a_falling_rate_go_on_where_they_were(
    batch: int, dies: bool
) -> None:
    Path("callbacks.yaml").write_text(LIGHTNINGS_CALLBACKS)
    flags = [
        "--config",
        "callbacks.yaml",
        "--model",
        "tests.other_tasks.Plateaus",
        *LINE[2:],
        *SHORT,
    ]
    flags += ["--max_epochs", "5"]
    reference = train("reference", *flags)
    assert summary(reference)["epochs"] == 5
    assert "lr-SGD" in {name for row in rows(reference) for name in row}
    train_until(batch, "stopped", *flags, dies=dies)
    resumed = resume("stopped")
    assert_same_run(reference, resumed)
    ours, theirs = (checkpoint(run / "last.ckpt") for run in (reference, resumed))
    assert ours["run"]["metrics"] == theirs["run"]["metrics"]
    kept = [
        {k: v for k, v in state["callbacks"].items() if "EarlyStopping" in k}
        for state in (ours, theirs)
    ]
    assert str(kept[0]) == str(kept[1])


def test_a_stream_without_a_state_goes_on_from_the_last_epochs_end_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*LINE, *SHORT, "--data.kind", "stream"]
    reference = train("reference", *flags)
    lacks = "the training data come from Stream, which has no state_dict"
    said = f"{lacks}: a resumed run goes on from the last epoch's end"
    assert capsys.readouterr().out.count(said) == 1
    train_until(20, "stopped", *flags)
    assert checkpoint(RUNS / "stopped/last.ckpt")["global_step"] == 13
    assert_same_run(reference, resume("stopped"))


@pytest.mark.nightly
def test_two_ranks_share_a_sampler_of_the_users_own_and_log_what_one_process_does() -> None:
    """Killed and resumed, too.

    Every figure of the validation is weighted by samples: 53 on 2 ranks.
    """
    flags = ["--model", "tests.other_tasks.LineWithLoaders", "--accelerator", "cpu", *SHORT]
    one = train("one", *flags)
    two = run_ranks("fit", *flags, "--run_name", "two")
    assert two.returncode == 0, two.stderr
    assert summary(RUNS / "two")["world_size"] == 2
    parts: dict[int, dict[str, list[str]]] = defaultdict(dict)
    for rank in (0, 1):
        for line in Path(f"seen-2-{rank}.txt").read_text().splitlines():
            epoch, batch, *targets = line.split()
            parts[rank][f"{epoch} {batch}"] = targets
    joined = [" ".join([key, *parts[0][key], *parts[1][key]]) for key in parts[0]]
    assert joined == Path("seen-1-0.txt").read_text().splitlines()
    for name in ("val_mean", "val_largest", "val_samples"):
        ours, theirs = (
            [float(row[name]) for row in rows(run) if name in row] for run in (one, RUNS / "two")
        )
        assert ours == pytest.approx(theirs, rel=1e-6), name
    assert theirs == [53.0] * 3

    interrupted = [
        "tests.interrupted",
        "10",
        "SIGKILL",
        *flags,
        "--run_name",
        "killed",
        "--checkpoint_every",
        "3",
    ]
    killed = run_ranks(*interrupted)
    assert killed.returncode != 0
    assert checkpoint(RUNS / "killed/last.ckpt")["global_step"] == 9
    again = run_ranks("fit", "--run_name", "killed", "--ckpt_path", "auto")
    assert again.returncode == 0, again.stderr
    assert_same_run(RUNS / "two", RUNS / "killed")


# Modules of other people


def of(module: str, *flags: str) -> list[str]:
    return [
        "--model",
        f"tests.other_tasks.{module}",
        "--data",
        "null",
        "--accelerator",
        "cpu",
        *SHORT,
        *flags,
    ]


class StopInValidation(Callback):
    """Notes SIGTERM in the second batch of the second epoch's validation."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1 and trainer.current_epoch == 1:
            signals.state.requested = signal.SIGTERM


SIDE = [
    ["Side", "--model.kind", kind]
    for kind in ("cycled", "alike", "longest", "states", "one has a state", "no length")
]
OTHERS = [["Reloads", "--reload_dataloaders_every_n_epochs", "1"], ["Habits"], ["Accumulates"]]
OTHERS += [["OwnWays"], ["OwnPace"], ["ReadsItself"]]
COMPOSED = [
    "Composed",
    "--model.net",
    "torch.nn.Linear",
    "--model.net.in_features",
    "4",
    "--model.rates.later",
    "0.03",
]
COMPOSED += ["--model.net.out_features", "6"]
OTHERS += [COMPOSED]
# These run with every change, the others nightly.
QUICK_MODULES = [SIDE[3], ["Habits"], ["Accumulates"], ["OwnWays"], ["ReadsItself"], COMPOSED]


def places() -> list[Any]:
    """Each module with each place at which its run is stopped."""
    found = []
    for named in (*SIDE, *OTHERS):
        for place in ("batch", "validation", "epoch"):
            is_quick = place == "batch" and named in QUICK_MODULES
            marks = () if is_quick else pytest.mark.nightly
            found.append(pytest.param(named, place, marks=marks, id=f"{place}-{' '.join(named)}"))
    return found


@pytest.mark.daily(1)
@pytest.mark.filterwarnings(
    "ignore:Trying to infer the `batch_size`", "ignore:Metric `SpearmanCorrcoef` will save all"
)
@pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance", "ignore:.*`dataloader_iter`")
@pytest.mark.parametrize(("named", "place"), places())
def test_a_stopped_run_of_any_module_is_bit_identical(named: list[str], place: str) -> None:
    """The batch ends no step of ``Accumulates``, and no pass of a short loader."""
    reference = train("reference", *of(*named))
    if place == "validation":
        with pytest.MonkeyPatch.context() as patch:
            add_callbacks(patch, StopInValidation())
            assert entry.exit_code(fit.main, [*of(*named), "--run_name", "stopped"]) == 143
        signals.state.requested = 0
    else:
        train_until(21, "stopped", *of(*named), dies=place == "epoch")
    assert checkpoint(RUNS / "stopped/last.ckpt")["run"]["state"]["place"] == place
    assert_same_run(reference, resume("stopped"))


@pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of `nn.Module`")
def test_objects_in_hparams_are_those_of_the_constructor_and_lightning_makes_them_again() -> None:
    path = train("r", *of(*COMPOSED, "--max_epochs", "1")) / "best.ckpt"
    assert checkpoint(path)["hyper_parameters"]["rates"] == {"first": 0.02, "later": 0.03}
    made = Composed.load_from_checkpoint(path, weights_only=True)
    assert made.hparams["rates"] == Rates(0.02, 0.03)
    assert all(
        torch.equal(value, checkpoint(path)["state_dict"][name])
        for name, value in made.state_dict().items()
    )


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize(("kind", "short"), [("cycled", 37), ("alike", 101)])
def test_loaders_side_by_side_differ_in_order_and_draws_and_so_do_passes(
    kind: str, short: int
) -> None:
    train("r", *of("Side", "--model.kind", kind, "--max_epochs", "1"))
    first, second = zip(
        *(line.split("|")[1:] for line in Path("side.txt").read_text().splitlines()), strict=True
    )
    assert len(set(second)) == 13
    assert len(set(first)) == 13, "a pass repeats the one before"
    assert not set(first) & set(second)
    assert sum(len(yaml.safe_load(batch)) for batch in first[: -(-short // 8)]) == short


@pytest.mark.parametrize(
    "where", ["setup", pytest.param("configure_model", marks=pytest.mark.nightly)]
)
def test_layers_that_are_made_late_are_resumed_and_tested(where: str) -> None:
    line = of("LateLayers", "--model.where", where, "--max_epochs", "2")
    reference = train("reference", *line)
    assert summary(reference)["test_told"] == 7
    train_until(20, "stopped", *line)
    assert_same_run(reference, resume("stopped"))
    assert len(Path("loads.txt").read_text().splitlines()) == 1 + 2  # a test each, and the resume
    given = [
        "--ckpt_path",
        str(reference / "best.ckpt"),
        "--accelerator",
        "cpu",
        "--output",
        "m.json",
    ]
    assert test_command.main("numerals", given) == 0
    found = yaml.safe_load(Path("m.json").read_text())
    assert found["test_loss"] == pytest.approx(summary(reference)["test_loss"])
    assert len(Path("loads.txt").read_text().splitlines()) == 1 + 2 + 1
    used = load(fit, reference / "best.ckpt").module
    weights = checkpoint(reference / "best.ckpt")["state_dict"]
    assert {*weights} == {*used.state_dict()} >= {"last.weight"}
    assert all(torch.equal(value, weights[name]) for name, value in used.state_dict().items())


CALLBACKS = "lightning.pytorch.callbacks"
SWA = ["--trainer.callbacks", f"{CALLBACKS}.StochasticWeightAveraging"]
SWA += ["--trainer.callbacks.swa_lrs", "0.01", "--trainer.callbacks.swa_epoch_start", "1"]


def odd(module: str, *flags: str) -> list[str]:
    """Flags for a run of three epochs of five batches."""
    named = ["--model", f"tests.odd_modules.{module}", "--data", "null", "--accelerator", "cpu"]
    return [*named, *SHORT, *flags]


@pytest.mark.daily(1)
@pytest.mark.filterwarnings(
    "ignore:Lazy modules are a new feature",
    "ignore:Sparse CSR tensor",
    "ignore:Validating sparse tensor",
)
@pytest.mark.parametrize(
    "named",
    [
        ["Lazy"],
        pytest.param(["Queue"], marks=pytest.mark.nightly),
        ["Queue", "--model.first_epoch", "1"],
        pytest.param(["MakesRoom"], marks=pytest.mark.nightly),
        pytest.param(["Graph", "--model.layout", "coo"], marks=pytest.mark.nightly),
        pytest.param(["Graph", "--model.layout", "csr"], marks=pytest.mark.nightly),
        pytest.param(
            ["MadeInSetup", "--trainer.callbacks", f"{CALLBACKS}.EMAWeightAveraging"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(["MadeInSetup", *SWA], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_a_module_of_an_odd_kind_is_resumed_and_its_best_tested_alike_by_fit_and_by_test(
    named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a buffer that no state dict holds changes after the best epoch."""
    line = odd(*named, "--num_sanity_val_steps", "1")
    reference = train("reference", *line)
    train_until(8, "stopped", *line, dies=named[0] != "Lazy")
    # The check before training, which a resumed run has had, gives lazy layers their sizes.
    assert_same_run(
        reference, resume("stopped"), ignores=("in_features", "num_features", "classes")
    )
    capsys.readouterr()
    given = ["--ckpt_path", str(reference / "best.ckpt"), "--accelerator", "cpu"]
    assert test_command.main("numerals", [*given, "--output", "m.json"]) == 0
    found = yaml.safe_load(Path("m.json").read_text())
    assert found["test_loss"] == summary(reference)["test_loss"]
    # Its test set is its validation set.
    assert found["test_loss"] == pytest.approx(summary(reference)["val_loss"])
    if named[0] == "Queue":
        assert summary(reference)["best_epoch"] == 0
        assert checkpoint(reference / "last.ckpt")["run"]["state"]["ranks"][0]["buffers"]


def test_layers_of_setup_are_loaded_without_a_test_and_named_where_weights_alone_are_taken() -> (
    None
):
    given = train("given", *odd("Untested", "--max_epochs", "1")) / "best.ckpt"
    used = load(fit, given).module.state_dict()
    weights = checkpoint(given)["state_dict"]
    assert {*weights} == {*used} >= {"last.weight"}
    assert all(torch.equal(value, weights[name]) for name, value in used.items())
    taken, kept, foreign = start_from(Untested(), str(given), RUNS)
    assert taken.endswith("4 of 5 tensors taken.")
    assert kept == "--init_weights: these keep their random start: mean"
    assert foreign.endswith("not in the module, or not before its setup: last.bias, last.weight")


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["Unused"], "state_dict['other.weight'] is the weight of a lazy layer that no batch has"),
        (
            ["Lazy", "--trainer.callbacks", f"{CALLBACKS}.EMAWeightAveraging"],
            "the weights of lazy layers cannot be averaged",
        ),
    ],
)
def test_what_lazy_layers_cannot_do_is_told_in_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of(capsys, *odd(*flags))


class NotesSharing(Callback):
    """Keeps whether the engine shares the data."""

    def __init__(self) -> None:
        self.shares: list[bool] = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.shares.append(the(ExactCheckpoint, trainer).engine.loading.shares.are_ours)


@pytest.mark.parametrize(("flags", "shares"), [(["false"], False), ([], True)])
def test_a_typed_use_distributed_sampler_reaches_the_loaders(
    flags: list[str], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = NotesSharing()
    add_callbacks(monkeypatch, notes)
    typed = ["--use_distributed_sampler", *flags] if flags else []
    train("r", *odd("Queue", "--max_epochs", "1", *typed))
    assert notes.shares == [shares]


def test_an_epoch_of_less_than_a_log_interval_has_its_last_step_in_the_rows_of_fit() -> None:
    run = train("r", *odd("Queue", "--max_epochs", "2", "--log_every_n_steps", "50"))
    assert [row["step"] for row in rows(run) if "train_loss_step" in row] == ["4", "9"]


@pytest.mark.nightly
def test_a_resume_with_a_changed_setting_keeps_a_rate_that_training_has_lowered() -> None:
    """What is typed changes what was configured; the schedule's part stays."""
    told = ["--model", "tests.other_tasks.Plateaus", *LINE[2:], *SHORT]
    rate = lambda run: checkpoint(run / "last.ckpt")["optimizer_states"][0]["param_groups"][0]["lr"]  # noqa: E731
    whole = rate(train("whole", *told, "--max_epochs", "5"))
    before = rate(train("r", *told, "--max_epochs", "3"))
    assert whole < before < Plateaus().lr
    between = rate(resume("r", "--max_epochs", "4"))
    assert whole <= between < before
    assert rate(resume("r", "--max_epochs", "5", "--model.lr", "0.2")) == pytest.approx(10 * whole)


def test_loaders_that_are_made_anew_at_every_other_epoch_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for n, times in (("1", 0), ("2", 1)):
        train(n, *of("Reloads", "--max_epochs", "1", "--reload_dataloaders_every_n_epochs", n))
        assert (
            capsys.readouterr().out.count(
                "not exact with --reload_dataloaders_every_n_epochs above 1"
            )
            == times
        )


def test_an_interval_of_steps_counts_the_steps_of_a_batch() -> None:
    train_until(4, "r", *of("TwoSteps", "--checkpoint_every", "2"), dies=True)
    assert checkpoint(RUNS / "r/last.ckpt")["global_step"] == 5


@pytest.mark.nightly
def test_two_ranks_share_any_loader_and_say_what_they_cannot_join() -> None:
    one = train("one", *of("Joined"))
    two = run_ranks("fit", *of("Joined"), "--run_name", "two")
    assert two.returncode == 0, two.stderr
    alone = "val_last, val_seen, logged outside of the step, is of rank 0's samples alone"
    assert two.stdout.count(alone) == two.stdout.count("rank 0's samples alone") == 1
    for name in ("val_samples_21", "val_samples_53", "val_mean_21", "val_mean_53", "train_samples"):
        ours, theirs = (
            [float(row[name]) for row in rows(run) if name in row] for run in (one, RUNS / "two")
        )
        if name == "train_samples":
            # Both ranks get 51 of the 101 samples: one of them twice.
            ours = [samples + 1 for samples in ours]
        assert ours == pytest.approx(theirs, rel=1e-5), name
    assert "It is recommended" not in two.stderr


class Asks(Callback):
    """Looks for the checkpoints as a module's own code does."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found: Any = trainer.checkpoint_callback


@pytest.mark.daily(1)
@pytest.mark.parametrize("own", [False, True])
def test_a_modules_own_code_finds_the_checkpoints_where_lightnings_are(own: bool) -> None:
    asks = Asks()
    flags = ["--model", "tests.other_tasks.Told", *LINE[2:], *SHORT]
    flags += (
        ["--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.dirpath", "mine"]
        if own
        else []
    )
    with pytest.MonkeyPatch.context() as patch:
        add_callbacks(patch, asks)
        run = train("r", *flags)
    assert isinstance(asks.found, ModelCheckpoint) == own
    best, facts = (run / "best.ckpt").absolute(), summary(run)
    if not own:
        assert [asks.found.best_model_path, asks.found.last_model_path] == [
            str(best),
            str(best.with_name("last.ckpt")),
        ]
        assert (asks.found.monitor, asks.found.mode, asks.found.dirpath) == (
            "val_told",
            "min",
            str(best.parent),
        )
        assert float(asks.found.best_model_score) == facts["val_told"]


@pytest.mark.nightly
def test_folders_beside_the_log_and_hyperparameters_of_any_type_are_kept() -> None:
    flags = ["--model", "tests.other_tasks.Habitual", *LINE[2:], *SHORT]
    run = train("r", *flags)
    assert (run / "samples").is_dir()
    kept = checkpoint(run / "best.ckpt")["hyper_parameters"]
    assert kept == {"path": "a/b", "weights": [1.0, 2.0], "n": 3.0, "own": {1: 2}}
    resume("r", "--max_epochs", "4")


@pytest.mark.nightly
@pytest.mark.parametrize("tensorboard", [False, True])
def test_code_for_tensorboard_is_told_the_flag_and_runs_with_it(
    tensorboard: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = ["--model", "tests.other_tasks.Draws", *LINE[2:], *SHORT, "--run_name", "r"]
    if not tensorboard:
        said = "error: self.logger.experiment is W&B's, without add_scalar. Add --tensorboard true."
        assert error_of(capsys, *flags) == said
    else:
        pytest.importorskip("tensorboard")
        assert fit.main([*flags, "--tensorboard", "true"]) == 0
        assert list((RUNS / "r/tensorboard").glob("events*"))


@pytest.mark.nightly
def test_a_limit_in_time_ends_the_run() -> None:
    flags = [*LINE, *SHORT[2:], "--max_time", "00:00:00:02", "--max_steps", "100000"]
    assert 0 < summary(train("r", *flags))["steps"] < 100_000


# The metric that is followed


def test_a_metric_that_nobody_logs_ends_the_run_after_one_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = error_of(capsys, *LINE, *SHORT, "--monitor", "val/acuracy", "--run_name", "r")
    assert line.startswith("error: --monitor must be logged, got val/acuracy.")
    assert "val_loss" in line
    assert "train_loss_epoch" in line
    assert not (RUNS / "r").exists() or not list((RUNS / "r").glob("*.ckpt"))


def test_a_metric_that_nobody_logs_is_refused_where_a_module_has_no_validation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gan = ["--model", "configs.examples.gan.GAN", "--data", "null"]
    line = error_of(capsys, *gan, *SHORT, "--monitor", "gloss")
    hint = "Did you mean g_loss? Logged: d_loss, g_loss."
    assert line == f"error: --monitor must be logged, got gloss. {hint}"


@pytest.mark.nightly
def test_best_follows_the_modules_own_metric_and_the_command_line_beats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = ["--model", "tests.other_tasks.Told", *LINE[2:], *SHORT, "--max_epochs", "5"]
    facts = summary(train("own", *told))
    assert (facts["monitor"], facts["mode"], facts["best_epoch"]) == (
        "val_told",
        "min",
        3,
    )  # of equal ones the later
    assert facts["val_told"] == pytest.approx(min(Told.errors))
    assert checkpoint(RUNS / "own/best.ckpt")["global_step"] == 4 * 13
    facts = summary(train("typed", *told, "--mode", "max"))
    assert (facts["monitor"], facts["mode"], facts["best_epoch"]) == ("val_told", "max", 4)
    assert (
        summary(train("other", *told, "--monitor", "val_loss"))["mode"] == "min"
    )  # the name tells it
    assert "--mode must be min or max" in error_of(capsys, *told, "--mode", "least")


@pytest.mark.nightly
def test_a_mode_that_is_typed_on_resume_beats_the_checkpoints() -> None:
    told = ["--model", "tests.other_tasks.Told", *LINE[2:], *SHORT]
    train("r", *told, "--max_epochs", "2", "--mode", "max")
    facts = summary(resume("r", "--max_epochs", "5", "--mode", "min"))
    assert (facts["mode"], facts["best_epoch"], facts["val_told"]) == (
        "min",
        3,
        pytest.approx(min(Told.errors)),
    )
    named = Best.of(None, "max")
    named.take_names_of(Told())
    assert named.mode == "max"
    by_default = Best(named_mode="max")
    by_default.compare({"val/loss": 0.5}, 0)
    assert (by_default.monitor, by_default.mode) == ("val/loss", "max")


@pytest.mark.parametrize("monitor", ["", None, ["val_told"]])
def test_a_module_whose_monitor_is_no_name_leaves_the_choice_to_what_is_logged(
    monitor: Any,
) -> None:
    module: Any = Told()
    module.monitor, module.mode = monitor, "min"
    best = Best.of(None, None)
    best.take_names_of(module)
    assert (best.monitor, best.named_mode, best.asked) == (
        None,
        None,
        None,
    )  # its mode is of its own metric
    best.compare({"val/accuracy": 0.5}, 0)
    assert (best.monitor, best.mode) == ("val/accuracy", "max")


@pytest.mark.nightly
def test_a_resumed_run_remembers_that_its_validation_did_not_log_the_metric(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [
        *LINE,
        *SHORT,
        "--monitor",
        "val/acuracy",
        "--val_check_interval",
        "9",
    ]  # of 13 batches
    train_until(11, "r", *flags)
    assert "got val/acuracy" in error_of(capsys, "--run_name", "r", "--ckpt_path", "auto")
    assert checkpoint(RUNS / "r/last.ckpt")["global_step"] == 11  # at the first epoch's end


@pytest.mark.parametrize(
    ("logged", "monitor", "mode"),
    [
        (["val_loss", "val/loss", "val/accuracy"], "val/accuracy", "max"),
        (["val_loss", "val/loss", "val/f1"], "val/loss", "min"),
        (["val_loss", "val/f1"], "val_loss", "min"),
        (["val/f1", "train/loss"], None, "max"),
    ],
)
def test_where_nobody_names_a_metric_the_first_usual_one_is_followed(
    logged: list[str], monitor: str | None, mode: str
) -> None:
    best = Best()
    assert best.compare(dict.fromkeys(logged, 0.5), 0) is (monitor is not None)
    assert best.monitor == monitor
    assert best.mode == mode


def test_where_nothing_can_be_followed_the_last_is_the_best_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*LINE, *SHORT, "--limit_val_batches", "0"]
    train("r", *flags)
    told = capsys.readouterr().out
    assert "no metric was followed, so best.ckpt is the last. Name one of those" in told
    assert "train_loss_epoch" in told
    assert "next:" not in told, (
        "there is no test_step, and nothing says how a file becomes an input"
    )
    assert (
        checkpoint(RUNS / "r/best.ckpt")["global_step"]
        == checkpoint(RUNS / "r/last.ckpt")["global_step"]
        == 39
    )
    assert not {"monitor", "mode", "best_epoch"} & summary(RUNS / "r").keys()
    assert summary(RUNS / "r")["data_source"] == "Loaders"
    assert (
        summary(train("t", *flags, "--monitor", "train_loss_epoch", "--mode", "min"))["monitor"]
        == "train_loss_epoch"
    )


# Classes that are named


def test_a_class_that_is_named_has_its_own_defaults() -> None:
    classes = [
        "--model",
        "tests.other_tasks.SlowClassifier",
        "--data",
        "configs.examples.tabular.Rows",
    ]
    named = configure(fit, "fit", classes)
    module: Any = named.module
    data: Any = named.datamodule
    assert module.lr == named.resolved["model"]["init_args"]["lr"] == 0.0005
    assert data.batch_size == 128
    assert "root" not in named.resolved["data"]["init_args"]


# Weights of another run


def test_a_new_run_starts_from_another_runs_weights_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*LINE, *SHORT, "--max_epochs", "1"]
    given = checkpoint(train("given", *flags) / "best.ckpt")["state_dict"]
    best = str(RUNS / "given/best.ckpt")
    still = [*flags, "--model.lr", "1e-12"]
    capsys.readouterr()
    started = checkpoint(train("all", *still, "--init_weights", best) / "last.ckpt")
    assert "4 of 4 tensors taken" in capsys.readouterr().out
    assert all(
        torch.allclose(started["state_dict"][key], value, atol=1e-6) for key, value in given.items()
    )
    assert started["global_step"] == 13  # from 0
    assert all(state["step"] == 13 for state in started["optimizer_states"][0]["state"].values())
    capsys.readouterr()
    train("part", *still, "--init_weights", best, "--model.width", "5")
    told = capsys.readouterr().out
    assert "--init_weights" in told
    assert "these keep their random start: first.bias, first.weight, last.weight" in told
    foreign = ["--data.source", "sample", "--model.network", "MLP", "--init_weights", best]
    assert "nothing in it fits" in error_of(capsys, *foreign)
    both = error_of(
        capsys, *flags, "--run_name", "all", "--ckpt_path", "last", "--init_weights", best
    )
    assert "--init_weights starts a new run" in both


def test_the_newest_run_whose_weights_are_taken_is_of_the_folder_that_is_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*LINE, *SHORT, "--max_epochs", "1"]
    train("here", *flags)
    shutil.copytree(RUNS / "here", "elsewhere/there")
    capsys.readouterr()
    again = [*flags, "--default_root_dir", "elsewhere", "--init_weights", "best"]
    assert fit.main([*again, "--run_name", "again"]) == 0
    assert "--init_weights elsewhere/there/best.ckpt: 4 of 4" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_line_that_starts_from_another_runs_weights_also_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*LINE, *SHORT]
    given = train("given", *flags, "--max_epochs", "1") / "best.ckpt"
    line = [*flags, "--ckpt_path", "auto", "--init_weights", str(given)]
    undisturbed = train("undisturbed", *line)
    assert "4 of 4 tensors taken" in capsys.readouterr().out
    train_until(16, "stopped", *line)
    capsys.readouterr()
    stopped = train("stopped", *line)
    assert "tensors taken" not in capsys.readouterr().out
    assert_same_run(undisturbed, stopped)


def test_a_run_whose_test_needs_gradients_is_tested_without_a_flag() -> None:
    best = train("forces", *of("Forces", "--inference_mode", "false")) / "best.ckpt"
    assert test_command.main("numerals", ["--ckpt_path", str(best)]) == 0


@pytest.mark.daily(1)
@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_a_profiler_that_is_named_writes_into_the_runs_folder_and_prints_little(
    profiler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("profiled", *of("Forces", "--inference_mode", "false", "--profiler", profiler))
    assert "run_training_batch" in (folder / "fit-profile.txt").read_text()
    told = capsys.readouterr()
    assert f"the profile will be in {folder}/fit-profile.txt" in told.out
    assert "run_training_batch" not in told.out + told.err


class NamesThreads(Callback):
    """Notes the names of this process's threads while it trains."""

    names: frozenset[str] = frozenset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.names = frozenset(each.name for each in threading.enumerate())


@pytest.mark.skipif(sys.platform != "linux", reason="threads are watched on Linux alone")
def test_main_in_a_notebook_watches_its_waiting_threads_and_counts_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "available_cores", lambda: 1)
    before = torch.get_num_threads()
    seen = NamesThreads()
    add_callbacks(monkeypatch, seen)
    try:
        torch.set_num_threads(2)
        train("watched", *LINE, *SHORT, "--max_epochs", "1")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert "waiting" in seen.names


class TakesRows(LightningModule):
    """Takes rows of four numbers, and no pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0].float()).mean()

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_an_error_of_ones_own_module_with_the_default_data_names_both(workplace: Path) -> None:
    flags = ["--model", "tests.test_any_task.TakesRows", "--data.source", "sample"]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        fit.main([*flags, "--max_epochs", "1", "--logger", "false", "--report", "false"])
    assert error.value.__notes__ == [
        "TakesRows runs with MNISTDataModule, because --data names nothing else."
    ]
