"""Promise 2 with every callback that Lightning ships: a run that was killed and resumed is
bit-identical.

``python -m pytest -m nightly tests/test_lightning_callbacks.py`` kills a hundred times.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, callbacks
from numerals.fit import job as fit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unbroken.checkpoint.not_exact import NOT_EXACT
from unbroken.cli import start as entry

from tests.commands import (
    MEASURING,
    TIMED,
    assert_same_run,
    checkpoint,
    complete,
    differences,
    differences_in_training,
    rows,
    run,
    summary,
    without_measured,
)
from tests.stopped_runs import resume, train, train_until

HERE = "tests.test_lightning_callbacks"  # as a run imports it


class Numbers(LightningDataModule):
    """Made-up regression: 96 samples to train, of which a batch has 8."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(128, 6, generator=draw)
        self.samples = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())

    def train_dataloader(self) -> Any:
        return DataLoader(
            torch.utils.data.Subset(self.samples, range(96)), self.batch_size, shuffle=True
        )

    def val_dataloader(self) -> Any:
        return DataLoader(torch.utils.data.Subset(self.samples, range(96, 128)), self.batch_size)


class Regression(LightningModule):
    """A backbone and a head, with dropout, and with a plateau scheduler where asked for."""

    def __init__(self, lr: float = 0.02, plateau: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.backbone = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(inputs))

    def training_step(self, batch: Any) -> dict[str, torch.Tensor]:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any) -> None:
        self.log("val/loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, self.lr)
        if not self.hparams["plateau"]:
            return {
                "optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            }
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"},
        }


def size_of(batch: Any) -> int:
    return len(batch[0])


# Name of each callback that Lightning ships → the arguments that a run is killed with
EXACT: dict[str, dict[str, Any]] = {
    "BackboneFinetuning": {"unfreeze_backbone_at_epoch": 1},
    "DeviceStatsMonitor": {},
    "EarlyStopping": {"monitor": "val/loss", "patience": 2},
    "EMAWeightAveraging": {"decay": 0.9},
    "GradientAccumulationScheduler": {"scheduling": {1: 2, 2: 4}},
    "LambdaCallback": {},
    "LearningRateMonitor": {"logging_interval": "step"},
    "ModelCheckpoint": {"monitor": "val/loss", "save_top_k": 2, "every_n_train_steps": 5},
    "ModelSummary": {},
    "OnExceptionCheckpoint": {"dirpath": "exceptions"},
    "RichModelSummary": {},
    "RichProgressBar": {},
    "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 1},
    "ThroughputMonitor": {"batch_size_fn": "tests.test_lightning_callbacks.size_of"},
    "Timer": {"duration": "01:00:00:00"},
    "TQDMProgressBar": {},
    "WeightAveraging": {},
}
SAID = {
    "BatchSizeFinder": {"max_trials": 2},
    "LearningRateFinder": {"num_training_steps": 10},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.2},
    "SpikeDetection": {"finite_only": True},
}
# To be inherited from, or of prediction, which no run resumes
OTHERS = {"BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar"}
# Several together, and the scheduler that follows a metric
TOGETHER = {
    "EarlyStopping and LearningRateMonitor": ["EarlyStopping", "LearningRateMonitor"],
    "EMAWeightAveraging and GradientAccumulationScheduler": [
        "EMAWeightAveraging",
        "GradientAccumulationScheduler",
    ],
    "ReduceLROnPlateau": ["LearningRateMonitor"],
}
DAILY = ("BackboneFinetuning",)
KILLS = 5  # of each of twenty: a hundred
TRAINER = ["--accelerator", "cpu", "--log_every_n_steps", "1", "--max_epochs", "4"]
TRAINER += ["--report", "false"]
# What DeviceStatsMonitor and ThroughputMonitor measure, and how long training took
MEASURED = (
    "DeviceStatsMonitor",
    "train/device",
    "train/time",
    "train/batches",
    "train/samples",
    "validate/",
)


def arguments(names: list[str], plateau: bool = False) -> list[str]:
    """Arguments of a run with callbacks."""
    known = EXACT | SAID
    listed = [
        {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": known[name]}
        for name in names
    ]
    Path("c.yaml").write_text(json.dumps({"trainer": {"callbacks": listed}}))
    classes = ["--model.class_path", f"{HERE}.Regression", "--data.class_path", f"{HERE}.Numbers"]
    return ["--config", "c.yaml", *classes, "--model.plateau", str(plateau).lower(), *TRAINER]


def test_every_callback_that_lightning_ships_is_among_these() -> None:
    assert {*EXACT, *SAID} | OTHERS == {*callbacks.__all__}
    assert {*SAID} <= {kind.__name__ for kind in NOT_EXACT}


@pytest.mark.nightly
def test_averaged_weights_are_exact_where_a_run_stops_in_the_epoch_for_batch_norms(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*arguments(["StochasticWeightAveraging"]), "--max_epochs", "2"]
    reference = train("reference", *words)
    batches_of_an_epoch = 12
    train_until(2 * batches_of_an_epoch + 2, "stopped", *words)
    # No checkpoint of that epoch can be gone on with, and the last line does not claim one.
    told = capsys.readouterr()
    saved = checkpoint(Path("checkpoints/stopped/last.ckpt"))["global_step"]
    assert f"; step {saved} is saved in " in told.out + told.err
    assert_same_run(reference, resume("stopped", *words))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "kills"),
    [
        *((case, 1) for case in DAILY),
        *(pytest.param(case, KILLS, marks=pytest.mark.nightly) for case in [*EXACT, *TOGETHER]),
    ],
)
def test_killed_and_resumed_it_is_bit_identical(
    case: str, kills: int, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    words = arguments(TOGETHER.get(case, [case]), plateau=case == "ReduceLROnPlateau")
    chance = random.Random(f"{case} {os.environ.get('KILL_SEED', '')}")
    reference = run("fit", *words, "--run_name", "reference")
    assert reference.returncode == 0, reference.stderr
    assert "not exact" not in reference.stdout
    assert "a resume will not" not in reference.stdout
    steps = int(summary(Path("checkpoints/reference"))["steps"])
    named = [
        *words,
        "--run_name",
        "killed",
        "--ckpt_path",
        "auto",
        "--checkpoint_every",
        str(chance.choice([1, 2, 3])),
    ]
    left = sorted(chance.sample(range(2, steps), kills))
    for step in left:
        killed = complete([sys.executable, "-m", "tests.interrupted", str(step), "SIGKILL", *named])
        assert killed.returncode == -9, killed.stderr
    resumed = run("fit", *named)
    assert resumed.returncode == 0, resumed.stderr
    one, other = Path("checkpoints/reference"), Path("checkpoints/killed")
    assert differing(one, other) == []


def differing(one: Path, other: Path) -> list[str]:
    """Where two runs differ, in what does not measure the machine."""
    found = []
    for name in ("last.ckpt", "best.ckpt"):
        a, b = checkpoint(one / name), checkpoint(other / name)
        found += differences_in_training(a, b, name)
        names = (*TIMED, *MEASURED)
        measured_apart = [without_measured(each["run"]["state"], names) for each in (a, b)]
        found += differences(*measured_apart, f"{name}:state")
        found += differences(
            trained(a["run"]["metrics"]), trained(b["run"]["metrics"]), f"{name}:metrics"
        )
        states = [
            {
                key: state
                for key, state in whole["callbacks"].items()
                if not key.startswith((*MEASURING, "Timer", "ModelCheckpoint"))
            }
            for whole in (a, b)
        ]
        found += differences(*states, f"{name}:callbacks")
    return found + differences(
        [trained(row) for row in rows(one)], [trained(row) for row in rows(other)], "rows"
    )


WEIGHTS_DIFFER = (
    "the weights in memory: not what was saved. A bit has flipped, or code of yours has changed it"
    " while it was loaded. The resume is not exact."
)


def trained(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith((*TIMED, *MEASURED))}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) for name in SAID])
def test_what_is_not_exact_is_said_in_one_line_and_goes_on(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    words = [
        *arguments([name]),
        "--run_name",
        "r",
        "--ckpt_path",
        "auto",
        "--checkpoint_every",
        "2",
    ]
    killed = complete([sys.executable, "-m", "tests.interrupted", "20", "SIGKILL", *words])
    assert killed.returncode == -9, killed.stderr
    resumed = run("fit", *words)
    assert resumed.returncode == 0, resumed.stderr
    said = [line for line in resumed.stdout.splitlines() if "not exact" in line]
    expected = [f"a resume is not exact with {name}: {NOT_EXACT[getattr(callbacks, name)]}."]
    if name == "ModelPruning":
        # Its hook of a save makes other weights of those in memory.
        expected.append(WEIGHTS_DIFFER)
    assert said == expected


class Unplain(Callback):
    """Its state would not load again."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": Path("x")}


def test_a_callback_s_state_that_is_no_plain_data_is_told_at_the_first_save(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    words = [*arguments([]), f"--trainer.callbacks+={HERE}.Unplain", "--checkpoint_every", "1"]
    assert entry.exit_code(fit.main, words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "Unplain" in line
    assert "place" in line
