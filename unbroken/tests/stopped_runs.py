"""Runs of ``fit`` in this process that are asked to stop, or die, after a batch; and how they go
on.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from numerals.fit import job as fit
from unbroken.cli import start as entry
from unbroken.stopping import signals

from tests.commands import add_callbacks

SHORT = ["--max_epochs", "3", "--log_every_n_steps", "4", "--monitors", "none"]
SHORT += ["--report", "false"]
RUNS = Path("checkpoints")


def end_run(dies: bool) -> None:
    """Note SIGTERM, as the signal's handler does; or die. test_examples.py sends real signals."""
    if dies:
        raise InterruptedError
    signals.state.requested = signal.SIGTERM


class EndAfterBatch(Callback):
    """Asks the run to stop after a batch, or dies."""

    def __init__(self, batch: int, dies: bool) -> None:
        self.batch = batch
        self.dies = dies

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            end_run(self.dies)


def train(name: str, *flags: str) -> Path:
    """Train to the end; returns the run's folder."""
    assert fit.main([*flags, "--run_name", name]) == 0
    return RUNS / name


def train_until(batch: int, name: str, *flags: str, dies: bool = False) -> Path:
    """A run that is asked to stop in a batch, and does so after it; or that dies before it is
    saved.
    """
    # The callback comes after the one that listens: the request is heard a step later.
    asked_after = batch if dies else batch - 1
    expected = 1 if dies else 143
    callback = EndAfterBatch(asked_after, dies)
    with pytest.MonkeyPatch.context() as patch:
        add_callbacks(patch, callback)
        try:
            assert entry.exit_code(fit.main, [*flags, "--run_name", name]) == expected
        finally:
            signals.state.requested = 0
    return RUNS / name


def resume(name: str, *flags: str) -> Path:
    """Go on with a run to its end; returns its folder."""
    return train(name, "--ckpt_path", "auto", *flags)


def error_of(capsys: pytest.CaptureFixture[str], *argv: str, main: Any = fit.main) -> str:
    """The one line that a command prints which refuses its arguments."""
    capsys.readouterr()
    assert entry.exit_code(main, list(argv)) == 2
    lines = [text for text in capsys.readouterr().err.splitlines() if text.strip()]
    assert len(lines) == 1, lines
    (line,) = lines
    return line
