"""Trains one situation: python -m tests.situations.run NAME FOLDER EVERY EVENT SIGNAL.

An event is one call of a hook, and this process sends itself the signal there: before the hook of
the first callback or of the module. An empty event disturbs nothing, and writes all events to
``events.txt``.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import signal
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer import call
from torch.utils._pytree import tree_leaves
from unbroken import ExactCheckpoint
from unbroken.parts.generators import random_state
from unbroken.parts.held import held_by_users
from unbroken.parts.plain_values import copied
from unbroken.parts.rows import MetricRows

import tests.situations
from tests.situations.situation import SITUATIONS, Situation


class Rows(Logger):
    """Writes each row to a file at once, and can forget the last ones."""

    name = "rows"
    version = 0

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        if not path.exists():
            path.write_text("")

    @property
    def experiment(self) -> Rows:
        return self

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.add({"step": step, **metrics})

    def add(self, row: dict[str, Any]) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            with open(self.path, "a") as file:
                file.write(json.dumps(row, sort_keys=True) + "\n")

    @property
    def count(self) -> int:
        return len(self.path.read_text().splitlines())

    def write(self, to_disk: bool = False) -> None:
        """Nothing: each row is in the file."""

    def keep_rows(self, count: int) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            lines = self.path.read_text().splitlines(keepends=True)
            self.path.write_text("".join(lines[:count]))


class Disturbed:
    """Stands before every hook that Lightning calls, and sends this process a signal at one."""

    def __init__(self, rows: Rows, events: Path | None, event: str, number: int) -> None:
        self.rows = rows
        self.events = events
        self.event = event
        self.number = number
        self.seen: set[str] = set()
        for name in ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook"):
            self.stand_before(name)

    def stand_before(self, name: str) -> None:
        further = getattr(call, name)
        kind = name.removeprefix("_call_").removesuffix("s").removesuffix("_hook")

        def disturbed(trainer: Trainer, hook: str, *args: Any, **kwargs: Any) -> Any:
            if trainer.state.fn == "fit" and not trainer.sanity_checking:
                self.happens(trainer, kind, hook)
                if hook in ("training_step", "validation_step"):
                    self.note_batch(hook, args)
            return further(trainer, hook, *args, **kwargs)

        setattr(call, name, disturbed)

    def happens(self, trainer: Trainer, kind: str, hook: str) -> None:
        """Tell one event, the same in every process: where in the run it is, and which hook."""
        loop = trainer.fit_loop.epoch_loop
        done = loop.batch_progress.current.completed
        validated = loop.val_loop.batch_progress.current.ready if trainer.validating else "-"
        epoch = trainer.current_epoch
        event = f"{epoch}/{trainer.global_step}/{done}/{validated}/{kind}/{hook}"
        if event in self.seen:
            return
        self.seen.add(event)
        if self.events is not None:
            with open(self.events, "a") as file:
                file.write(event + "\n")
        if event == self.event:
            os.kill(os.getpid(), self.number)

    def note_batch(self, hook: str, args: tuple[Any, ...]) -> None:
        """Write which samples came."""
        check = 0
        for leaf in tree_leaves(args[:1]):
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.detach().to_dense().float().numpy().tobytes()
            check = zlib.crc32(leaf if isinstance(leaf, bytes) else repr(leaf).encode(), check)
        if not hasattr(args[0], "__next__"):
            self.rows.add({hook: check})


def train(situation: Situation, folder: Path, every: str, event: str, number: int) -> None:
    """Train a situation to its end, and write ``end.pt``: everything that there is then."""
    # What a callback writes lies in this run's folder.
    os.chdir(folder)
    rows = Rows(folder / "rows.txt")
    events = None if event else folder / "events.txt"
    Disturbed(rows, events, event, number)
    if "WORLD_SIZE" in os.environ:
        ranks: dict[str, Any] = {"devices": int(os.environ["WORLD_SIZE"]), "strategy": "ddp"}
    else:
        ranks = {"devices": 1}
    for fit in range(situation.fits):
        seed_everything(7, workers=True, verbose=False)
        keep = ExactCheckpoint(
            folder, monitor=situation.monitor, mode="min", every=every, parts=[MetricRows(rows)]
        )
        if keep.resume_from is None:
            # Whatever was written before the first checkpoint is written again.
            rows.keep_rows(0)
        flags: dict[str, Any] = {
            "max_epochs": 3 + fit,
            "log_every_n_steps": 2,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **ranks,
            **situation.flags,
        }
        if event == "shorter":
            flags |= situation.shorter
        callbacks = situation.callbacks()
        trainer = Trainer(callbacks=[*callbacks, keep], logger=rows, **flags)
        module = situation.make()
        data = situation.data()
        trainer.fit(module, datamodule=data, ckpt_path=keep.resume_from)
    rank = os.environ.get("RANK", "0")
    end = {
        "buffers": dict(module.named_buffers()),
        "parameters": dict(module.named_parameters()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": [callback.state_dict() for callback in callbacks],
        "modes": [name for name, part in module.named_modules() if part.training],
        "random": random_state(torch.device("cpu")),
        "attributes": copied(held_by_users(trainer).attributes),
        # Of the latest values a checkpoint holds rank zero's.
        "metrics": dict(trainer.callback_metrics) if rank == "0" else {},
    }
    torch.save(end, folder / f"end-{rank}.pt")
    if keep.engine.restoring.was_over:
        (folder / "over").touch()


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    name, folder, every, event, number = sys.argv[1:6]
    warnings.simplefilter("ignore")
    for module in pkgutil.iter_modules(tests.situations.__path__):
        if module.name != "run":
            importlib.import_module(f"tests.situations.{module.name}")
    train(SITUATIONS[name], Path(folder), every, event, signal.Signals[number or "SIGKILL"])


if __name__ == "__main__":
    main()
