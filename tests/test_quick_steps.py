from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from project.callbacks.quick_steps import NoSections, QuickSteps
from project.data.base import BatchedDataModule
from project.data.loader import TensorImages
from project.model import MLP, ImageClassifier

TRAINING_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Noise(BatchedDataModule):
    def make_split(self, split: str) -> TensorImages:
        generator = torch.Generator().manual_seed(len(split))
        images = torch.randint(256, (96, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return TensorImages(images, torch.arange(96) % 10)


class EveryHook(Callback):
    """Notes the hooks that it is called for."""

    def __init__(self) -> None:
        self.called: list[str] = []
        for name in TRAINING_HOOKS:
            setattr(self, name, self._note(name))

    def _note(self, name: str) -> Any:
        return lambda *_: self.called.append(name)


def fit(folder: Path, *callbacks: Callback, module: ImageClassifier | None = None, **flags: Any) -> ImageClassifier:
    seed_everything(1, verbose=False)
    module = module or ImageClassifier(MLP(hidden=[16], dropout=0.5))
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    trainer.fit(module, datamodule=Noise(batch_size=8))
    return module


@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 5, "gradient_clip_val": 0.1}])
def test_quick_steps_compute_what_lightnings_steps_compute(tmp_path: Path, flags: dict[str, Any]) -> None:
    quick = fit(tmp_path, QuickSteps(), **flags).state_dict()
    plain = fit(tmp_path, **flags).state_dict()
    assert all(torch.equal(quick[name], plain[name]) for name in plain)


def test_hooks_that_somebody_wrote_are_called_at_every_step(tmp_path: Path) -> None:
    called: list[int] = []

    class Own(ImageClassifier):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            called.append(1)

        def training_step(self, batch: Any) -> Any:  # type: ignore[override]  # Lightning allows it without the index
            return super().training_step(batch, 0)

    callback = EveryHook()
    fit(tmp_path, callback, QuickSteps(), module=Own(MLP(hidden=[16])))
    steps = 2 * 96 // 8
    assert len(called) == steps
    assert {name: callback.called.count(name) for name in TRAINING_HOOKS} == dict.fromkeys(TRAINING_HOOKS, steps)


def test_idle_hooks_are_off_while_training_and_back_afterwards(tmp_path: Path) -> None:
    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            assert pl_module.on_before_zero_grad is None  # type: ignore[comparison-overlap]
            assert isinstance(trainer.profiler, NoSections)  # type: ignore[attr-defined]

    module = fit(tmp_path, QuickSteps(), Look())
    assert callable(module.on_before_zero_grad)


def test_a_profiler_that_was_asked_for_keeps_its_sections(tmp_path: Path) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path, filename="times")
    fit(tmp_path, QuickSteps(), profiler=profiler)
    assert "run_training_batch" in profiler.recorded_durations
    assert not isinstance(profiler, PassThroughProfiler)


def test_a_running_hook_is_noted_and_parameters_are_still_registered() -> None:
    module = ImageClassifier(MLP(hidden=[16]))
    module._current_fx_name = "training_step"
    module.extra = torch.nn.Parameter(torch.zeros(3))
    assert module._current_fx_name == "training_step"
    assert "extra" in dict(module.named_parameters())
