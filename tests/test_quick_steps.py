from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
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


class WithDetails(ImageClassifier):
    """Returns more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "images": len(batch[1])}


class LineSearch(ImageClassifier):
    """An optimizer that runs the forward and backward pass several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Outputs(Callback):
    """Notes what a step returned."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: float(value) for name, value in outputs.items()})


class WithoutBackward(Callback):
    """Switches the backward pass off in the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward = trainer.current_epoch > 0


class Later(Callback):
    """Changes a flag of the trainer's in the second epoch."""

    def __init__(self, flag: str, value: float) -> None:
        self.flag, self.value = flag, value

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch > 0:
            setattr(trainer, self.flag, self.value)


def with_batch_norm() -> ImageClassifier:
    layers = torch.nn.Flatten(), torch.nn.Linear(784, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 10)
    return ImageClassifier(torch.nn.Sequential(*layers))


CASES: dict[str, tuple[Callable[[], ImageClassifier], dict[str, Any]]] = {
    "plain": (lambda: ImageClassifier(MLP(hidden=[16], dropout=0.5)), {}),
    "clipped": (lambda: ImageClassifier(MLP(hidden=[16])), {"gradient_clip_val": 0.1}),
    "accumulated": (lambda: ImageClassifier(MLP(hidden=[16])), {"accumulate_grad_batches": 5}),
    "mixed": (lambda: ImageClassifier(MLP(hidden=[16])), {"precision": "bf16-mixed"}),
    "dictionary": (lambda: WithDetails(MLP(hidden=[16])), {}),
    "line search": (lambda: LineSearch(MLP(hidden=[16])), {}),
    "no backward": (lambda: ImageClassifier(MLP(hidden=[16])), {"callbacks": [WithoutBackward()]}),
    "clipped later": (lambda: ImageClassifier(MLP(hidden=[16])), {"callbacks": [Later("gradient_clip_val", 0.1)]}),
    "validation not due": (lambda: ImageClassifier(MLP(hidden=[16])), {"check_val_every_n_epoch": 3}),
    "not validated later": (lambda: ImageClassifier(MLP(hidden=[16])), {"callbacks": [Later("limit_val_batches", 0)]}),
    "averaged": (with_batch_norm, {"callbacks": [StochasticWeightAveraging(0.01, swa_epoch_start=1)]}),
}


@pytest.mark.parametrize("case", CASES)
def test_quick_steps_compute_what_lightnings_steps_compute(tmp_path: Path, case: str) -> None:
    make_module, flags = CASES[case]
    runs = []
    for extra in ([QuickSteps()], []):
        outputs, own = Outputs(), copy.deepcopy(flags.get("callbacks", []))
        seed_everything(1, verbose=False)
        rest = {name: value for name, value in flags.items() if name != "callbacks"}
        module = fit(tmp_path, *extra, *own, outputs, module=make_module(), **rest)
        runs.append((module.state_dict(), module.trainer.fit_loop.state_dict(), outputs.seen))
    (quick, quick_counts, quick_outputs), (plain, counts, plain_outputs) = runs
    assert all(torch.equal(quick[name], plain[name]) for name in plain)
    assert quick_counts == counts  # what a checkpoint says of the run's position
    assert quick_outputs == plain_outputs
    assert len(plain_outputs) >= 24


def test_who_overrides_the_way_to_the_optimizer_is_asked_at_every_step(tmp_path: Path) -> None:
    class Own(ImageClassifier):
        called: list[str] = []

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.called.append("step")
            super().optimizer_step(*args, **kwargs)

    class Zeroes(ImageClassifier):
        called: list[str] = []

        def optimizer_zero_grad(self, *args: Any) -> None:
            self.called.append("zero")
            super().optimizer_zero_grad(*args)

    for kind in (Own, Zeroes):
        fit(tmp_path, QuickSteps(), module=kind(MLP(hidden=[16])))
        assert len(kind.called) == 24
    called, module = [], ImageClassifier(MLP(hidden=[16]))
    zero_grad = module.optimizer_zero_grad

    @wraps(zero_grad)
    def noted(*args: Any) -> None:
        called.append("zero")
        zero_grad(*args)

    module.optimizer_zero_grad = noted  # type: ignore[method-assign]
    fit(tmp_path, QuickSteps(), module=module)
    assert len(called) == 24


def test_most_steps_take_the_short_way_and_it_is_gone_afterwards(tmp_path: Path, monkeypatch: Any) -> None:
    lightnings_own: list[int] = []
    run = _AutomaticOptimization.run

    def counted(self: Any, *args: Any) -> Any:
        lightnings_own.append(1)
        return run(self, *args)

    monkeypatch.setattr(_AutomaticOptimization, "run", counted)
    module = fit(tmp_path, QuickSteps())
    assert len(lightnings_own) == 1  # of 24
    module.trainer.fit_loop.max_epochs = 3
    module.trainer.fit(module, datamodule=Noise(batch_size=8))
    assert len(lightnings_own) == 2  # of 24 and 12
    assert "run" not in vars(module.trainer.fit_loop.epoch_loop.automatic_optimization)


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
    assert "configure_gradient_clipping" not in vars(module)
    assert not {"_build_kwargs", "_should_check_val_epoch"} & set(vars(module.trainer.fit_loop.epoch_loop))


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
