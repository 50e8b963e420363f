"""For tests of one's own code: a run that is killed must end as the one that was never killed.

from unbroken.testing import assert_resumes_exactly

def test_my_run_can_be_killed():
    assert_resumes_exactly(MyModule, MyData, steps=20)
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.model_helpers import is_overridden
from unbroken.checkpoint.exact_checkpoint import ExactCheckpoint
from unbroken.parts.part import Part
from unbroken.verifying.trial import SAVE_EVERY, Start, Trial
from unbroken.verifying.verdict import judge

SEED = 42
EPOCHS = 3
# Batches of a validation and of the test.
FEW_BATCHES = 3


class NotRestoredWarning(UserWarning):
    """An attribute is another one after a resume, and has changed no result of a short training.

    A counter of patience is one, before the patience is at its end. Let a test fail at it by
    ``pytest -W error::unbroken.testing.NotRestoredWarning``.
    """


def assert_resumes_exactly(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Any] = lambda: None,
    *,
    steps: int = 24,
    kills: int = 2,
    trainer: Mapping[str, Any] | None = None,
    seed: int = 0,
    parts: Sequence[Part] = (),
) -> None:
    """Train four times or so, in processes of their own, and compare: twice undisturbed, and once
    killed (SIGKILL) and resumed.

    Where this process can fork (Linux and macOS, until it has used a GPU or, where there is one,
    has trained), the functions may be lambdas and local. Elsewhere they, and what is in
    ``trainer``, must be picklable: functions at the top of a file.

    Args:
        make_module: Makes the module anew.
        make_data: Makes a LightningDataModule, a training DataLoader, or None where the module has
            its loaders.
        steps: Optimizer steps of the training, over three epochs. At least 6.
        kills: How often the third run is killed, at places of as many kinds as there are.
        trainer: Arguments of the Trainer, such as ``{"accumulate_grad_batches": 2}``. Callbacks in
            it take part.
        seed: Chooses where the run is killed.
        parts: Those of ``ExactCheckpoint(..., parts=[...])``.

    Raises:
        AssertionError: A run failed, or a result of the killed run differs. The text is a table:
            what differs, from which step, how much; then why, and what to write.

    Warns:
        NotRestoredWarning: All results are the same, and an attribute is not.
    """
    if steps < 6:
        raise ValueError(
            f"steps must be at least 6, got {steps}: a kill comes after the first save"
        )
    if kills < 1:
        raise ValueError(f"kills must be at least 1, got {kills}")
    training = Training(make_module, make_data, steps, dict(trainer or {}), parts)
    with tempfile.TemporaryDirectory(prefix="resumes-", ignore_cleanup_errors=True) as folder:
        trial = Trial(training, Path(folder), kills, seed)
        trial.run()
        verdict = judge(trial)
    if not verdict.is_exact:
        raise AssertionError(verdict.text)
    if not verdict.is_silent:
        warnings.warn(verdict.text, NotRestoredWarning, stacklevel=2)


class Training:
    """A training by a plain Trainer with ExactCheckpoint; called in a process of its own."""

    def __init__(
        self,
        make_module: Callable[[], LightningModule],
        make_data: Callable[[], Any],
        steps: int,
        flags: dict[str, Any],
        parts: Sequence[Part] = (),
    ) -> None:
        self.make_module = make_module
        self.make_data = make_data
        self.steps = steps
        self.flags = flags
        self.parts = parts

    def __call__(self, start: Start) -> int:
        """Train as a start says; returns the exit code."""
        # A fork lacks the threads that this process's torch may have.
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        seed_everything(SEED, verbose=False)
        module = self.make_module()
        data = self.make_data()
        keep = ExactCheckpoint(start.run_folder, every=SAVE_EVERY, parts=self.parts)
        trainer = Trainer(**self._flags(start, keep))
        given = {"datamodule": data}
        if not isinstance(data, LightningDataModule):
            given = {"train_dataloaders": data}
        trainer.fit(module, **given, ckpt_path=keep.resume_from, weights_only=True)
        with_data = data if isinstance(data, LightningDataModule) else None
        if can_be_tested(module, with_data):
            trainer.test(
                module,
                datamodule=with_data,
                ckpt_path=keep.best_model_path,
                weights_only=True,
                verbose=False,
            )
        return 0

    def _flags(self, start: Start, keep: ExactCheckpoint) -> dict[str, Any]:
        """The Trainer's arguments: a short training, and what the user gave."""
        accumulated = self.flags.get("accumulate_grad_batches", 1)
        flags: dict[str, Any] = {
            "accelerator": "cpu",
            "max_steps": self.steps,
            "max_epochs": -1,
            "limit_train_batches": max(self.steps * accumulated // EPOCHS, 1),
            "limit_val_batches": FEW_BATCHES,
            "limit_test_batches": FEW_BATCHES,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": start.run_folder,
        } | self.flags
        own = self.flags.get("callbacks") or []
        own = list(own) if isinstance(own, list | tuple) else [own]
        flags["callbacks"] = [*own, keep, *start.callbacks(keep.last_path)]
        return flags


def can_be_tested(module: LightningModule, data: LightningDataModule | None) -> bool:
    """Whether there is a test step, and data for it."""
    if not is_overridden("test_step", module):
        return False
    return is_overridden("test_dataloader", module) or is_overridden("test_dataloader", data)
