"""Where the time and the memory of a training step go: PyTorch's profiler over a few steps of a
run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList
from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler
from unbroken.errors import require
from unbroken.lightning_internals import profiled_module, surround_calls
from unbroken.stopping.ranks import say

REGIONS = ("data", "forward", "loss", "backward", "optimizer")
# The last word of Lightning's action name → the region that begins with the action.
BEGINS = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "backward": "backward",
    "configure_gradient_clipping": "optimizer",
}
# The last words of the actions that end a region.
ENDS = (
    "train_dataloader_next",
    "batch_to_device",
    "training_step",
    "backward",
    "run_training_batch",
)


class StepProfiler(Profiler):
    """Profiles training steps ``wait + warmup`` to ``wait + warmup + active``, then stops.

    Lightning's PyTorchProfiler has one schedule for training and validation, and cannot tell
    forward from loss. Here a step has the regions ``data`` (waiting for the batch and moving it),
    ``forward`` (the network), ``loss`` (the rest of ``training_step``), ``backward`` and
    ``optimizer`` (with clipping). The run's folder ``profile`` gets a trace per rank for Chrome,
    Perfetto and TensorBoard; ``top_operations.txt`` has the times of regions and slowest
    operations.

    Args:
        wait: First steps, not profiled: compilation, choice of algorithms.
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
        require(wait >= 0, "--profiler.wait", "be at least 0", wait)
        require(warmup >= 0, "--profiler.warmup", "be at least 0", warmup)
        require(active >= 1, "--profiler.active", "be at least 1", active)
        require(rows >= 1, "--profiler.rows", "be at least 1", rows)
        # Else PyTorch's recorder reports each start, and missing GPUs, on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self.unrecorded = wait + warmup  # steps
        self.needed = wait + warmup + active  # steps
        self.rows = rows
        self.folder: Path | None = None  # once something is written
        self._schedule = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        self._options: dict[str, Any] = {
            "record_shapes": shapes,
            "profile_memory": memory,
            "with_stack": stacks,
        }
        self._profile: profile | None = None
        self._recording = ExitStack()
        self._calls = ExitStack()  # of the networks, in a training step
        self._region = ExitStack()

    def start(self, action_name: str) -> None:
        hook = action_name.rpartition(".")[2]
        if hook == "run_training_epoch" and self._profile is None and self.folder is None:
            self._begin()
        if self._profile is None:
            return
        if hook in BEGINS:
            self._switch(BEGINS[hook])
        if hook == "training_step":
            self._tell_networks_from_loss()

    def stop(self, action_name: str) -> None:
        hook = action_name.rpartition(".")[2]
        if hook == "training_step":
            self._calls.close()
        if hook in ENDS:
            self._region.close()
        if self._profile is not None and hook == "run_training_batch":
            self._profile.step()
            if self.folder is not None:
                self._recording.close()

    def teardown(self, stage: str | None) -> None:
        if self._profile is not None:
            self._recording.close()
            if self.folder is None:
                rank_zero_warn(
                    "nothing was profiled: "
                    f"wait, warmup and active take {self.needed} training steps."
                )
        super().teardown(stage)

    def _begin(self) -> None:
        """Begin the profile. ``_recording`` ends it, and takes everything back."""
        for optimizer in profiled_module(self).trainer.optimizers:
            # The hook is inside PyTorch's own range around step(), which must not end before ours.
            hook = optimizer.register_step_post_hook(lambda *_: self._region.close())
            self._recording.callback(hook.remove)
        self._profile = profile(
            schedule=self._schedule, on_trace_ready=self._write, **self._options
        )
        self._recording.callback(self._forget)
        self._recording.enter_context(self._profile)
        self._recording.callback(self._region.close)

    def _forget(self) -> None:
        self._profile = None

    def _tell_networks_from_loss(self) -> None:
        """Until the step ends, calls of the module's parts that have parameters are ``forward``,
        the rest ``loss``.
        """
        before = partial(self._switch, "forward")
        after = partial(self._switch, "loss")
        for network in profiled_module(self).children():
            if any(True for _ in network.parameters()):
                self._calls.enter_context(surround_calls(network, before, after))

    def _switch(self, region: str) -> None:
        """End the region that is open, and begin another one."""
        self._region.close()
        self._region.enter_context(record_function(region))

    def _write(self, finished: profile) -> None:
        trainer = profiled_module(self).trainer
        self.folder = Path(trainer.default_root_dir) / "profile"
        write_trace = tensorboard_trace_handler(
            str(self.folder), worker_name=f"rank{trainer.global_rank}"
        )
        write_trace(finished)
        if not trainer.is_global_zero:
            return
        steps = finished.step_num - self.unrecorded
        lines = table_of_regions(region_times(finished.events()), steps)
        operations = self._table_of_operations(
            finished, on_gpu=trainer.strategy.root_device.type == "cuda"
        )
        text = "\n".join([*lines, "", operations])
        (self.folder / "top_operations.txt").write_text(text, encoding="utf-8")
        say(
            f"profile: trace       {self.folder}/rank0.*.pt.trace.json: "
            "drop it on https://ui.perfetto.dev",
            "         TensorBoard pip install torch-tb-profiler; "
            f"tensorboard --logdir {self.folder}",
            f"         table       less -S {self.folder}/top_operations.txt",
        )

    def _table_of_operations(self, finished: profile, on_gpu: bool) -> str:
        averages = finished.key_averages(group_by_input_shape=self._options["record_shapes"])
        operations = [event for event in averages if not event.is_user_annotation]
        events = EventList(
            operations,
            use_device="cuda" if on_gpu else None,
            profile_memory=self._options["profile_memory"],
        )
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        return str(events.table(order, row_limit=self.rows))


def table_of_regions(times: dict[str, tuple[float, float]], steps: int) -> list[str]:
    """Lines that show what :func:`region_times` returned for so many steps, in milliseconds per
    step.
    """
    lines = [
        f"{steps} steps. Milliseconds per step:",
        f"{'region':<10} {'CPU':>10} {'device':>10}",
    ]
    for name, (cpu_us, device_us) in times.items():
        cpu_ms = cpu_us / 1000 / max(1, steps)
        device_ms = device_us / 1000 / max(1, steps)
        lines.append(f"{name:<10} {cpu_ms:>10.3f} {device_ms:>10.3f}")
    return lines


def region_times(events: Iterable[Any]) -> dict[str, tuple[float, float]]:
    """Microseconds of every region on the CPU, and of the kernels launched in it by any thread."""
    on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
    launches: list[tuple[float, float]] = []  # when, and microseconds of its kernels
    for event in on_cpu:
        if event.kernels:
            kernels_us = sum(kernel.duration for kernel in event.kernels)
            launches.append((event.time_range.start, kernels_us))
    times: dict[str, tuple[float, float]] = {}
    for name in REGIONS:
        spans = [e.time_range for e in on_cpu if e.is_user_annotation and e.name == name]
        if spans:
            cpu_us = sum(span.end - span.start for span in spans)
            device_us = 0.0
            for start, kernels_us in launches:
                if any(span.start <= start < span.end for span in spans):
                    device_us += kernels_us
            times[name] = (cpu_us, device_us)
    return times
