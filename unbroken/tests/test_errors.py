"""Promise 10: a user's mistake is one line with option, value and fix, exit code 2, no traceback,
nothing touched.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import get_loader
from lightning.pytorch import LightningModule
from numerals.fit import job as fit
from unbroken.cli import program
from unbroken.cli import start as entry
from unbroken.cli.cli import configure
from unbroken.cli.explain import explain
from unbroken.cli.read_checkpoint import load, read_configuration
from unbroken.cli.refusals import refusals_as_errors
from unbroken.commands import test as test_command
from unbroken.errors import nearest
from unbroken.run import main_job
from unbroken.tables import load_yaml

from tests.commands import SMALL, checkpoint, finished_run, summary
from tests.other_tasks import Line


def error_of(capsys: pytest.CaptureFixture[str], *argv: str, main=fit.main) -> str:  # type: ignore[no-untyped-def]
    """The one line a mistake is told in; asserts that it is one line with exit code 2."""
    assert entry.exit_code(main, list(argv)) == 2
    told = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "error:" in line or "Traceback" in line
    ]
    assert len(told) == 1, told
    assert told[0].startswith("error: ")
    return told[0]


@pytest.mark.daily(9)
@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--precison", "16"], ["--precison", "Did you mean --precision?"]),
        (["--max_epoch", "3"], ["--max_epoch", "Did you mean --max_epochs?"]),
        (["--epochs", "3"], ["--epochs", "Did you mean --max_epochs?"]),
        (["--lr", "0.1"], ["--lr", "Did you mean --model.lr?"]),
        (["--learning_rate=0.1"], ["--learning_rate", "Did you mean --model.lr?"]),
        (["--model.learning_rate", "0.1"], ["--model.learning_rate", "Did you mean --model.lr?"]),
        (["--logger", "tensorbord"], ["got tensorbord.", "Did you mean tensorboard?"]),
        (["--batch_size", "8"], ["--batch_size", "Did you mean --data.batch_size?"]),
        (["--seed", "1"], ["--seed", "Did you mean --seed_everything?"]),
        (["--tags", "a"], ["--tags", "Did you mean the variable WANDB_TAGS?"]),
        (["--seed_everything", "-3"], ["--seed_everything", "between 0 and 4294967295", "got -3"]),
        (["--data.batchsize", "3"], ["--data.batchsize", "--data.batch_size"]),
        (["--model.network", "MLP", "--model.network.hiden", "[3]"], ["hiden", "hidden"]),
        (["stray"], ["stray"]),
        (["--precision", "17-mixed"], ["precision", "17-mixed", "bf16-mixed"]),
        (["--max_epochs", "many"], ["max_epochs", "many", "whole number"]),
        (["--max_epochs", "-5"], ["max_epochs", "-5"]),
        (["--data.batch_size", "0"], ["--data.batch_size", "at least 1", "got 0"]),
        (["--data.batch_size", "-3"], ["--data.batch_size", "at least 1", "got -3"]),
        (["--data.batch_size", "100000000"], ["--data.batch_size", "100000000"]),
        (["--data.train_samples", "0"], ["--data.train_samples", "at least 1"]),
        (["--data.source", "imagenet"], ["--data.source", "imagenet", "sample"]),
        (["--max_epochs", "0"], ["--max_epochs", "at least 1", "got 0"]),
        (["--max_steps", "0"], ["--max_steps", "at least 1", "got 0"]),
        (["--accumulate_grad_batches", "0"], ["--accumulate_grad_batches", "at least 1"]),
        (["--model.lr", "-1"], ["--model.lr", "above 0", "-1"]),
        (["--model.lr", "fast"], ["--model.lr", "number", "fast"]),
        (["--model.network", "Foo"], ["--model.network", "Foo"]),
        (["--model.optimizer", "AdamX"], ["--model.optimizer", "AdamX", "Did you mean Adam"]),
        (["--model.optimizer_args.beta", "1"], ["--model.optimizer_args.beta", "betas"]),
        (["--matmul_precision", "tf32"], ["--matmul_precision", "tf32", "high"]),
        (["--checkpoint_every", "0"], ["--checkpoint_every", "got 0"]),
        (["--strategy", "dpp"], ["dpp"]),
        (["--devices", "640", "--accelerator", "cpu"], ["--devices", "640"]),
        (["--devices", "0"], ["--devices must be at least 1", "got 0."]),
        (["--devices=-1", "--accelerator", "cpu"], ["--devices must be at least 1", "got -1."]),
        (
            ["--trainer.callbacks+=EarlyStoping"],
            ["callbacks", "got EarlyStoping. Did you mean EarlyStopping?"],
        ),
        (
            ["--model", "foo.Bar"],
            ["--model must be an import path", "got foo.Bar: No module named 'foo'."],
        ),
        (
            ["--model", "numerals.model.MNISTClasifier"],
            ["has no attribute", "Did you mean numerals.model.MNISTClassifier?"],
        ),
        (
            ["--model", "numerals.model.MNISTClasifier", "--model.lr", "1"],
            ["has no attribute", "Did you mean numerals.model.MNISTClassifier?"],
        ),
        (
            ["--model.network", "numerals.model.ConvNt"],
            ["--model.network must be an import path", "Did you mean numerals.model.ConvNet?"],
        ),
        (
            ["--data", "torch.nn.Linear"],
            ["--data must be a subclass of LightningDataModule, got torch.nn.Linear.", "derive"],
        ),
        (
            ["--model.network", "torch.optim.Adam"],
            ["--model.network must be a subclass of Module, got torch.optim.Adam.", "derive"],
        ),
        (["--fast_dev_run"], ["--fast_dev_run needs a value, as in --fast_dev_run true."]),
        (["--report", "--max_epochs", "1"], ["--report needs a value, as in --report true."]),
        (["--max_epochs"], ["--max_epochs needs a value."]),
        (["--config", "nowhere.yaml"], ["--config nowhere.yaml"]),
        (["--ckpt_path", "nowhere.ckpt"], ["--ckpt_path", "nowhere.ckpt"]),
        (["--ckpt_path", "last"], ["--ckpt_path last", "no run"]),
        (
            ["--init_weights", "nowhere.ckpt"],
            ["--init_weights: there is no checkpoint nowhere.ckpt", "a file."],
        ),
        (["--run_name", "../x"], ["--run_name", "../x"]),
        (["--max_epochs="], ["--max_epochs must be a whole number, got nothing."]),
        (["--model.lr", ""], ["--model.lr must be a number, got nothing."]),
        (["--precision", " "], ["--precision must be one of ", "got nothing."]),
        (["--config", ""], ["--config must be a file, got nothing."]),
        (["--config", os.devnull], [f"--config {os.devnull} must hold sections"]),
        (["--run_name", "CON.1"], ["--run_name must be no name of a device of Windows", "CON.1"]),
        (["--run_name", "latest"], ["--run_name", "latest"]),
        (["--val_check_interval", "100000"], ["val_check_interval", "100000"]),
        (["--limit_train_batches", "0.0001"], ["limit_train_batches", "0.0001"]),
        (
            ["--val_check_interval", "0"],
            ["--val_check_interval", "above 0", "--limit_val_batches 0"],
        ),
        (["--monitor", ""], ["--monitor must be a metric's name, got nothing"]),
        (["--mirror", ""], ["--mirror must be a folder, or an address", "got nothing"]),
        (["--barebones", "true"], ["--barebones true", "Remove it"]),
        (["--check_val_every_n_epoch", "0"], ["--check_val_every_n_epoch", "at least 1", "got 0"]),
        (["--num_nodes", "2"], ["--num_nodes 2", "torchrun"]),
        (
            ["--strategy", "ddp_spawn", "--devices", "2", "--accelerator", "cpu"],
            ["ddp_spawn", "Use ddp"],
        ),
        (["--accelerator", "tpu"], ["the Trainer refuses"]),
        (
            ["--ckpt_path", "x" * 300],
            # From Python 3.14 on, a path that cannot be is one that is not there.
            ["too long"] if sys.version_info < (3, 14) else ["there is no checkpoint"],
        ),
        (["--ckpt_path", ""], ["--ckpt_path: there is no checkpoint ''", "Allowed: best, last"]),
        (["--gradient_clip_val", ".nan"], ["--gradient_clip_val", "a number", "got nan"]),
        (["--config=--"], ["--config needs a value, got --"]),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(
    workplace: Path, capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    line = error_of(capsys, "--data.source", "sample", *argv)
    assert all(part in line for part in parts), line
    assert not Path("checkpoints").exists() or not list(Path("checkpoints").iterdir())


@pytest.mark.parametrize("key", ["", "short"])
def test_a_key_that_is_no_secret_is_told_before_anything_is_trained(
    key: str, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNBROKEN_KEY", key)
    # Nothing is read for it.
    monkeypatch.setattr(main_job, "read_configuration", None)
    assert "UNBROKEN_KEY must be a secret of at least 32" in error_of(capsys, *SMALL)


def test_an_empty_output_of_test_is_told_before_any_work(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_of(capsys, "--output", "", main=partial(test_command.main, "numerals"))
    assert line.startswith("error: --output must be a file, got the folder")


def test_a_file_of_another_lightningcli_is_taken_or_told_where_its_optimizer_goes(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs.yaml").write_text(
        "seed_everything: true\nlr_scheduler: {class_path: StepLR}\noptimizer: SGD\n"
    )
    line = error_of(capsys, "--config", "theirs.yaml")
    assert line.startswith(
        "error: --config theirs.yaml: lr_scheduler is LightningCLI's automatic one; here a module"
    )
    Path("theirs.yaml").write_text("seed_everything: true\ntrainer: {max_epochs: 3}\n")
    theirs = configure(fit, "fit", ["--config", "theirs.yaml"])
    assert theirs.resolved["seed_everything"] == 0
    assert any("--seed_everything true is the seed 0" in note for note in theirs.notes)
    assert (
        configure(fit, "fit", ["--seed_everything", "false"]).resolved["seed_everything"] is False
    )


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    "flags",
    [
        ["last", "--max_epochs", "1"],
        ["best", "--max_epochs", "4", "--val_check_interval", "100000"],
        ["last", "--max_epochs", "4", "--model.network", "ConvNet"],
        ["last", "--max_epochs", "4", "--model.network.hidden", "[8]"],
        ["auto", "--max_epochs", "4", "--strategy", "ddp_spawn"],
    ],
)
def test_a_refused_resume_leaves_every_file_of_the_run_as_it_was(
    workplace: Path, capsys: pytest.CaptureFixture[str], finished: Path, flags: list[str]
) -> None:
    shutil.copytree(finished, "checkpoints/done", ignore_dangling_symlinks=True)
    before = contents(Path("checkpoints/done"))
    line = error_of(capsys, "--run_name", "done", "--ckpt_path", *flags)
    assert ("--max_epochs must be more than" in line) == (flags[2] == "1")
    assert contents(Path("checkpoints/done")) == before


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("lr_schedulers", 0, "_step_count"), [1, "x"]),
        (("optimizer_states", 0, "state", 0, "exp_avg"), torch.zeros(2, 3)),
        (("optimizer_states", 0, "param_groups", 0, "betas"), None),
        (("loops", "fit_loop", "epoch_progress", "current", "ready"), "x"),
        (("run", "state", "ranks", 0, "random", "numpy", 3), []),
        (("run", "state", "followed"), torch.zeros(2)),
    ],
)
def test_a_resume_from_a_changed_optimizer_is_refused_before_anything_is_written(
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    finished: Path,
    keys: tuple[Any, ...],
    value: Any,
) -> None:
    shutil.copytree(finished, "checkpoints/done", ignore_dangling_symlinks=True)
    change(Path("checkpoints/done/last.ckpt"), keys, value)
    before = contents(Path("checkpoints/done"))
    assert "optimizer_states" in error_of(
        capsys, "--run_name", "done", "--ckpt_path", "last", "--max_epochs", "4"
    )
    assert contents(Path("checkpoints/done")) == before
    assert (
        test_command.main("numerals", ["--ckpt_path", "checkpoints/done/last.ckpt"]) == 0
    )  # only a resume needs it


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    "main",
    [fit.main, partial(test_command.main, "numerals"), lambda argv: bool(load(fit, Path(argv[1])))],
)
def test_weights_that_the_network_lacks_are_told_in_one_line(
    workplace: Path, capsys: pytest.CaptureFixture[str], finished: Path, main: Any
) -> None:
    whole = checkpoint(finished / "best.ckpt")
    whole["state_dict"]["network.gone"] = torch.zeros(2)
    torch.save(whole, "more.ckpt")
    words = ["--ckpt_path", "more.ckpt", "--trust_checkpoint", "true"]
    assert "network.gone" in error_of(capsys, *words, main=main)


@pytest.mark.daily(2)
@pytest.mark.parametrize("main", [fit.main, partial(test_command.main, "numerals")])
@pytest.mark.parametrize(
    "size", [["num_classes", "3"], ["hidden", "[8]"], ["image_shape", "[1,14,14]"]]
)
def test_a_typed_size_that_the_weights_do_not_have_is_told_in_one_line(
    workplace: Path, capsys: pytest.CaptureFixture[str], finished: Path, main: Any, size: list[str]
) -> None:
    path = finished / "last.ckpt"
    line = error_of(
        capsys, "--ckpt_path", str(path), f"--model.network.{size[0]}", size[1], main=main
    )
    assert line.startswith(f"error: --ckpt_path {path}: its weights do not fit the network: ")
    assert "size mismatch for network." in line
    assert not Path("checkpoints").exists() or not list(Path("checkpoints").iterdir())


# Lightning's own counters, but for one that is no number
COUNTERS = {"ready": 0, "started": 0, "processed": {}, "completed": 0}
NO_NUMBERS = {"batch_progress": {"total": COUNTERS, "current": COUNTERS, "is_last_batch": False}}


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "loops", [{}, {"test_loop": 3}, {"test_loop": {"state_dict": {}, **NO_NUMBERS}}]
)
def test_loops_that_a_test_cannot_restore_are_told_in_one_line(
    workplace: Path, capsys: pytest.CaptureFixture[str], finished: Path, loops: dict[str, Any]
) -> None:
    torch.save(checkpoint(finished / "best.ckpt") | {"loops": loops}, "changed.ckpt")
    told = error_of(
        capsys,
        "--ckpt_path",
        "changed.ckpt",
        "--trust_checkpoint",
        "true",
        main=partial(test_command.main, "numerals"),
    )
    assert "--ckpt_path changed.ckpt cannot be tested: it holds something else" in told


def test_a_misfit_in_a_modules_own_code_keeps_its_traceback() -> None:
    with (
        pytest.raises(RuntimeError, match="loading state_dict"),
        refusals_as_errors(Path("best.ckpt")),
    ):
        torch.nn.Linear(1, 1).load_state_dict({})


def change(path: Path, keys: tuple[Any, ...], value: Any) -> None:
    """Replace an entry of a checkpoint."""
    whole = entry = checkpoint(path)
    for key in keys[:-1]:
        entry = entry[key]
    assert repr(entry[keys[-1]]) != repr(value)
    entry[keys[-1]] = value
    torch.save(whole, path)


@pytest.mark.nightly
def test_a_mistake_leaves_a_folder_that_was_there_as_it_was(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thesis = Path("checkpoints/thesis")
    thesis.mkdir(parents=True)
    for name in ("chapter.txt", "metrics.csv"):
        (thesis / name).write_text("years of work")
    error_of(
        capsys,
        "--run_name",
        "thesis",
        "--ckpt_path",
        "auto",
        "--data.source",
        "sample",
        "--precision",
        "17",
    )
    too_long = ["--data.source", "sample", "--val_check_interval", "100000"]
    error_of(capsys, "--run_name", "thesis", "--ckpt_path", "auto", *too_long)
    assert [(thesis / name).read_text() for name in ("chapter.txt", "metrics.csv")] == 2 * [
        "years of work"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_told_in_one_line(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("gpu", "cuda"):
        line = error_of(capsys, "--accelerator", word, "--devices", "2")
        told = f"error: --accelerator {word}: PyTorch finds no such device here. Leave the flag"
        assert line.startswith(told)


class WithoutStep(Line):
    """Has no training step."""

    training_step = LightningModule.training_step


class WithoutOptimizer(Line):
    """Has no optimizer."""

    configure_optimizers = LightningModule.configure_optimizers


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("tests.test_errors.WithoutStep", "No `training_step()` method defined."),
        ("tests.test_errors.WithoutOptimizer", "No `configure_optimizers()` method defined."),
        ("tests.other_tasks.Line", "`train_dataloader` must be implemented"),
    ],
)
def test_what_a_class_lacks_is_no_fault_of_a_flag(
    workplace: Path, capsys: pytest.CaptureFixture[str], name: str, method: str
) -> None:
    line = error_of(capsys, "--model", name, "--data", "null", "--logger", "false")
    told = f"error: the class of --model, or that of --data, lacks a method: {method}"
    assert line.startswith(told)
    assert not Path("checkpoints").exists()


def test_a_name_that_goes_on_is_suggested_before_one_that_looks_alike() -> None:
    logged = ["train_loss", "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"]
    assert nearest("val_loss", logged) == " Did you mean val_loss/dataloader_idx_0?"
    assert nearest("vall_loss", ["train_loss", "val_loss"]) == " Did you mean val_loss?"
    assert nearest("", logged) == ""


def test_a_missing_model_is_told_with_the_ways_to_name_one() -> None:
    line = explain("the following arguments are required: model", [])
    assert (
        line
        == "--model.class_path PACKAGE.CLASS, or a --config FILE with a section model, is needed."
    )


@pytest.mark.parametrize(
    "text", ["trainer: &x {callbacks: *x}", 'trainer: {default_root_dir: "a\\0b"}']
)
def test_an_odd_config_is_told_in_one_line(
    workplace: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    Path("odd.yaml").write_text(text)
    assert (
        "YAML" in (line := error_of(capsys, "--config", "odd.yaml"))
        or "--default_root_dir must be" in line
    )
    assert os.listdir() == ["odd.yaml"]


MANY = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGED = MANY.replace("[", "{<<: [").replace("]", "]}")


@pytest.mark.parametrize("text", [MANY, MERGED, "model: &x [*x]"])
def test_a_config_in_which_a_few_aliases_name_very_much_is_refused_at_once(
    workplace: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    Path("many.yaml").write_text(text)
    too_many = "with its aliases written out it has more than 100,000 values"
    assert too_many in error_of(capsys, "--config", "many.yaml")
    # The parser reads values of the command line, and files that these name.
    assert "--data" in error_of(capsys, "--data", "many.yaml")
    with pytest.raises(yaml.YAMLError, match=too_many):
        get_loader("yaml")(text)


@pytest.fixture
def default_yaml(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program's default file, for a test to write."""
    file = workplace / "configs" / "default.yaml"
    file.parent.mkdir()
    monkeypatch.setattr(program, "DEFAULTS", str(file))
    return file


NOT_TAKEN = [
    "trainer: {max_epoch: 3}",
    "modle: {lr: 1}",
    "monitr: val/loss",
    "trainer: {max_epochs: four}",
    "trainer: {logger: tensorbord}",
    "trainer: {callbacks: [{class_path: EarlyStoping}]}",
    "seed_everything: abc",
    "seed_everything: -1",
    "model: {class_path: numerals.model.Nope}",
    "model: {class_path: nowhere.Nope, init_args: {lr: 1}}",
    "model: {lr: fast}",
    "model: {lr: null}",
    "model: {lr: -1}",
    "model: {lrr: 1}",
    "model: [1]",
    "model: null",
    "print_config: true",
]
NO_SETTINGS = ["- a", "hello", "1: 2", "trainer:", "trainer:\n\tdevices: 1", "max_epochs: 3"]
NO_SETTINGS += ["optimizer: Adam", "data: {x: 1}\ndata: {y: 1}", "data: {a: {x: 1, 'x': 2}}"]


@pytest.mark.daily(4)
@pytest.mark.parametrize("text", [*NOT_TAKEN, *NO_SETTINGS])
def test_what_is_wrong_in_the_default_file_is_told_as_that_of_a_config_file_and_names_it(
    default_yaml: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    Path("mine.yaml").write_text(text)
    told = error_of(capsys, "--config", "mine.yaml")
    default_yaml.write_text(text)
    line = error_of(capsys)
    name = str(Path("configs/default.yaml"))
    expected = told.replace("--config mine.yaml", name)
    if expected == told:
        expected = told.replace("error: ", f"error: {name}: ")
    assert line == expected
    assert not Path("checkpoints").exists()


def test_a_default_file_that_cannot_be_read_is_told_in_one_line(
    default_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(Path("configs/default.yaml"))
    default_yaml.mkdir()
    assert error_of(capsys).startswith(f"error: {name} cannot be read: ")
    default_yaml.rmdir()
    default_yaml.write_bytes(b"trainer: \xff")
    assert error_of(capsys).startswith(f"error: {name} cannot be read: ")
    default_yaml.write_text("config: other.yaml")
    told = f"error: {name}: config names another file. Write its settings here."
    assert error_of(capsys) == told


def test_an_error_about_what_is_typed_does_not_name_the_default_file(
    default_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default_yaml.write_text("trainer: {max_epochs: 3}\nmodel: {lr: 0.1}")
    told = "error: --max_epochs must be a whole number, got four."
    assert error_of(capsys, "--max_epochs", "four") == told
    told = "error: --model.lr must be a number, got fast."
    assert error_of(capsys, "--model.lr", "fast") == told


@pytest.mark.parametrize("option", ["network", "init_args.network", "init_args.network.class_path"])
def test_a_short_name_is_the_programs_own_network_however_the_option_is_written(
    option: str,
) -> None:
    """Another package has a class of that name, too."""
    found = configure(fit, "fit", [f"--model.{option}", "MLP"])
    network = found.resolved["model"]["init_args"]["network"]
    assert network["class_path"] == "numerals.model.MLP"


TAKEN = [
    "model: {lr: 0.002}",
    "model: {lr: 1e-3}",
    "model: {init_args: {lr: 0.003}}",
    "model.lr: 0.002",
    "model.network.class_path: numerals.model.MLP",
    "model: numerals.model.MNISTClassifier",
    "data: {batch_size: 100, root: ~/x}",
    "data: null",
    "run_name: mine",
    "trainer: {max_steps: 10}",
    "trainer: {max_epochs: 3, callbacks: [{class_path: RichProgressBar}]}\r\nreport: false\r\n",
    "\ufefftrainer: {max_epochs: 3}",
    "model: {class_path: tests.other_tasks.LineWithLoaders}",
]


@pytest.mark.daily(5)
@pytest.mark.parametrize("text", TAKEN)
def test_the_default_file_means_what_a_config_file_means(default_yaml: Path, text: str) -> None:
    Path("mine.yaml").write_bytes(text.encode())
    asked = configure(fit, "fit", ["--config", "mine.yaml"])
    default_yaml.write_bytes(text.encode())
    default = configure(fit, "fit", [])
    assert default.resolved == asked.resolved
    assert default.options.run_name == asked.options.run_name


@pytest.mark.parametrize("text", ["", "# trainer:\n#   max_epochs: 3\n"])
def test_a_default_file_that_sets_nothing_is_as_none(default_yaml: Path, text: str) -> None:
    without = configure(fit, "fit", []).resolved
    default_yaml.write_text(text)
    assert configure(fit, "fit", []).resolved == without


def test_what_is_typed_wins_over_the_default_file(default_yaml: Path) -> None:
    default_yaml.write_text("trainer: {max_epochs: 3}\nmodel.lr: 0.1\nrun_name: mine")
    Path("mine.yaml").write_text("model: {lr: 0.2}")
    by_file = configure(fit, "fit", ["--config", "mine.yaml", "--run_name", "other"])
    assert by_file.resolved["model"]["init_args"]["lr"] == 0.2
    assert by_file.options.run_name == "other"
    by_word = configure(fit, "fit", ["--model.lr", "0.3", "--max_steps", "9"])
    assert by_word.resolved["model"]["init_args"]["lr"] == 0.3
    # Only the typed limit counts.
    assert by_word.resolved["trainer"]["max_epochs"] == -1
    # The arguments are those of the default class.
    classes = ["--model", "tests.other_tasks.SlowClassifier", "--data", "null"]
    by_class = configure(fit, "fit", classes).resolved["model"]
    assert by_class["init_args"]["lr"] == 0.0005


def test_the_default_file_names_runs_and_a_resumed_run_keeps_its_own_settings(
    default_yaml: Path,
) -> None:
    default_yaml.write_text("run_name: mine\nckpt_path: auto")
    assert fit.main([*SMALL, "--max_epochs", "1", "--model.lr", "0.01"]) == 0
    default_yaml.write_text("run_name: mine\nckpt_path: auto\nmodel: {lr: 0.5}")
    config, run = read_configuration(fit, [])
    run.release()
    assert (run.name, run.changes) == ("mine", [])
    assert config.resolved["model"]["init_args"]["lr"] == 0.01


def test_the_help_shows_what_the_default_file_sets(
    default_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default_yaml.write_text("trainer: {max_epochs: 17}\nmodle: 1")
    assert entry.exit_code(fit.main, ["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "default: 17)" in shown


@pytest.mark.nightly
def test_a_long_yaml_text_with_a_star_has_no_aliases() -> None:
    assert len(load_yaml("a: '*.png'\nb: [" + "1, " * 100_001 + "]")["b"]) == 100_001


@pytest.mark.nightly
def test_a_malformed_config_is_named_with_its_line(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.yaml").write_text("trainer:\n  max_epochs: [1\n")
    assert "bad.yaml is not valid YAML, line" in error_of(capsys, "--config", "bad.yaml")
    Path("list.yaml").write_text("- 1\n")
    assert "list.yaml" in error_of(capsys, "--config", "list.yaml")
    Path("empty.yaml").write_text("trainer:\n")
    assert "trainer must hold flags and values" in error_of(capsys, "--config", "empty.yaml")
    Path("flat.yaml").write_text("precision: bf16-mixed\n")
    assert "flat.yaml: write precision under trainer:" in error_of(capsys, "--config", "flat.yaml")
    Path("key.yaml").write_text("trainer: {max_epoch: 3}\n")
    assert "trainer.max_epochs" in error_of(capsys, "--config", "key.yaml")
    for name, detail in (("bad", " - while parsing"), ("list", "."), ("nowhere", ".")):
        told = f"error: --trainer: {name}.yaml is no file of flags and values{detail}"
        assert error_of(capsys, "--trainer", f"{name}.yaml").startswith(told)


@pytest.mark.nightly
def test_a_share_of_the_test_set_that_is_less_than_a_batch_loses_no_run_and_is_told_in_one_line(
    workplace: Path, capsys: pytest.CaptureFixture[str], finished: Path
) -> None:
    share = ["--limit_test_batches", "0.001"]
    assert fit.main([*SMALL, "--max_epochs", "1", "--run_name", "r", *share]) == 0
    assert (
        "\nnot tested: You requested to check 0.001 of the `test_dataloader`"
        in capsys.readouterr().out
    )
    facts = summary(Path("checkpoints/r"))
    assert "test/accuracy" not in facts
    assert facts["notes"][0].startswith("not tested: You requested to check 0.001")
    path = ["--ckpt_path", str(finished / "best.ckpt")]
    assert "limit_test_batches" in error_of(
        capsys, *path, *share, main=partial(test_command.main, "numerals")
    )


@pytest.fixture
def finished() -> Path:
    """A finished run's folder."""
    return finished_run()


@pytest.mark.nightly
def test_a_refused_run_leaves_none_of_the_folders_that_it_made_and_all_that_were_there(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = ["--data.source", "sample", "--accelerator", "tpu", "--default_root_dir"]
    for name in ([], ["--run_name", "r"], ["--run_name", "r", "--ckpt_path", "auto"]):
        error_of(capsys, *refused, "a/b", *name)
        assert not Path("a").exists()
        Path("mine").mkdir(exist_ok=True)
        error_of(capsys, *refused, "mine/b", *name)
        error_of(capsys, *refused, "mine", *name)
        assert Path("mine").is_dir()
        assert not list(Path("mine").iterdir())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [[], ["--run_name", "r"]])
def test_a_root_folder_that_is_a_link_to_nowhere_is_told_in_one_line(
    workplace: Path, capsys: pytest.CaptureFixture[str], name: list[str]
) -> None:
    Path("checkpoints").symlink_to("gone")
    assert "checkpoints" in error_of(capsys, *SMALL, *name)
    assert not Path("gone").exists()


def test_a_refused_run_from_another_s_checkpoint_leaves_no_folder(
    workplace: Path, capsys: pytest.CaptureFixture[str], finished: Path
) -> None:
    error_of(
        capsys,
        "--run_name",
        "new",
        "--ckpt_path",
        str(finished / "last.ckpt"),
        "--strategy",
        "ddp_spawn",
    )
    assert not Path("checkpoints/new").exists()
    Path("text.ckpt").write_text("hello")
    shutil.copy(finished / "last.ckpt", "whole.ckpt")
    for words in (["text.ckpt"], ["whole.ckpt", "--precison", "16"]):
        error_of(capsys, "--ckpt_path", *words)
        assert sorted(os.listdir()) == ["text.ckpt", "whole.ckpt"]


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Payload:
    """What an attacker's pickle does when it is loaded."""

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return os.mkdir, ("payload-ran",)


@pytest.mark.parametrize("main", [fit.main, partial(test_command.main, "numerals")])
def test_a_pickled_payload_is_refused_unexecuted(
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    main,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv(
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"
    )  # an environment that turns torch's safe default off
    contents = torch.load(finished / "best.ckpt", weights_only=True)
    torch.save({**contents, "extra": Payload()}, "evil.ckpt")
    assert "refused" in error_of(capsys, "--ckpt_path", "evil.ckpt", main=main)
    assert not Path("payload-ran").exists()


@pytest.mark.parametrize("main", [fit.main, partial(test_command.main, "numerals")])
def test_damaged_and_foreign_checkpoints_are_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str], main, finished: Path
) -> None:  # type: ignore[no-untyped-def]
    whole = (finished / "best.ckpt").read_bytes()
    Path("half.ckpt").write_bytes(whole[: len(whole) // 2])
    Path("text.ckpt").write_text("hello")
    torch.save({"weight": torch.zeros(3)}, "foreign.ckpt")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    Path("flipped.ckpt").write_bytes(flipped)
    for name in ("half.ckpt", "text.ckpt", "foreign.ckpt", "flipped.ckpt"):
        assert name in error_of(capsys, "--ckpt_path", name, main=main)


def test_a_run_name_that_is_taken_is_refused_untouched(
    workplace: Path, capsys: pytest.CaptureFixture[str], finished: Path
) -> None:
    shutil.copytree(finished, "checkpoints/done", ignore_dangling_symlinks=True)
    before = contents(Path("checkpoints/done"))
    line = error_of(capsys, *SMALL, "--run_name", "done")
    assert "--ckpt_path auto" in line
    assert contents(Path("checkpoints/done")) == before


@pytest.mark.daily(2)
@pytest.mark.parametrize("damage", ["truncated", "corrupted", "garbage", "half-gz"])
def test_damaged_data_files_are_named(
    workplace: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    from numerals.data.mnist import DIGITS

    raw = Path("root/MNIST/raw")
    raw.mkdir(parents=True)
    for source in DIGITS.glob("*.gz"):
        shutil.copy(source, raw)
    target = raw / "train-images-idx3-ubyte.gz"
    data = target.read_bytes()
    plain = gzip.decompress(data)
    {
        "truncated": lambda: target.write_bytes(gzip.compress(plain[:-5], 1)),
        "corrupted": lambda: target.write_bytes(gzip.compress(plain[:-5] + b"abcde", 1)),
        "garbage": lambda: target.write_bytes(gzip.compress(b"not digits", 1)),
        "half-gz": lambda: target.write_bytes(data[: len(data) // 2]),
    }[damage]()
    line = error_of(capsys, "--data.root", "root", "--data.source", "auto", "--max_epochs", "1")
    assert "train-images-idx3-ubyte.gz" in line
    assert not list(Path("checkpoints").glob("*/*.ckpt"))


def test_mnist_that_cannot_be_had_is_an_error_that_says_how_to_go_on(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    line = error_of(capsys, "--data.source", "mnist", "--data.root", "nowhere")
    assert "--data.root" in line
    assert "--data.source sample" in line


def test_a_folder_that_cannot_be_written_is_told(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert "--default_root_dir" in error_of(capsys, *SMALL, "--default_root_dir", "file/runs")
    assert "--default_root_dir" in error_of(capsys, *SMALL, "--default_root_dir", "file")
