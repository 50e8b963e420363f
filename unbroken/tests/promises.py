"""The promises that hold for any task, as tests to inherit, such as test_examples.py does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from numerals.fit import job as fit
from PIL import Image, ImageDraw
from unbroken.cli.read_checkpoint import load
from unbroken.commands import test as test_command
from unbroken.errors import UserError
from unbroken.storage.checkpoint_files import read

from tests.commands import assert_same_run, complete, rows, run_ranks, summary

ROOT = Path(__file__).parents[2]
# PYTHONPATH of a process that needs the library's tests and the program that they run
SEARCHED = os.pathsep.join(
    str(each) for each in (ROOT / "unbroken", ROOT / "unbroken" / "tests", ROOT)
)
EXIT_CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": -9}


class TaskSuite:
    """A task trains, reports, keeps its best epoch and can be tested.

    A subclass says how it is started.
    """

    # What best.ckpt must follow. None: nothing can be followed, and the last epoch is the best.
    monitor: str | None = "val/accuracy"
    mode = "max"
    logged = {"train/loss", "train/accuracy", "val/loss", "val/accuracy"}
    # What the few steps reach on the test set. None: there is no test set.
    reached: tuple[str, float] | None = ("test/accuracy", 0.5)

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        """Make data in a folder. Returns arguments of ``fit`` for two short epochs on them."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def flags(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WANDB_MODE", "disabled")
            # The examples are imported as a user's file in the clone is.
            patch.syspath_prepend(str(ROOT))
            patch.chdir(ROOT)
            folder = tmp_path_factory.mktemp(cls.__name__)
            common = ["--accelerator", "cpu", "--log_every_n_steps", "3"]
            arguments = cls.arguments(folder / "data")
            if "--max_epochs" not in arguments:
                common += ["--max_epochs", "2"]
            yield [*arguments, *common, "--default_root_dir", str(folder / "runs")]

    @pytest.fixture(scope="class")
    @classmethod
    def undisturbed(cls, flags: list[str]) -> Path:
        """Folder of a run that nobody interrupts. Beside it lies what the run has said."""
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert fit.main([*flags, "--run_name", "undisturbed"]) == 0
        (Path(flags[-1]) / "said.txt").write_text(said.getvalue())
        return Path(flags[-1]) / "undisturbed"

    def test_trains_and_reports(self, undisturbed: Path) -> None:
        # Nothing is lost in a resume.
        assert "a resumed run" not in (undisturbed.parent / "said.txt").read_text()
        facts = summary(undisturbed)
        logged = {name for row in rows(undisturbed) for name in row}
        assert facts["throughput/samples_per_sec"] > 0
        assert facts["memory/peak_rss_gib"] > 0
        assert "optimizer/lr" in logged
        assert self.logged <= logged
        for name in ("best.ckpt", "last.ckpt", "config.yaml"):
            assert (undisturbed / name).is_file()
        if self.reached is None:
            assert not [name for name in facts if name.startswith("test")]
            return
        name, bound = self.reached
        if self.mode == "min":
            assert facts[name] <= bound, facts
        else:
            assert facts[name] >= bound, facts

    def test_the_best_checkpoint_is_of_the_best_epoch_by_the_followed_metric(
        self, undisturbed: Path
    ) -> None:
        facts = summary(undisturbed)
        best = read(undisturbed / "best.ckpt")
        last = read(undisturbed / "last.ckpt")
        if self.monitor is None:
            assert "monitor" not in facts
            assert best["global_step"] == last["global_step"] == facts["steps"]
            return
        assert (facts["monitor"], facts["mode"]) == (self.monitor, self.mode)
        of_epochs = [row for row in rows(undisturbed) if self.monitor in row]
        values = [float(row[self.monitor]) for row in of_epochs]
        wanted = max(values) if self.mode == "max" else min(values)
        # Of equally good epochs the latest is the best.
        epoch = max(index for index, value in enumerate(values) if value == wanted)
        assert facts["best_epoch"] == epoch
        assert facts[self.monitor] == pytest.approx(wanted)
        assert best["run"]["metrics"][self.monitor] == pytest.approx(wanted)
        assert best["global_step"] == int(of_epochs[epoch]["step"]) + 1

    def test_the_checkpoint_alone_gives_the_summarys_test_metrics(
        self, undisturbed: Path, tmp_path: Path
    ) -> None:
        words = ["--ckpt_path", str(undisturbed / "best.ckpt"), "--accelerator", "cpu"]
        if self.reached is None:
            with pytest.raises(UserError, match="test_step"):
                test_command.main("numerals", words)
            return
        assert (
            test_command.main("numerals", [*words, "--output", str(tmp_path / "metrics.json")]) == 0
        )
        assert_same_metrics(undisturbed, tmp_path / "metrics.json")


class PictureSuite(TaskSuite):
    """Besides, of a classifier of pictures: predict and export."""

    def test_predicts_pictures_from_the_checkpoint_alone(
        self, undisturbed: Path, tmp_path: Path
    ) -> None:
        from unbroken.commands.predict import command as predict

        data: Any = load(fit, undisturbed / "best.ckpt").datamodule
        picture = Image.new("RGB", (90, 120), "white")
        ImageDraw.Draw(picture).ellipse((30, 30, 60, 90), outline="black", width=8)
        picture.save(tmp_path / "picture.png")
        words = [str(tmp_path / "picture.png"), "--ckpt_path", str(undisturbed / "best.ckpt")]
        assert predict.main("numerals", [*words, "--output", str(tmp_path / "labels.json")]) == 0
        (row,) = json.loads((tmp_path / "labels.json").read_text())
        assert row.get("label", row.get("digit")) in data.class_names
        assert 1 / len(data.class_names) <= row["probability"] <= 1, row

    # Every day, test_export.py tries the same with the digits, and with any module.
    @pytest.mark.nightly
    def test_exports_a_model_that_answers_like_the_checkpoint(self, undisturbed: Path) -> None:
        pytest.importorskip("onnxruntime")
        from unbroken.commands.export import command as export

        # It compares the answers itself.
        code = export.main("numerals", ["--ckpt_path", str(undisturbed / "best.ckpt")])
        assert code in (0, None)
        assert list(undisturbed.rglob("*.onnx"))


class PromiseSuite(TaskSuite):
    """Besides: a killed or stopped run loses nothing, and two processes measure what one does."""

    # A step in the middle of an epoch.
    interrupt_at = 12
    # Each optimizer counts its steps.
    optimizers = 1
    signal = "SIGTERM"

    def test_a_run_that_was_stopped_and_resumed_is_bit_identical(
        self, flags: list[str], undisturbed: Path
    ) -> None:
        command = [sys.executable, "-m", "tests.interrupted", str(self.interrupt_at), self.signal]
        named = [*flags, "--run_name", "stopped", "--checkpoint_every", "5"]
        ended = complete([*command, *named], timeout=240, cwd=ROOT, env=environment())
        assert ended.returncode == EXIT_CODES[self.signal], ended.stderr
        folder = undisturbed.with_name("stopped")
        before = read(folder / "last.ckpt")
        reached = before["global_step"] // self.optimizers
        if self.signal != "SIGKILL":
            # A run that is asked to stop within a step ends after it.
            assert reached in (self.interrupt_at, self.interrupt_at + 1)
        # Something is left to repeat.
        assert 0 < before["global_step"] < read(undisturbed / "last.ckpt")["global_step"]
        assert before["run"]["state"]["place"] == "batch"
        assert not (folder / "summary.json").exists()

        assert fit.main([*named, "--ckpt_path", "auto"]) == 0
        assert_same_run(undisturbed, folder)
        ours = summary(folder)
        theirs = summary(undisturbed)
        for name in theirs:
            if "test" in name:
                assert ours[name] == theirs[name], name

    def test_two_processes_measure_what_one_does(self, undisturbed: Path, tmp_path: Path) -> None:
        if self.reached is None:
            pytest.skip("this task has no test set")
        words = ["--ckpt_path", str(undisturbed / "best.ckpt")]
        words += ["--output", str(tmp_path / "metrics.json")]
        ended = run_ranks("test", *words, cwd=ROOT, env=environment())
        assert ended.returncode == 0, ended.stderr
        assert json.loads((tmp_path / "metrics.json").read_text())["world_size"] == 2
        assert_same_metrics(undisturbed, tmp_path / "metrics.json")


def assert_same_metrics(folder: Path, output: Path) -> None:
    """What ``numerals.test`` wrote are the run's test metrics.

    Accuracies are equal exactly, the rest but for rounding.
    """
    found = json.loads(output.read_text())
    facts = summary(folder)
    names = [name for name in facts if name.startswith(("test/", "test_"))]
    assert names
    for name in names:
        if "accuracy" in name:
            assert found[name] == facts[name], name
        else:
            assert found[name] == pytest.approx(facts[name], rel=1e-6), name


def environment() -> dict[str, str]:
    """The environment of a command that adds sums in the same order as this process.

    It has as many threads.
    """
    kept = dict(os.environ)
    for name in (
        "LOCAL_RANK",
        "UNBROKEN_RANK_ZERO_DECISION",
        "UNBROKEN_RANK_ZERO_PID",
        "PL_GLOBAL_SEED",
    ):
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "WANDB_MODE": "disabled"}
