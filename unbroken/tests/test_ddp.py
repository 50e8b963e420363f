"""Promises 2, 4 and 8 on several processes: one folder, one curve, exact evaluation, a job that
restarts by itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from numerals.fit import job as fit
from numerals.model import MNISTClassifier
from unbroken.commands import test as test_command

from tests.commands import (
    CONVNET,
    SMALL,
    WHOLE_NETWORK,
    checkpoint,
    finished_run,
    rows,
    run_ranks,
    summary,
    two_rank_run,
)


def test_two_ranks_train_what_one_trains_in_one_folder(workplace: Path) -> None:
    steady = [*SMALL, *WHOLE_NETWORK, "--model.schedule", "constant", "--data.shift_pixels", "0"]
    steady += ["--data.train_samples", "3200"]
    assert fit.main([*steady, "--run_name", "one"]) == 0
    two = two_rank_run()
    assert summary(two)["world_size"] == 2
    assert [path.name for path in two.parent.iterdir() if not path.is_symlink()] == ["two"]
    ours, theirs = rows(Path("checkpoints/one")), rows(two)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for name in ("train/loss", "train/accuracy", "val/loss"):
        a, b = ([float(row[name]) for row in table if name in row] for table in (ours, theirs))
        assert a == pytest.approx(b, rel=2e-2, abs=5e-3), name
    # before rounding errors have grown, the curves are one
    assert float(ours[0]["train/loss"]) == pytest.approx(float(theirs[0]["train/loss"]), rel=1e-5)


class Part(MNISTClassifier):
    """Counts after the first batch on one rank at a time."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0 or batch_idx % 2 == self.global_rank:
            return super().training_step(batch, batch_idx)
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.nightly
def test_ranks_that_count_at_different_steps_do_not_wait_for_each_other(workplace: Path) -> None:
    mine = ["--max_epochs", "1", "--log_every_n_steps", "1", "--run_name", "part"]
    assert (
        run_ranks("fit", "--model", "tests.test_ddp.Part", *SMALL, *mine, timeout=60).returncode
        == 0
    )
    assert any("train/loss" in row for row in rows(Path("checkpoints/part")))


class WriteBuffers(Callback):
    """Every rank writes what its network's buffers were in each validation."""

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        with open(f"buffers-{trainer.global_rank}.txt", "a") as file:
            (average,) = (
                c._average_model for c in trainer.callbacks if isinstance(c, EMAWeightAveraging)
            )
            # swapped during validation: the averaged ones are in the module
            for module in (pl_module, average):
                print([buffer.tolist() for buffer in module.buffers()], file=file)


@pytest.mark.nightly
def test_two_ranks_validate_with_the_same_running_statistics(workplace: Path) -> None:
    # once in the middle of an accumulated step, where DDP itself does not share them, and once at
    # the epoch's end
    options = ["--max_epochs", "1", "--data.batch_size", "32", "--accumulate_grad_batches", "2"]
    options += ["--val_check_interval", "25"]
    ema = "{class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.9}}"
    Path("c.yaml").write_text(
        f"trainer:\n  callbacks: [{ema}, {{class_path: tests.test_ddp.WriteBuffers}}]\n"
    )
    two = run_ranks("fit", "--config", "c.yaml", *SMALL, *CONVNET, *options)
    assert two.returncode == 0, two.stderr
    one, other = (Path(f"buffers-{rank}.txt").read_text() for rank in (0, 1))
    assert one == other
    assert len(set(one.splitlines())) == 4


@pytest.fixture
def trained() -> Path:
    """best.ckpt of a small run."""
    return finished_run() / "best.ckpt"


NIGHTLY = [pytest.param(count, marks=pytest.mark.nightly) for count in (2, 33, 1999)]


@pytest.mark.parametrize(
    "count", [1, *NIGHTLY]
)  # one rank without a sample; PromiseSuite has uneven shares
def test_evaluation_on_two_ranks_equals_one_exactly(
    workplace: Path, trained: Path, count: int
) -> None:
    assert_two_ranks_measure_what_one_does(trained, count, "--data.test_samples", str(count))


def test_evaluation_of_the_whole_test_set_on_two_ranks_equals_one_exactly(
    workplace: Path, trained: Path, mnist_root: Path
) -> None:
    data = [
        "--data.source",
        "mnist",
        "--data.root",
        str(mnist_root),
        "--data.test_samples",
        "10000",
    ]
    assert_two_ranks_measure_what_one_does(trained, 10_000, *data)


def assert_two_ranks_measure_what_one_does(trained: Path, count: int, *data: str) -> None:
    common = ["--ckpt_path", str(trained), *data, "--output"]
    assert test_command.main("numerals", [*common, "one.json"]) == 0
    two = run_ranks("test", *common, "two.json", "--data.eval_batch_size", "7")
    assert two.returncode == 0, two.stderr
    one, other = (json.loads(Path(name).read_text()) for name in ("one.json", "two.json"))
    assert other["world_size"] == 2
    assert one["test_samples"] == other["test_samples"] == count
    assert one["test/accuracy"] == other["test/accuracy"]
    assert one["test/loss"] == pytest.approx(other["test/loss"], rel=1e-5)


def test_evaluation_does_not_depend_on_batch_size_or_workers(
    workplace: Path, trained: Path
) -> None:
    figures = []
    for options in (
        [],
        ["--data.eval_batch_size", "1999"],
        ["--data.eval_batch_size", "64", "--data.num_workers", "2"],
    ):
        assert (
            test_command.main(
                "numerals", ["--ckpt_path", str(trained), "--output", "m.json", *options]
            )
            == 0
        )
        figures.append(json.loads(Path("m.json").read_text()))
    assert len({figure["test/accuracy"] for figure in figures}) == 1
    assert [f["test/loss"] for f in figures] == pytest.approx(
        [figures[0]["test/loss"]] * 3, rel=1e-5
    )


class WriteSwitches(Callback):
    """Writes how the products and convolutions of a test are rounded on a GPU."""

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        used = [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]  # type: ignore[attr-defined]
        Path("switches.json").write_text(json.dumps(used))


def test_the_test_command_uses_no_tf32_as_the_final_test_of_a_run_does_not(
    workplace: Path, trained: Path
) -> None:
    words = ["--ckpt_path", str(trained), "--matmul_precision", "high", "--data.test_samples", "10"]
    assert (
        test_command.main(
            "numerals", [*words, "--trainer.callbacks", "tests.test_ddp.WriteSwitches"]
        )
        == 0
    )
    assert json.loads(Path("switches.json").read_text()) == ["ieee", "ieee"]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def test_a_launcher_s_world_that_contradicts_the_flags_is_an_error(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unbroken.cli.cli import configure
    from unbroken.cli.trainer_flags import trainer_flags
    from unbroken.errors import UserError

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert trainer_flags(configure(fit, "fit", []))["devices"] == 2
    with pytest.raises(UserError, match="the launcher started"):
        trainer_flags(configure(fit, "fit", ["--devices", "3"]))


def test_the_ranks_generators_and_metrics_are_all_in_the_checkpoint() -> None:
    ranks = checkpoint(two_rank_run() / "last.ckpt")["run"]["state"]["ranks"]
    assert len(ranks) == 2
    assert all(isinstance(rank["random"]["torch"], torch.Tensor) for rank in ranks)
