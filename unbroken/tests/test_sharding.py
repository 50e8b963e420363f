"""FSDP: two processes on the CPU train, save, go on and test as DDP does, without a GPU."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import (
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from numerals.fit import job as fit
from torch import nn
from unbroken.checkpoint.refusals import refuse_checkpoints_in_parts
from unbroken.checkpoint.sharding import LARGE, ShardedStrategy
from unbroken.cli.cli import configure
from unbroken.cli.trainer_flags import trainer_flags
from unbroken.commands import test as test_command
from unbroken.errors import UserError
from unbroken.storage.checkpoint_files import AtomicCheckpointIO

from tests.commands import (
    CONVNET,
    SMALL,
    WHOLE_NETWORK,
    checkpoint,
    complete,
    differences,
    run_ranks,
    summary,
)

RUNS = ("whole", "sharded")
STEADY = [
    *("--model.schedule", "constant", "--model.warmup_fraction", "0", "--model.lr", "0.05"),
    *("--model.optimizer", "SGD", "--model.optimizer_args.momentum", "0.9"),
    *("--data.shift_pixels", "0"),
]
HALF = ["--data.batch_size", "32"]  # of each batch for each of two processes


def unlike(a: Any, b: Any, where: str) -> list[str]:
    """Where two nested values differ by more than rounding."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in unlike(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        return [
            line
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for line in unlike(x, y, f"{where}[{i}]")
        ]
    if isinstance(a, torch.Tensor) and a.shape == b.shape:
        return [] if torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-5) else [where]
    return [] if a == b else [where]


@pytest.mark.nightly
def test_sharded_weights_train_go_on_and_test_as_whole_ones(workplace: Path) -> None:
    """Two processes, each with half of every batch, against one; not with Adam, whose steps magnify
    rounding errors.
    """
    short = [*SMALL, *WHOLE_NETWORK, *STEADY, "--limit_train_batches", "10", "--max_epochs"]
    assert fit.main([*short, "2", "--run_name", "whole"]) == 0
    for epochs in ("1", "2"):
        ended = run_ranks(
            "tests.sharded", *short, epochs, *HALF, "--run_name", "sharded", "--ckpt_path", "auto"
        )
        assert ended.returncode == 0, ended.stderr
    sharded, whole = Path("checkpoints/sharded"), Path("checkpoints/whole")
    ours, theirs = checkpoint(sharded / "last.ckpt"), checkpoint(whole / "last.ckpt")
    # also the optimizer's state: the same parameter has the same number in both files
    for key in ("state_dict", "optimizer_states"):
        assert not unlike(ours[key], theirs[key], key)
    assert summary(sharded)["world_size"] == 2
    assert summary(sharded)["parameters"] == summary(whole)["parameters"]
    # one process tests it with the same result, and goes on from it
    assert (
        test_command.main(
            "numerals", ["--ckpt_path", str(sharded / "best.ckpt"), "--output", "m.json"]
        )
        == 0
    )
    assert (
        json.loads(Path("m.json").read_text())["test/accuracy"] == summary(sharded)["test/accuracy"]
    )
    more = [
        "--run_name",
        "sharded",
        "--ckpt_path",
        "last",
        "--max_epochs",
        "3",
        "--strategy",
        "auto",
        "--devices",
        "1",
    ]
    assert fit.main([*more, "--data.batch_size", "64"]) == 0
    assert summary(sharded)["world_size"] == 1


@pytest.mark.nightly
def test_a_sharded_run_resumes_exactly_inside_an_epoch(workplace: Path) -> None:
    # The schedule depends on the number of steps. The pixels are shifted at random.
    steady = [*STEADY, "--data.shift_pixels", "2"]
    flags = [*SMALL, *WHOLE_NETWORK, *steady, *HALF]
    flags += ["--limit_train_batches", "6", "--max_epochs", "2"]
    for run, steps in (("undisturbed", ["9"]), ("resumed", ["4", "9"])):
        for each in steps:
            line = [*flags, "--max_steps", each, "--run_name", run, "--ckpt_path", "auto"]
            ended = run_ranks("tests.sharded", *line)
            assert ended.returncode == 0, ended.stderr
    ends = [checkpoint(Path("checkpoints", run, "last.ckpt")) for run in ("undisturbed", "resumed")]
    assert ends[1]["global_step"] == 9
    for key in ("state_dict", "optimizer_states", "loops"):
        assert differences(ends[0][key], ends[1][key], key) == []


@pytest.mark.nightly
def test_a_module_that_cuts_itself_resumes_exactly(workplace: Path) -> None:
    """With ModelParallelStrategy, whose weights are DTensors."""
    assert run_ranks("tests.cut_script", "undisturbed", "-1").returncode == 0
    assert run_ranks("tests.cut_script", "killed", "13").returncode != 0
    resumed = run_ranks("tests.cut_script", "killed", "-1")
    assert resumed.returncode == 0, resumed.stderr
    assert "may not be exact" not in resumed.stdout
    ends = [checkpoint(Path(run, "last.ckpt")) for run in ("undisturbed", "killed")]
    for key in ("state_dict", "optimizer_states", "loops"):
        assert differences(ends[0][key], ends[1][key], key) == []


@pytest.mark.parametrize(
    ("strategy", "is_refused"),
    [
        (FSDPStrategy(state_dict_type="sharded"), True),
        (FSDPStrategy(), False),
        (ModelParallelStrategy(), True),
        (ModelParallelStrategy(save_distributed_checkpoint=False), False),
        (SingleDeviceStrategy("cpu"), False),
    ],
    ids=["sharded", "full", "distributed", "whole", "one device"],
)
def test_a_strategy_that_writes_a_folder_of_parts_is_refused(
    strategy: Any, is_refused: bool
) -> None:
    trainer: Any = SimpleNamespace(strategy=strategy)
    refused = pytest.raises(UserError, match="writes a folder of parts")
    with refused if is_refused else nullcontext():
        refuse_checkpoints_in_parts(trainer)


# What differs from Lightning's strategy, piece by piece.


@pytest.mark.filterwarnings("ignore:FSDP with `bf16-true`")
@pytest.mark.parametrize(
    ("precision", "weights", "buffers"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32),  # running means of 16 bits would stand still
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_gradients_are_added_in_float32_and_mixed_precision_keeps_float32_buffers(
    precision: Any, weights: torch.dtype, buffers: torch.dtype
) -> None:
    strategy = ShardedStrategy()
    strategy.precision_plugin = FSDPPrecision(precision)
    config = strategy.mixed_precision_config
    assert config is not None
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (
        weights,
        torch.float32,
        buffers,
    )


def test_large_parts_are_gathered_by_themselves() -> None:
    policy = ShardedStrategy().kwargs["auto_wrap_policy"]
    for parameters, alone in ((LARGE, True), (LARGE - 1, False)):
        assert policy(nn.Linear(1, 1), recurse=False, nonwrapped_numel=parameters) is alone


def test_the_names_mean_this_strategy() -> None:
    trainer_flags(configure(fit, "fit", ["--strategy", "fsdp"]))
    plain, offloading = StrategyRegistry.get("fsdp"), StrategyRegistry.get("fsdp_cpu_offload")
    assert isinstance(plain, ShardedStrategy)
    assert isinstance(offloading, ShardedStrategy)
    assert offloading.cpu_offload.offload_params


def test_a_checkpoint_is_read_as_data_whatever_lightning_passes_on(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "loops": {}, "payload": Path}, tmp_path / "pickled.ckpt")
    strategy = ShardedStrategy(checkpoint_io=AtomicCheckpointIO())
    with pytest.raises(UserError, match="holds pickled Python objects"):
        strategy.load_checkpoint(tmp_path / "pickled.ckpt", weights_only=False)


EMA = "{class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.9}}"


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (["--gradient_clip_val", "1"], "Add --gradient_clip_algorithm value"),
        (["--trainer.callbacks", EMA], "Use --strategy ddp"),
    ],
)
def test_what_fsdp_cannot_do_is_refused_before_the_first_step(flags: list[str], fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        trainer_flags(configure(fit, "fit", ["--strategy", "fsdp", *flags]))
    trainer_flags(configure(fit, "fit", ["--strategy", "ddp", *flags]))
    trainer_flags(
        configure(
            fit,
            "fit",
            [
                "--strategy",
                "fsdp",
                "--gradient_clip_val",
                "1",
                "--gradient_clip_algorithm",
                "value",
            ],
        )
    )


@pytest.mark.nightly
def test_the_final_test_of_a_mixed_run_is_in_float32(workplace: Path) -> None:
    words = [
        *SMALL,
        *WHOLE_NETWORK,
        "--limit_train_batches",
        "10",
        "--max_epochs",
        "1",
        *HALF,
        "--precision",
        "bf16-mixed",
    ]
    ended = run_ranks("tests.sharded", *words, "--run_name", "mixed")
    assert ended.returncode == 0, ended.stderr
    found = summary(Path("checkpoints/mixed"))
    assert (
        test_command.main(
            "numerals", ["--ckpt_path", "checkpoints/mixed/best.ckpt", "--output", "m.json"]
        )
        == 0
    )
    assert json.loads(Path("m.json").read_text())["test/loss"] == pytest.approx(
        found["test/loss"], rel=1e-6
    )


@pytest.mark.nightly
def test_convolutions_on_one_device_train_as_without_sharding(workplace: Path) -> None:
    """Their weights are in channels_last, and FSDP would read a gradient as that of others.

    After one step: further ones magnify rounding errors.
    """
    words = [*SMALL, *CONVNET, *STEADY, "--max_epochs", "1", "--limit_train_batches", "1"]
    words += ["--accelerator", "cpu", "--devices", "1"]
    assert fit.main([*words, "--run_name", "whole"]) == 0
    ended = complete([sys.executable, "-m", "tests.sharded", *words, "--run_name", "sharded"])
    assert ended.returncode == 0, ended.stderr
    whole, sharded = (checkpoint(Path("checkpoints") / name / "last.ckpt") for name in RUNS)
    for key in ("state_dict", "optimizer_states"):
        assert not unlike(sharded[key], whole[key], key)
