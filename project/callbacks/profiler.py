"""Where the time and the memory of a training step go: PyTorch's profiler over a few steps of a run."""

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

from project.engine.lightning_internals import profiled_module, surround_calls
from project.errors import require

REGIONS = ("data", "forward", "loss", "backward", "optimizer")
# Last word of Lightning's action name → the region that begins with the action; and those that end a region
BEGINS = {"train_dataloader_next": "data", "batch_to_device": "data", "backward": "backward"}
BEGINS |= {"configure_gradient_clipping": "optimizer"}
ENDS = (
    "train_dataloader_next",
    "batch_to_device",
    "training_step",
    "backward",
    "run_training_batch",
)


class StepProfiler(Profiler):
    """Profiles training steps ``wait + warmup`` to ``wait + warmup + active``, then stops.

    Lightning's PyTorchProfiler has one schedule for training and validation, and cannot tell forward from loss. Here a
    step has the regions ``data`` (waiting for the batch and moving it), ``forward`` (the network), ``loss`` (the rest
    of ``training_step``), ``backward`` and ``optimizer`` (with clipping). The run's folder ``profile`` gets a trace per
    rank for Chrome, Perfetto and TensorBoard; ``top_operations.txt`` has the times of regions and slowest operations.

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
        for name, value, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
            ("rows", rows, 1),
        ):
            require(value >= least, f"--profiler.{name}", f"be at least {least}", value)
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "6"
        )  # else it reports each start, and missing GPUs, on stderr
        self.unrecorded, self.needed, self.rows = (
            wait + warmup,
            wait + warmup + active,
            rows,
        )  # steps
        self.folder: Path | None = None  # once something is written
        self._schedule = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        self._options: dict[str, Any] = {
            "record_shapes": shapes,
            "profile_memory": memory,
            "with_stack": stacks,
        }
        self._profile: profile | None = None
        self._recording, self._calls, self._region = (
            ExitStack(),
            ExitStack(),
            ExitStack(),
        )  # calls: of a training step

    def start(self, action_name: str) -> None:
        hook = action_name.rpartition(".")[2]
        if hook == "run_training_epoch" and self._profile is None and self.folder is None:
            for optimizer in profiled_module(self).trainer.optimizers:
                # inside PyTorch's own range around step(), which must not end before ours
                self._recording.callback(
                    optimizer.register_step_post_hook(lambda *_: self._region.close()).remove
                )
            self._profile = profile(
                schedule=self._schedule, on_trace_ready=self._write, **self._options
            )
            self._recording.callback(setattr, self, "_profile", None)
            self._recording.enter_context(self._profile)
            self._recording.callback(self._region.close)
        if self._profile is None:
            return
        if hook in BEGINS:
            self._switch(BEGINS[hook])
        if hook == "training_step":
            for network in profiled_module(self).children():
                if any(True for _ in network.parameters()):
                    within = partial(self._switch, "forward"), partial(self._switch, "loss")
                    self._calls.enter_context(surround_calls(network, *within))

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
                    f"nothing was profiled: wait, warmup and active take {self.needed} training steps."
                )
        super().teardown(stage)

    def _switch(self, region: str) -> None:
        """End the region that is open, and begin another one."""
        self._region.close()
        self._region.enter_context(record_function(region))

    def _write(self, finished: profile) -> None:
        trainer, steps = profiled_module(self).trainer, finished.step_num - self.unrecorded
        self.folder = Path(trainer.default_root_dir) / "profile"
        tensorboard_trace_handler(str(self.folder), worker_name=f"rank{trainer.global_rank}")(
            finished
        )
        if not trainer.is_global_zero:
            return
        lines = [
            f"{steps} steps. Milliseconds per step:",
            f"{'region':<10} {'CPU':>10} {'device':>10}",
        ]
        for name, microseconds in region_times(finished.events()).items():
            cpu_ms, device_ms = (us / 1000 / max(1, steps) for us in microseconds)
            lines.append(f"{name:<10} {cpu_ms:>10.3f} {device_ms:>10.3f}")
        kind = "cuda" if trainer.strategy.root_device.type == "cuda" else None
        averages = finished.key_averages(group_by_input_shape=self._options["record_shapes"])
        operations = [event for event in averages if not event.is_user_annotation]
        events = EventList(
            operations, use_device=kind, profile_memory=self._options["profile_memory"]
        )
        table = events.table(
            "self_device_time_total" if kind else "self_cpu_time_total", row_limit=self.rows
        )
        (self.folder / "top_operations.txt").write_text("\n".join([*lines, "", table]))
        print(
            f"profile: trace       {self.folder}/rank0.*.pt.trace.json: drop it on https://ui.perfetto.dev"
        )
        print(
            f"         TensorBoard pip install torch-tb-profiler; tensorboard --logdir {self.folder}"
        )
        print(f"         table       less -S {self.folder}/top_operations.txt", flush=True)


def region_times(events: Iterable[Any]) -> dict[str, tuple[float, float]]:
    """Microseconds of every region on the CPU, and of the kernels that any thread launched in it."""
    on_cpu = [event for event in events if event.device_type == DeviceType.CPU]
    launches = [
        (e.time_range.start, sum(kernel.duration for kernel in e.kernels))
        for e in on_cpu
        if e.kernels
    ]
    times: dict[str, tuple[float, float]] = {}
    for name in REGIONS:
        spans = [e.time_range for e in on_cpu if e.is_user_annotation and e.name == name]
        if spans:
            kernels_us = sum(
                us for start, us in launches if any(s.start <= start < s.end for s in spans)
            )
            times[name] = sum(span.end - span.start for span in spans), kernels_us
    return times
