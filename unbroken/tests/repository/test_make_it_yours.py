"""Everything that a config file alone can change; and docs/make_it_yours.md, done as it is
written.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
import yaml
from numerals.fit import job as fit
from unbroken.cli import start as entry
from unbroken.commands.rename.clone import Clone
from unbroken.commands.rename.command import rename

from tests.commands import checkpoint, complete, rows, summary
from tests.promises import ROOT
from tests.reported import of_type, wandb_folders, wandb_records
from tests.repository.clones import fresh_clone, git

PAGE = (ROOT / "docs" / "make_it_yours.md").read_text(encoding="utf-8")


def block(language: str, containing: str, page: str = PAGE) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return found


@pytest.mark.nightly
@pytest.mark.skipif("# mine.py" not in PAGE, reason="the page has no images")
def test_the_page_for_newcomers_works_as_written(tmp_path: Path) -> None:
    python = block("python", "# mine.py")
    config = block("yaml", "# mine.yaml")
    command = block("bash", "mine.yaml")
    (tmp_path / "mine.py").write_text(python)
    (tmp_path / "mine.yaml").write_text(config)
    words = [
        sys.executable,
        *shlex.split(command)[1:],
        "--run_name",
        "mine",
        "--accelerator",
        "cpu",
    ]
    ended = complete(words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (
        json.loads((tmp_path / "checkpoints" / "mine" / "summary.json").read_text())[
            "test/accuracy"
        ]
        > 0.6
    )
    # its own arguments are flags of a resumed run, too, without the config file
    width = words[words.index("--model.network.width") + 1]
    again = [
        "--run_name",
        "mine",
        "--ckpt_path",
        "auto",
        "--max_epochs",
        "3",
        "--model.network.width",
        width,
    ]
    resumed = complete([*words[:3], *again], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr


DATA = '''"""My data."""

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset


class Points(LightningDataModule):
    def train_dataloader(self):
        x = torch.linspace(-1, 1, 1000).view(-1, 1)
        return DataLoader(TensorDataset(x, 3 * x), batch_size=50, shuffle=True)
'''
# What stands in fit.py → what a person writes in its place
OWN_MODEL = {
    "from acme.model import MNISTClassifier": "from acme.model import Line",
    "model=MNISTClassifier": "model=Line",
}
OWN_DATA = OWN_MODEL | {
    "from acme.data import MNISTDataModule": "from acme.data import Points",
    "data=MNISTDataModule": "data=Points",
}
OWN_LOADER = OWN_MODEL | {
    "from acme.data import MNISTDataModule\n": "",
    "data=MNISTDataModule": "data=None",
}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform == "win32", reason="the command is of a shell")
@pytest.mark.parametrize(
    ("form", "edits"),
    [("wheel", OWN_DATA), ("source", OWN_LOADER)],
    ids=["data_module", "own_loader"],
)
def test_classes_of_ones_own_in_the_place_of_ours_pass_the_tests_of_the_clone(
    form: str, edits: dict[str, str], tmp_path: Path
) -> None:
    clone = fresh_clone(tmp_path)
    assert rename(Clone(clone, "project"), ["acme", "--library", form]) == 0
    page = (clone / "docs" / "make_it_yours.md").read_text()
    subprocess.run(["bash", "-ec", block("bash", "rm -r", page)], cwd=clone, check=True)
    (clone / "acme" / "model.py").write_text(block("python", "# task.py", page))
    if edits is OWN_DATA:
        (clone / "acme" / "data.py").write_text(DATA)
    fit_file = clone / "acme" / "fit.py"
    text = fit_file.read_text()
    for before, after in edits.items():
        assert before in text
        text = text.replace(before, after)
    fit_file.write_text(text)
    defaults = block("yaml", "# configs/default.yaml", page)
    (clone / "configs" / "default.yaml").write_text(defaults)

    ended = complete([sys.executable, "-m", "pytest", "-n", "0", "-v"], cwd=clone)
    assert ended.returncode == 0, ended.stdout
    for name in ("trains[default]", "trains[debug]", "ends_as_one_that_was_never_killed"):
        assert re.search(rf"{re.escape(name)} PASSED", ended.stdout)
    words = ["acme.fit", "--accelerator", "cpu", "--logger", "false", "--run_name", "mine"]
    ended = complete([sys.executable, "-m", *words], cwd=clone)
    assert ended.returncode == 0, ended.stderr
    resolved = yaml.safe_load((clone / "checkpoints" / "mine" / "config.yaml").read_text())
    assert resolved["trainer"]["max_epochs"] == 20
    assert resolved["model"]["init_args"]["lr"] == 0.002
    named = git(clone, *shlex.split(block("bash", "git grep", page))[1:]).splitlines()
    assert [name for name in named if name.startswith(("configs/", "tests/"))] == []


# A config file each. Two small tasks: a regression that knows nothing of this project, and the
# bundled digits.
LINE = ["--model", "tests.other_tasks.Line", "--data", "tests.other_tasks.Loaders"]
DIGITS = [
    *("--data.source", "sample", "--data.train_samples", "320", "--data.val_samples", "50"),
    *("--data.test_samples", "50", "--data.batch_size", "32", "--model.network", "MLP"),
]
QUICK = ["--accelerator", "cpu", "--max_epochs", "3", "--log_every_n_steps", "4"]
PLAIN = [*QUICK, "--monitors", "none"]
PLAIN += ["--report", "false"]
RUN = Path("checkpoints/r")


@pytest.fixture
def in_folder(workplace: Path) -> Path:
    return workplace


def train(flags: list[str], config: str = "", name: str = "r") -> Path:
    Path("mine.yaml").write_text(config or "{}")
    assert fit.main([*flags, "--config", "mine.yaml", "--run_name", name]) == 0
    return Path("checkpoints") / name


def error_of(capsys: pytest.CaptureFixture[str], flags: list[str], config: str = "") -> str:
    Path("mine.yaml").write_text(config or "{}")
    capsys.readouterr()
    assert entry.exit_code(fit.main, [*flags, "--config", "mine.yaml", "--run_name", "bad"]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.strip()]
    return line


CALLBACKS = """
trainer:
  max_epochs: 50
  gradient_clip_val: 0.001
  callbacks:
    - {class_path: EarlyStopping, init_args: {monitor: val_loss, patience: 1, min_delta: 100}}
    - {class_path: LearningRateMonitor, init_args: {logging_interval: step}}
    - {class_path: ModelCheckpoint, init_args: {dirpath: kept, filename: "{epoch}", save_top_k: -1}}
    - {class_path: tests.other_tasks.Notes, init_args: {word: seen}}
  logger:
    - {class_path: tests.other_tasks.TextLogger, init_args: {file: all.txt}}
    - {class_path: CSVLogger, init_args: {save_dir: table}}
"""


def test_callbacks_loggers_and_clipping_by_a_config_file(in_folder: Path) -> None:
    run = train(
        [*LINE, *PLAIN], CALLBACKS.replace("gradient_clip_val: 0.001", "gradient_clip_val: 1.0e-9")
    )
    assert summary(run)["epochs"] == 2  # EarlyStopping: the second was no better by 100
    logged = {name for row in rows(run) for name in row}
    assert {"lr-Adam", "train_loss_step", "val_loss"} <= logged
    assert Path("notes.txt").read_text().split() == ["seen", "0", "seen", "1"]
    assert sorted(path.name for path in Path("kept").iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    told = Path("all.txt").read_text()
    assert "val_loss" in told
    assert "train_error" in told
    assert "val_loss" in next(Path("table").rglob("metrics.csv")).read_text()
    averages = checkpoint(run / "last.ckpt")["optimizer_states"][0]["state"].values()
    assert max(float(state["exp_avg"].abs().max()) for state in averages) < 1e-9  # clipped


def test_lightnings_checkpoints_without_a_folder_of_their_own_lie_in_the_runs(
    in_folder: Path,
) -> None:
    run = train([*LINE, *PLAIN, "--max_epochs", "1", "--trainer.callbacks", "ModelCheckpoint"])
    assert len([path for path in run.rglob("*.ckpt") if path.name.startswith("epoch=0")]) == 1
    assert {"best.ckpt", "last.ckpt"} <= {path.name for path in run.iterdir()}


@pytest.mark.nightly
def test_callbacks_of_the_command_line_replace_a_config_files_or_join_them(in_folder: Path) -> None:
    notes = "trainer: {callbacks: [{class_path: tests.other_tasks.Notes, init_args: {word: file}}]}"
    stop = [
        "EarlyStopping",
        "--trainer.callbacks.monitor",
        "val_loss",
        "--trainer.callbacks.min_delta",
        "100",
    ]
    stop += ["--trainer.callbacks.patience", "1"]
    assert (
        summary(train([*LINE, *PLAIN, "--trainer.callbacks+=" + stop[0], *stop[1:]], notes))[
            "epochs"
        ]
        == 2
    )
    assert Path("notes.txt").read_text().split() == ["file", "0", "file", "1"]
    train([*LINE, *PLAIN, "--trainer.callbacks", *stop], notes, name="replaced")
    assert Path("notes.txt").read_text().split() == ["file", "0", "file", "1"]


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            "trainer: {callbacks: {class_path: EarlyStopping, init_args: {monitor: nothing}}}",
            "metric `nothing`",
        ),
        (
            "trainer: {callbacks: {class_path: ModelCheckpoint, init_args: {monitor: nothing}}}",
            "monitor='nothing'",
        ),
        ("trainer: {callbacks: RichProgressBar}", "rich"),
    ],
)
def test_a_callback_that_cannot_work_is_told_in_one_line(
    config: str, part: str, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "Rich" in config:
        try:
            import rich  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("rich is installed")
    assert part in error_of(capsys, [*LINE, *PLAIN], config)
    assert not Path("checkpoints/bad/last.ckpt").exists()
    assert not Path("checkpoints/latest").is_symlink() or Path("checkpoints/latest").exists()


OPTIMIZER = """
model:
  optimizer: tests.other_tasks.SignSGD
  lr: 0.001
  schedule: StepLR
  schedule_args: {step_size: 1, gamma: 0.5}
  class_weights: [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]
"""
PLATEAU = """
model:
  optimizer: torch.optim.SGD
  lr: 1.0e-5
  schedule: ReduceLROnPlateau
  schedule_args: {factor: 0.1, patience: 0, threshold: 10}
"""


@pytest.mark.nightly
def test_optimizer_schedule_and_class_weights_by_a_config_file(in_folder: Path) -> None:
    run = train([*DIGITS, *PLAIN], OPTIMIZER)
    last = checkpoint(run / "last.ckpt")
    assert last["optimizer_states"][0]["param_groups"][0].keys() >= {"lr"}
    assert "exp_avg" not in str(last["optimizer_states"][0])
    assert last["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(
        0.001 / 8
    )  # once per epoch
    assert last["state_dict"].get("trained_loss.weight", torch.tensor([0.0]))[-1] == 0
    without = train([*DIGITS, *PLAIN], OPTIMIZER.replace("0]", "1]"), name="alike")
    ours, theirs = (checkpoint(path / "last.ckpt")["state_dict"] for path in (run, without))
    assert any(not torch.equal(ours[key], theirs[key]) for key in ours)
    plateau = checkpoint(train([*DIGITS, *PLAIN], PLATEAU, name="plateau") / "last.ckpt")
    assert plateau["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(
        1e-7
    )  # after two of three epochs


MIXED = """
data:
  transforms:
    - {class_path: torchvision.transforms.v2.RandomHorizontalFlip, init_args: {p: 1.0}}
    - {class_path: torchvision.transforms.v2.MixUp, init_args: {num_classes: 10}}
    - {class_path: torchvision.transforms.v2.CutMix, init_args: {num_classes: 10}}
"""
SAMPLED = """
data:
  class_path: tests.other_tasks.Balanced
  init_args: {most: 4, batch_size: 32, source: sample}
"""


@pytest.mark.nightly
def test_augmentation_and_sampling_by_a_config_file_or_one_method(in_folder: Path) -> None:
    plain = train([*DIGITS, *PLAIN, "--max_epochs", "1"], name="plain")
    mixed = train([*DIGITS, *PLAIN, "--max_epochs", "1"], MIXED, name="mixed")
    ours, theirs = (
        [float(row["train/loss"]) for row in rows(run) if "train/loss" in row]
        for run in (mixed, plain)
    )
    assert all(a != b for a, b in zip(ours, theirs, strict=True))
    assert 0 <= summary(mixed)["test/accuracy"] <= 1
    train(
        ["--model.network", "MLP", "--data.test_samples", "50", *PLAIN, "--max_epochs", "1"],
        SAMPLED,
    )
    labels = [int(word) for word in Path("labels.txt").read_text().split()]
    assert len(labels) == 320
    assert set(labels) == {0, 1, 2, 3, 4}


CHOSEN = [
    "none",
    "memory",
    "throughput,optimizer",
]


@pytest.mark.nightly
def test_monitors_and_report_are_switched_off_and_on(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {}
    for chosen in CHOSEN:
        run = train([*LINE, *PLAIN, "--monitors", chosen], name=chosen.replace(",", "+"))
        names = {
            name.split("/")[0]
            for row in (run / "metrics.csv").read_text().splitlines()[:1]
            for name in row.split(",")
        }
        measured[chosen] = names & {"throughput", "memory", "optimizer"}
        assert not (run / "report.html").exists()
    assert measured == {chosen: {*chosen.split(",")} - {"none"} for chosen in CHOSEN}
    assert "--monitors must be any of" in error_of(capsys, [*LINE, *QUICK, "--monitors", "memry"])
    told = train([*LINE, *QUICK, "--monitors", "none", "--max_epochs", "1"], name="told")
    assert (told / "report.html").exists()


@pytest.mark.nightly
def test_a_summary_that_is_asked_for_is_printed(
    in_folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    train([*LINE, *PLAIN, "--max_epochs", "1", "--enable_model_summary=true"])
    told = capsys.readouterr()
    assert "Trainable params" in told.out + told.err + caplog.text


@pytest.mark.nightly
def test_a_rehearsal_leaves_no_run_and_no_checkpointing_no_checkpoint(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train([*DIGITS, *PLAIN, "--max_epochs", "1"], name="first")
    train([*DIGITS, *PLAIN, "--fast_dev_run", "true"])
    assert not RUN.exists()
    assert Path("checkpoints/latest").resolve() == first.resolve()
    capsys.readouterr()
    run = train([*DIGITS, *PLAIN, "--enable_checkpointing", "false"])
    assert not list(run.glob("*.ckpt"))
    assert "test/accuracy" in summary(run)  # of the weights as they were at the end
    assert "best.ckpt" not in capsys.readouterr().out


@pytest.mark.nightly
def test_wandbs_own_variables_reach_the_run(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a logger of the user's own does not take W&B's place."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name, value in {
        "PROJECT": "mine",
        "RUN_GROUP": "study",
        "TAGS": "a,b",
        "NOTES": "why",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    # W&B reads its variables once per process, and an earlier test may have been the first.
    wandb.teardown()
    flags = [*LINE, *PLAIN, "--max_epochs", "1", "--trainer.logger", "tests.other_tasks.TextLogger"]
    run = train(flags)
    (record,) = of_type(wandb_records(wandb_folders(run)[0]), "run")
    assert (record["project"], record["run_group"], record["notes"]) == ("mine", "study", "why")
    assert sorted(record["tags"]) == ["a", "b"]
    assert "val_loss" in Path("log.txt").read_text()
