"""The public methods of Lightning's and torch's objects that are replaced while a run is on, with
reasons.

These methods are public, so a look for private names does not find them. Each is a place where
Lightning calls its own object, and where it has no hook for a callback. :data:`SEAMS` lists them,
:func:`check` looks each up when a run starts, and :class:`Seams` puts every one back when the run
ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from unbroken.errors import UserError
from unbroken.lightning_internals import FitLoop, makes_loaders_now

# The class (or package) that defines the method, and its name.
SEAMS: list[tuple[Any, str]] = [
    (FitLoop, "setup_data"),
    (Strategy, "process_dataloader"),
    (Strategy, "on_train_start"),
    (Strategy, "load_checkpoint"),
    (Precision, "convert_input"),
    (dist, "all_gather"),
    (Logger, "log_metrics"),
]


def check() -> None:
    """Look up every method that is replaced; a UserError where one is missing."""
    for owner, name in SEAMS:
        if not hasattr(owner, name):
            raise UserError(
                f"this Lightning's {owner.__name__} lacks {name}, which exact resume needs."
                " Run pip install 'lightning>=2.6.6,<2.7'."
            )


class Seams:
    """The replaced methods of one Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        check()
        self._trainer = trainer
        # The object, the method's name, and what the object itself had under that name.
        self._replaced: list[tuple[Any, str, Any]] = []

    def process_loaders(self, make: Callable[[Any], Any]) -> None:
        """Every loader that the Trainer has made ready passes through ``make`` first.

        Lightning calls ``Strategy.process_dataloader`` "to inject the strategy's logic". A subclass
        of Strategy could override it, but the user chooses the strategy.
        """
        strategy: Any = self._trainer.strategy
        original = strategy.process_dataloader

        def process(loader: Any) -> Any:
            return original(make(loader))

        self._replace(strategy, "process_dataloader", process)

    def before_loaders(self, act: Callable[[], None]) -> None:
        """``act`` is called before the fit loop asks for the training's loaders: before training
        starts, and as an epoch starts for which they are made anew.

        Lightning has no hook between the end of an epoch and its call of ``train_dataloader``.
        """
        loop: Any = self._trainer.fit_loop
        original = loop.setup_data

        def setup() -> None:
            if makes_loaders_now(self._trainer):
                act()
            original()

        self._replace(loop, "setup_data", setup)

    def after_train_start(self, act: Callable[[], None]) -> None:
        """``act`` is called when all ``on_train_start`` hooks are done, before anything of the
        first epoch.

        The strategy's is the last of these hooks, after the module's own. A callback's comes before
        the module's.
        """
        strategy: Any = self._trainer.strategy
        original = strategy.on_train_start

        def start() -> None:
            original()
            act()

        self._replace(strategy, "on_train_start", start)

    def around_loading(
        self,
        reading: Callable[[Any], AbstractContextManager[None]],
        act: Callable[[dict[str, Any]], None],
    ) -> None:
        """A checkpoint's file is read inside ``reading(path)``; ``act`` is called with what was
        read, before any hook gets it.

        Lightning calls the module's ``on_load_checkpoint`` before that of any callback.
        """
        strategy: Any = self._trainer.strategy
        original = strategy.load_checkpoint

        def load(checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            with reading(checkpoint_path):
                checkpoint: dict[str, Any] = original(checkpoint_path, *args, **kwargs)
            act(checkpoint)
            return checkpoint

        self._replace(strategy, "load_checkpoint", load)

    def before_each_batch(self, act: Callable[[], None]) -> None:
        """``act`` is called between two steps of the training.

        The step before is done with its logging, its validation and its schedules. Of the next one
        nothing is done but that its batch was fetched: no hook was called for it. Lightning's first
        call for a batch is to the precision plugin, and its first hook comes after the module's
        hooks for the batch's transfer, which may draw random numbers.
        """
        trainer = self._trainer
        plugin: Any = trainer.precision_plugin
        convert = plugin.convert_input

        def act_and_convert(batch: Any) -> Any:
            if trainer.training:
                act()
            return convert(batch)

        self._replace(plugin, "convert_input", act_and_convert)

    def before_gathering(self, act: Callable[[Any, Any], None]) -> None:
        """``act`` is called with a tensor that all ranks gather, and the group that is named.

        Lightning's ``all_gather``, that of ``torch.distributed.nn`` and most code of the user's
        call ``torch.distributed.all_gather``.
        """
        original = dist.all_gather

        def gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
            act(tensor, group)
            return original(tensor_list, tensor, group, async_op)

        self._replace(dist, "all_gather", gather)

    def name_in_loggers(self, name_of: Callable[[str], str]) -> None:
        """Loggers get each metric under the name that ``name_of`` gives for its own.

        Lightning hands them what a test logs under the names of a validation where both are one
        method, and has no hook before it.
        """
        for logger in self._trainer.loggers:
            self._replace(logger, "log_metrics", _renaming(logger.log_metrics, name_of))

    def put_back(self) -> None:
        """Let every object have the methods again that it had before."""
        for owner, name, before in reversed(self._replaced):
            if before is None:
                # The class's method shows again as soon as the instance has none of that name.
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced = []

    def _replace(self, owner: Any, name: str, method: Any) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, method)
        self._replaced.append((owner, name, before))


def _renaming(log: Callable[..., None], name_of: Callable[[str], str]) -> Callable[..., None]:
    def log_metrics(metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        log({name_of(name): value for name, value in metrics.items()}, *args, **kwargs)

    return log_metrics
