"""Every worked example runs under a plain Trainer, and keeps the promises that MNIST keeps."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from numerals.fit import job as fit
from unbroken.cli import start as entry

from tests import made_data
from tests.commands import checkpoint, complete
from tests.environments import make_environment_above
from tests.example_packages import LACKING, NEEDS
from tests.promises import (
    ROOT,
    PictureSuite,
    PromiseSuite,
    TaskSuite,
    environment,
)

CONFIGS = ROOT / "configs" / "examples"
EXAMPLES = sorted(CONFIGS.glob("*.py"))
# What a few steps on the data that an example makes up reach, by its monitored metric; None where
# it has no test set.
REACHED: dict[str, tuple[str, float] | None] = {
    "autoencoder": None,
    "finetune_digits": ("test/accuracy", 0.7),
    "gan": None,
    "image_regression": ("test/mae", 0.1),
    "multi_label": ("test/f1", 0.9),
    "png_folder": ("test/accuracy", 0.0),  # noise
    "segmentation": ("test/iou", 0.6),
    "stream": None,
    "tabular": ("test/r2", 0.5),
    "tensor_dataset": ("test/accuracy", 0.9),
    "text": None,
}


class TestAutoEncoder(TaskSuite):
    """Lightning's own example: nothing of this project in it."""

    monitor = "val_loss"
    mode = "min"
    logged = {"train_loss", "val_loss"}
    reached = ("test_loss", 0.3)

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        classes = [
            "--model",
            "tests.other_tasks.TestedAutoEncoder",
            "--data",
            "tests.other_tasks.NoisyWaves",
        ]
        return [*classes, "--monitor", "val_loss", "--mode", "min"]


@pytest.mark.nightly
class TestAutoEncoderThatIsKilled(TestAutoEncoder, PromiseSuite):
    interrupt_at = 40
    signal = "SIGKILL"


@pytest.mark.nightly
class TestGAN(PromiseSuite):
    """Manual optimization with two optimizers, loaders of the module's own, nothing that could be
    followed.
    """

    monitor = None
    logged = {"g_loss", "d_loss"}
    reached = None
    interrupt_at = 55
    optimizers = 2

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        return example("gan")


@pytest.mark.nightly
class TestPngFolder(PromiseSuite, PictureSuite):
    """Two worker processes, random flips, a kill instead of a request to stop, and Pillow in
    between.
    """

    signal = "SIGKILL"

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        made_data.make_picture_folder(folder, ["bud", "fruit", "leaf"])
        return [
            *example("png_folder", folder),
            "--data.batch_size",
            "30",
            "--data.num_workers",
            "2",
        ]


@pytest.mark.nightly
class TestFashionMNIST(PictureSuite):
    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        made_data.make_idx_files(folder / "FashionMNIST" / "raw")
        return [*example("fashion_mnist", folder), "--data.batch_size", "48"]


@pytest.mark.nightly
class TestTensorFiles(PictureSuite):
    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        made_data.make_tensor_files(folder)
        return [*example("tensor_dataset", folder), "--data.batch_size", "40"]


@pytest.mark.nightly
class TestFinetunedBackbone(PictureSuite):
    # Early layers that are frozen at random weights are of no use; real ones would be.
    reached = ("test/accuracy", 0.0)

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        made_data.make_picture_folder(folder, ["bud", "fruit", "leaf"], train=160, test=41)
        size = [
            "--model.network.name",
            "shufflenet_v2_x0_5",
            "--data.batch_size",
            "16",
            "--data.num_workers",
            "0",
        ]
        return [*example("finetune_backbone", folder), *size]


@pytest.mark.nightly
class TestImageRegression(TaskSuite):
    monitor = "val/mae"
    mode = "min"
    logged = {"train/loss", "train/mae", "val/loss", "val/mae"}
    reached = ("test/mae", 0.15)

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        return [*example("image_regression"), "--max_epochs", "4"]


@pytest.mark.nightly
class TestMultiLabel(TaskSuite):
    monitor = "val/f1"
    logged = {"train/loss", "train/f1", "val/loss", "val/f1"}
    reached = ("test/f1", 0.8)

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        return [*example("multi_label"), "--max_epochs", "4"]


@pytest.mark.nightly
class TestSegmentation(PromiseSuite):
    monitor = "val/iou"
    logged = {"train/loss", "train/iou", "val/loss", "val/iou"}
    reached = ("test/iou", 0.4)
    interrupt_at = 28
    signal = "SIGKILL"

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        return [*example("segmentation"), "--max_epochs", "2"]


@pytest.mark.nightly
class TestFinetunedDigits(PromiseSuite):
    """Killed in its second epoch, in which the frozen layers train as well."""

    reached = ("test/accuracy", 0.8)
    interrupt_at = 28
    signal = "SIGKILL"

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        size = ["--data.source", "sample", "--data.train_samples", "2000"]
        size += ["--data.test_samples", "500", "--data.batch_size", "100", "--max_epochs", "2"]
        runs = str(folder / "runs")
        digits = ["--accelerator", "cpu", "--run_name", "digits", "--default_root_dir", runs]
        assert fit.main([*size, *digits]) == 0
        weights = folder / "runs" / "digits" / "best.ckpt"
        return [*example("finetune_digits"), *size, "--init_weights", str(weights)]

    def test_the_body_is_frozen_for_an_epoch_and_then_learns_at_a_tenth_of_the_rate(
        self, undisturbed: Path, tmp_path: Path
    ) -> None:
        last = checkpoint(undisturbed / "last.ckpt")
        (optimizer,) = last["optimizer_states"]
        body, head = optimizer["param_groups"]
        assert body["lr"] == pytest.approx(head["lr"] / 10)
        # 20 batches an epoch
        steps = {key: int(state["step"]) for key, state in optimizer["state"].items()}
        assert {steps[key] for key in body["params"]} == {20}
        assert {steps[key] for key in head["params"]} == {40}


@pytest.mark.nightly
@LACKING["text"]
class TestText(PromiseSuite):
    monitor = "val_accuracy"
    logged = {"train_loss", "val_accuracy"}
    reached = None
    interrupt_at = 55
    signal = "SIGKILL"

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        return example("text")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")  # by litdata
@LACKING["stream"]
class TestStream(PromiseSuite):
    """Two worker processes, killed inside the second epoch."""

    monitor = "val_loss"
    mode = "min"
    logged = {"val_loss"}
    reached = None
    interrupt_at = 130
    signal = "SIGKILL"

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        # litdata brings a number of its own up to date only in the epoch after a resume.
        return [*example("stream", folder), "--data.num_workers", "2", "--max_epochs", "3"]


class TestTabular(TaskSuite):
    monitor = "val/r2"
    logged = {"train/loss", "train/r2", "val/loss", "val/r2"}
    reached = ("test/r2", 0.3)

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        return [*example("tabular"), "--max_epochs", "8"]


# Every other example is killed and resumed, and tested on two processes, too.
KILLED: list[type] = []
KILLED += [TestTabular]
KILLED += [
    TestTensorFiles,
    TestFinetunedBackbone,
    TestImageRegression,
    TestMultiLabel,
]
for suite in KILLED:
    name = f"{suite.__name__}ThatIsKilled"
    globals()[name] = pytest.mark.nightly(type(name, (suite, PromiseSuite), {"signal": "SIGKILL"}))
suite = None  # pytest would collect it once more


def example(name: str, root: Path | None = None) -> list[str]:
    """The arguments of ``fit`` that train an example, on the data in ``root`` or on data that it
    makes up.
    """
    flags = ["--config", str(CONFIGS / f"{name}.yaml")]
    if root is not None:
        flags += ["--data.root", str(root)]
    return flags


QUICK = ("gan", "tabular")  # the others run in the nightly group
RUNNING: list[Any] = []
for name in sorted(REACHED):
    marks = [] if name in QUICK else [pytest.mark.nightly]
    if name in NEEDS:
        marks.append(LACKING[name])
    RUNNING.append(pytest.param(name, marks=marks))


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on so short a run
def test_an_example_runs_under_a_plain_trainer_on_data_that_it_makes_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes as config files name them, Lightning's own command line and Trainer, and nothing of
    the engine.
    """
    monkeypatch.syspath_prepend(str(ROOT))
    # An example may write its data.
    monkeypatch.chdir(tmp_path)
    # Lightning warns where both it and arguments are given.
    monkeypatch.setattr("sys.argv", ["plain"])
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    for ours in ("monitor", "mode"):
        config.pop(ours, None)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    config["trainer"] = {
        "max_epochs": 5,
        **config.get("trainer", {}),
        **quiet,
        "accelerator": "cpu",
    }
    data_class: type[LightningDataModule] | None = LightningDataModule
    if config["data"] is None:  # the module brings its loaders
        del config["data"]
        data_class = None
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(config))
    cli = LightningCLI(
        LightningModule,
        data_class,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        save_config_callback=None,
        seed_everything_default=42,
        args=["--config", str(tmp_path / "plain.yaml")],
    )
    before = {key: value.clone() for key, value in cli.model.state_dict().items()}
    cli.trainer.fit(cli.model, cli.datamodule)
    assert any(not torch.equal(before[key], value) for key, value in cli.model.state_dict().items())
    assert not [key for key, value in cli.trainer.callback_metrics.items() if not value.isfinite()]
    reached = REACHED[name]
    if reached is None:
        return
    (metrics,) = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    metric, bound = reached
    if metric == "test/mae":
        assert metrics[metric] <= bound
    else:
        assert metrics[metric] >= bound


def test_examples_that_show_lightnings_own_code_import_nothing_of_this_project() -> None:
    for name in ("autoencoder", "gan", "stream", "text"):
        assert "import project" not in (CONFIGS / f"{name}.py").read_text()
        assert "project" not in (CONFIGS / f"{name}.py").read_text().partition('"""\n')[2]


def test_there_is_a_config_file_for_every_example() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_at_most_40_lines_of_code(path: Path) -> None:
    """Comments, docstrings and empty lines are not counted."""
    text = path.read_text(encoding="utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.string.startswith('"""')
        if token.string.strip() and token.type != tokenize.COMMENT and not is_docstring:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    assert len(lines) <= 40


# Examples that need a further package


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_without_its_package_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setitem(sys.modules, NEEDS[name], None)
    monkeypatch.delitem(sys.modules, f"configs.examples.{name}", raising=False)
    assert entry.exit_code(fit.main, example(name)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(f"Try: pip install {NEEDS[name]}")


def environment_with(folder: Path, *packages: str) -> str:
    """The Python of a new virtual environment, with all packages of this one and some more."""
    python = make_environment_above(folder)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


@pytest.mark.nightly
@pytest.mark.timeout(900)  # it downloads
@pytest.mark.parametrize(("name", "suite"), [("text", "TestText"), ("stream", "TestStream")])
def test_an_example_passes_where_its_package_is_installed(
    name: str, suite: str, tmp_path: Path
) -> None:
    """Its tests, and those of its commands in the pages."""
    python = environment_with(tmp_path / "venv", NEEDS[name])
    plain = "test_an_example_runs_under_a_plain_trainer_on_data_that_it_makes_up"
    folder = "unbroken/tests/repository"
    chosen = [f"{folder}/test_examples.py::{test}" for test in (suite, f"{plain}[{name}]")]
    chosen += [f"{folder}/test_readme.py", "-m", "nightly or not nightly"]
    chosen += ["-k", f"{suite} or {plain} or {name}.yaml"]
    words = [python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *chosen]
    inherited = environment()
    for variable in list(inherited):
        if variable.startswith(("PYTEST_", "NIGHTLY")):
            del inherited[variable]
    ended = subprocess.run(words, cwd=ROOT, env=inherited, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout
    assert f"installs {NEEDS[name]}" not in ended.stdout  # nothing was skipped for its lack
    assert "could not import" not in ended.stdout


# The notebook

NOTEBOOK = CONFIGS / "quickstart.ipynb"
# What its cells print.
EXACT = ["stopped by SIGINT after step 66", "same weights: True", "same losses: True"]
EXECUTE = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
# Jupyter starts a notebook in its own folder.
place = {"metadata": {"path": sys.argv[2]}}
nbclient.NotebookClient(notebook, resources=place).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""), *output.get("data", {}))
"""


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_committed_without_outputs() -> None:
    for cell in code_cells():
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.nightly
def test_the_cells_of_the_notebook_show_an_exact_resume(tmp_path: Path) -> None:
    cells = ["".join(cell["source"]) for cell in code_cells()]
    in_a_folder_of_the_test = f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}"
    code = "\n\n".join([in_a_folder_of_the_test, *cells])
    without_screen = {**os.environ, "MPLBACKEND": "agg"}
    ended = complete([sys.executable, "-c", code], cwd=CONFIGS, env=without_screen)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == EXACT


@pytest.mark.nightly
@pytest.mark.timeout(900)  # it downloads
def test_the_notebook_runs_in_a_kernel_of_jupyter(tmp_path: Path) -> None:
    python = environment_with(tmp_path / "venv", "nbclient", "ipykernel")
    words = [python, "-c", EXECUTE, str(NOTEBOOK), str(CONFIGS)]
    ended = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for line in (*EXACT, "image/png"):
        assert line in ended.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "nothing.Here"], "nothing"),
        (
            ["--config", "png_folder", "--model.network.image_shape", "[1,32,32]"],
            "Try --model.network.image_shape [3,32,32] --model.network.num_classes 3",
        ),
        (["--config", "png_folder", "--model.network.num_classes", "10"], "must give 3 logits"),
        (
            ["--config", "png_folder", "--data.root", "missing"],
            "--data.root must hold a folder train, got missing",
        ),
    ],
)
def test_a_newcomers_mistake_is_told_in_one_line(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    made_data.make_picture_folder(tmp_path / "data", ["bud", "fruit", "leaf"], train=30, test=3)
    named = {name: str(CONFIGS / f"{name}.yaml") for name in ("png_folder", "fashion_mnist")}
    words = [named.get(word, word) for word in flags]
    if "--config" in flags and "--data.root" not in flags:
        words += ["--data.root", str(tmp_path / "data")]
    words += ["--default_root_dir", str(tmp_path / "runs")]
    assert entry.exit_code(fit.main, words) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert message in error[0]


@pytest.mark.skipif(
    "FASHION_MNIST_ROOT" not in os.environ, reason="needs FASHION_MNIST_ROOT/FashionMNIST/raw"
)
@pytest.mark.nightly
def test_fashion_mnist_reaches_090_on_the_full_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    monkeypatch.syspath_prepend(str(ROOT))
    where = ["--default_root_dir", str(tmp_path), "--run_name", "full"]
    assert (
        fit.main([*example("fashion_mnist", Path(os.environ["FASHION_MNIST_ROOT"])), *where]) == 0
    )
    assert json.loads((tmp_path / "full" / "summary.json").read_text())["test/accuracy"] >= 0.90
