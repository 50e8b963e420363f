"""Saves Lightning's loop what it does again at every step although the outcome is always the same."""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from project.callbacks.direct_step import DirectStep, can_step_directly
from project.callbacks.log_steps import STEP_HOOKS, is_default, skip_idle_hooks

CLIPPING = "configure_gradient_clipping"


class QuickSteps(Callback):
    """Changes what a step costs, and nothing that it computes.

    A small network's step takes about a millisecond on a CPU core, of which Lightning's loop took a third. Taken off it
    (:class:`project.model.ImageClassifier` takes off another part, see its ``__setattr__``):

    - Hooks that nobody overrides, of callbacks and of the module: each was called, inside a profiler section.
    - The profiler's sections where there is no profiler: 53 generators a step that do nothing.
    - The look at the signature of ``training_step``, by ``inspect``, at who defines the batch-transfer hooks, and at
      whether there is a ``validation_step``.
    - The way to a clipping of gradients where nothing is clipped.
    - The wrappers around the parts of a step, see :class:`project.callbacks.direct_step.DirectStep`.
    - Without a GPU: torch's optimizers ask at every step whether there is CUDA, and ``PYTORCH_NVML_BASED_CUDA_CHECK``,
      which Lightning sets on import, turns half a microsecond into a search for NVIDIA's library, 40 microseconds.

    `python -m project.benchmark overhead` measures what is left. A run with ``--profiler`` keeps its sections.
    """

    def __init__(self) -> None:
        self._hooks: list[str] = []  # of the module, taken off its list

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            skip_idle_hooks(callback)
        for name in STEP_HOOKS[:6]:  # of training; Lightning examines a module's evaluation hooks
            if is_default(pl_module, name):
                vars(pl_module)[name] = None
                self._hooks.append(name)
        if is_default(pl_module, CLIPPING):
            vars(pl_module)[CLIPPING] = partial(_clip_if_asked, pl_module)
            self._hooks.append(CLIPPING)
        if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]
            trainer.profiler = NoSections()  # type: ignore[attr-defined]
        # any other profiler wants the sections that a direct step leaves out
        if isinstance(trainer.profiler, NoSections) and can_step_directly(trainer, pl_module):  # type: ignore[attr-defined]
            vars(trainer.fit_loop.epoch_loop.automatic_optimization)["run"] = DirectStep(trainer)
        _look_once_at_training_step(trainer, pl_module)
        _look_once_for_validation(trainer, pl_module)
        selector = trainer._data_connector._datahook_selector  # made anew for every fit and test
        if selector is not None:
            selector.get_instance = cache(selector.get_instance)  # type: ignore[method-assign]
        if not torch.cuda.is_available():
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name in self._hooks:
            vars(pl_module).pop(name, None)
        self._hooks = []
        for name in ("_build_kwargs", "_should_check_val_epoch"):
            vars(trainer.fit_loop.epoch_loop).pop(name, None)
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("run", None)


class NoSections(PassThroughProfiler):
    """Lightning's profiler that does nothing, without making a context manager for each time that it does."""

    _nothing = nullcontext("")

    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]
        return self._nothing


def _clip_if_asked(
    module: LightningModule,
    optimizer: Optimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    if gradient_clip_val or module.trainer.gradient_clip_val:
        LightningModule.configure_gradient_clipping(module, optimizer, gradient_clip_val, gradient_clip_algorithm)


def _look_once_for_validation(trainer: Trainer, module: LightningModule) -> None:
    loop = trainer.fit_loop.epoch_loop
    possible = loop.val_loop._data_source.is_defined() and is_overridden("validation_step", module)

    def should_check_val_epoch() -> bool:
        every = trainer.check_val_every_n_epoch
        due = every is None or (trainer.current_epoch + 1) % every == 0
        return possible and trainer.limit_val_batches > 0 and due

    loop._should_check_val_epoch = should_check_val_epoch  # type: ignore[method-assign]


def _look_once_at_training_step(trainer: Trainer, module: LightningModule) -> None:
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def build_kwargs(kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        kwargs["batch"] = batch
        if takes_index:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    trainer.fit_loop.epoch_loop._build_kwargs = build_kwargs  # type: ignore[method-assign]
