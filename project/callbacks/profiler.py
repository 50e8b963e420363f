"""Where the time and the memory of a training step go: PyTorch's profiler over a few steps of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction, profile, record_function, schedule, tensorboard_trace_handler

from project.errors import UserError

REGIONS = ("data", "forward", "loss", "backward", "optimizer")


class StepProfiler(Profiler):
    """Profiles training steps ``wait + warmup`` to ``wait + warmup + active``, then costs nothing more.

    Lightning's PyTorchProfiler runs one schedule over training and validation, cannot tell forward from loss, and its
    range for the optimizer holds the forward and backward pass. Here every step has the regions ``data`` (waiting for
    the batch and moving it), ``forward`` (the network), ``loss`` (the rest of ``training_step``), ``backward`` and
    ``optimizer`` (clipping included).

    Written into the run's folder, under ``profile/``: ``rank0.*.pt.trace.json``, a trace for Chrome, Perfetto and
    TensorBoard, one per rank; ``top_operations.txt``, the time of every region and the operations that take most.

    Args:
        wait: Steps left alone first: compilation, choice of algorithms.
        warmup: Steps profiled and thrown away; the profiler's own start distorts them.
        active: Steps recorded.
        shapes: Record the operations' input shapes.
        memory: Record allocations and frees.
        stacks: Record the source line of every operation; slow.
        rows: Rows of the table of operations.
    """

    def __init__(
        self,
        wait: int = 5,
        warmup: int = 3,
        active: int = 10,
        shapes: bool = True,
        memory: bool = True,
        stacks: bool = False,
        rows: int = 30,
    ) -> None:
        super().__init__()
        for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1), ("rows", rows, 1)):
            if value < least:
                raise UserError(f"--profiler.{name} must be at least {least}, got {value}.")
        # Kineto reports its own start and stop, and every missing GPU as an error, on stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self.steps_needed = wait + warmup + active
        self.rows = rows
        self.folder: Path | None = None
        self._schedule = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        self._options: dict[str, Any] = {"record_shapes": shapes, "profile_memory": memory, "with_stack": stacks}
        self._lightning_module: Any = None  # set by the Trainer
        self._profile: profile | None = None
        self._finished = False
        self._recorded = 0  # steps
        self._in_training_step = False
        self._open: dict[str, record_function] = {}
        self._undo: list[Callable[[], Any]] = []

    # What Lightning calls around everything it does

    def start(self, action_name: str) -> None:
        if action_name == "run_training_epoch" and self._profile is None and not self._finished:
            self._begin()
        if self._profile is not None:
            self._on_start(action_name)

    def stop(self, action_name: str) -> None:
        if self._profile is not None:
            self._on_stop(action_name)

    def teardown(self, stage: str | None) -> None:
        if self._profile is not None:
            self._end()
            if self.folder is None:
                rank_zero_warn(
                    f"nothing was profiled: wait, warmup and active take {self.steps_needed} training steps together."
                )
        super().teardown(stage)

    # Regions

    def _on_start(self, action: str) -> None:
        if action.endswith((".train_dataloader_next", ".batch_to_device")):
            self._enter("data")
        elif action.startswith("[Strategy]") and action.endswith(".training_step"):
            self._in_training_step = True
        elif action.startswith("[Strategy]") and action.endswith(".backward"):
            self._enter("backward")
        elif action.startswith("[LightningModule]") and action.endswith(".configure_gradient_clipping"):
            self._enter("optimizer")

    def _on_stop(self, action: str) -> None:
        if action.endswith((".train_dataloader_next", ".batch_to_device")):
            self._leave("data")
        elif action.startswith("[Strategy]") and action.endswith(".training_step"):
            self._in_training_step = False
            self._leave("loss")
        elif action.startswith("[Strategy]") and action.endswith(".backward"):
            self._leave("backward")
        elif action == "run_training_batch":
            self._leave("optimizer")
            assert self._profile is not None
            self._recorded += self._profile.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
            self._profile.step()
            if self._finished:
                self._end()

    def _enter(self, region: str) -> None:
        self._open[region] = record_function(region)
        self._open[region].__enter__()

    def _leave(self, region: str) -> None:
        if region in self._open:
            self._open.pop(region).__exit__(None, None, None)

    def _enter_forward(self, *_: Any) -> None:
        if self._in_training_step:
            self._leave("loss")
            self._enter("forward")

    def _leave_forward(self, *_: Any) -> None:
        if "forward" in self._open:
            self._leave("forward")
            self._enter("loss")

    def _mark(self, network: nn.Module) -> None:
        """Put ``forward`` around a network; around its compiled form, since hooks would be compiled as well."""
        compiled = network._compiled_call_impl
        if compiled is None:
            before = network.register_forward_pre_hook(self._enter_forward)
            after = network.register_forward_hook(self._leave_forward)
            self._undo += [before.remove, after.remove]
            return

        def marked(*args: Any, **kwargs: Any) -> Any:
            self._enter_forward()
            outputs = compiled(*args, **kwargs)
            self._leave_forward()
            return outputs

        network._compiled_call_impl = marked
        self._undo.append(lambda: setattr(network, "_compiled_call_impl", compiled))

    # Begin and end

    def _begin(self) -> None:
        for network in self._lightning_module.children():
            if any(True for _ in network.parameters()):
                self._mark(network)
        for optimizer in self._lightning_module.trainer.strategy.optimizers:
            # inside PyTorch's own range around step(), which must not end before ours
            self._undo.append(optimizer.register_step_post_hook(lambda *_: self._leave("optimizer")).remove)
        self._profile = profile(schedule=self._schedule, on_trace_ready=self._write, **self._options)
        self._profile.start()

    def _end(self) -> None:
        assert self._profile is not None
        for region in list(self._open):
            self._leave(region)
        running, self._profile, self._finished = self._profile, None, True
        running.stop()
        while self._undo:
            self._undo.pop()()

    def _write(self, finished: profile) -> None:
        self._finished = True
        trainer = self._lightning_module.trainer
        self.folder = Path(trainer.default_root_dir) / "profile"
        tensorboard_trace_handler(str(self.folder), worker_name=f"rank{trainer.global_rank}")(finished)
        if trainer.is_global_zero:
            (self.folder / "top_operations.txt").write_text(self._report(finished))
            print(how_to_open(self.folder), flush=True)

    def _report(self, finished: profile) -> str:
        averages = finished.key_averages()
        regions = {event.key: event for event in averages if event.key in REGIONS}
        steps = max(1, self._recorded)
        lines = [f"{self._recorded} steps. Milliseconds per step:", f"{'region':<10} {'CPU':>10} {'device':>10}"]
        for name in REGIONS:
            if name in regions:
                cpu_us, device_us = regions[name].cpu_time_total, regions[name].device_time_total
                lines.append(f"{name:<10} {cpu_us / 1000 / steps:>10.3f} {device_us / 1000 / steps:>10.3f}")
        by_shape = finished.key_averages(group_by_input_shape=self._options["record_shapes"])
        operations = EventList(
            [event for event in by_shape if not event.is_user_annotation],
            use_device=by_shape._use_device,
            profile_memory=self._options["profile_memory"],
        )
        order = "self_device_time_total" if by_shape._use_device else "self_cpu_time_total"
        return "\n".join(lines) + "\n\n" + operations.table(sort_by=order, row_limit=self.rows)


def how_to_open(folder: Path) -> str:
    """One line for each thing that :class:`StepProfiler` wrote."""
    return "\n".join(
        [
            f"profile: trace       {folder}/rank0.*.pt.trace.json: drop it on https://ui.perfetto.dev or chrome://tracing",
            f"         TensorBoard pip install tensorboard torch-tb-profiler; tensorboard --logdir {folder}",
            f"         table       less -S {folder}/top_operations.txt",
        ]
    )
