"""What a GPU, NCCL and CUDA's switches ask of the engine, as far as it shows without a GPU; the
rest is marked gpu.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import Precision
from torch import nn
from unbroken.checkpoint.before_hooks import has_room_for
from unbroken.checkpoint.shared_buffers import share_buffers
from unbroken.errors import UserError
from unbroken.lightning_internals import average_on_the_device, averaged_models
from unbroken.results.facts import git_state
from unbroken.run.final_test import final_test, float32_products
from unbroken.stopping import ranks
from unbroken.stopping.agreement import Agreement
from unbroken.stopping.ranks import gather_from_ranks
from unbroken.storage.checkpoint_files import AtomicCheckpointIO
from unbroken.storage.run_files import RunFiles
from unbroken.storage.savable import NotPlain

from tests.monitored import Linear
from tests.own_environment import REPOSITORY, SEARCHED, no_surprises

# TF32: older and newer switches.

CUDA, CUDNN, ONEDNN = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn.matmul
NEWER: list[Any] = [CUDA, ONEDNN, CUDNN.conv, CUDNN.rnn]  # type: ignore[attr-defined]


@pytest.fixture
def _switches() -> Iterator[None]:
    before = [switch.fp32_precision for switch in NEWER]
    yield
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = True
    for switch, value in zip(NEWER, before, strict=True):
        switch.fp32_precision = value


def older(read: Callable[[], Any]) -> Any:
    """What an older switch says, or that reading it is an error."""
    try:
        return read()
    except RuntimeError:
        return "error"


def switches() -> list[Any]:
    old = [
        older(torch.get_float32_matmul_precision),
        older(lambda: CUDNN.allow_tf32),
        older(lambda: CUDA.allow_tf32),
    ]
    return [*old, *(switch.fp32_precision for switch in NEWER)]


def nothing() -> None:
    pass


def by_the_older_switches() -> None:
    torch.set_float32_matmul_precision("medium")
    CUDNN.allow_tf32 = False


def by_the_newer_for_products() -> None:
    CUDA.fp32_precision = "tf32"


def by_the_newer_for_convolutions() -> None:
    CUDNN.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize(
    "change",
    [nothing, by_the_older_switches, by_the_newer_for_products, by_the_newer_for_convolutions],
)
def test_a_float32_test_switches_tf32_off_and_leaves_every_switch_as_it_was(
    change: Callable[[], None],
) -> None:
    change()
    before = switches()
    with float32_products():
        assert switches() == ["highest", False, False, "ieee", "ieee", "ieee", "ieee"]
    assert switches() == before


# The final test.


class WithTest(Linear):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def test_dataloader(self) -> list[Any]:
        return []


def test_the_final_test_of_a_compiled_network_compiles_nothing() -> None:
    compiled: list[Any] = []
    module = WithTest()
    module.layer.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward)

    def test(module: Any, **_: Any) -> list[dict[str, float]]:
        return [{"test/sum": float(module.layer(torch.ones(1, 8)).sum().detach())}]

    trainer: Any = SimpleNamespace(
        precision_plugin=Precision(), strategy=None, callback_metrics={}, loggers=[], test=test
    )
    config: Any = SimpleNamespace(module=module, datamodule=None)
    assert final_test(trainer, config, None).keys() == {"test/sum"}
    assert compiled == []
    module.layer(torch.ones(1, 8))
    assert len(compiled) == 1  # as it does elsewhere


# Averaged weights.


def averaging(module: nn.Module, **options: Any) -> tuple[EMAWeightAveraging, Any]:
    """The callback as it is when training begins, and its averaged model."""
    callback = EMAWeightAveraging(decay=0.9, **options)
    trainer: Any = SimpleNamespace(
        callbacks=[callback], strategy=SimpleNamespace(root_device=torch.device("meta"))
    )
    callback.setup(trainer, module, "fit")  # type: ignore[arg-type]
    average_on_the_device(trainer)
    (model,) = averaged_models(trainer)
    return callback, model


def test_averaged_weights_lie_on_the_device_and_their_count_on_the_host() -> None:
    """The device is PyTorch's ``meta``: a value that is read from it, as ``bool(tensor)`` does, is
    an error there.
    """
    _, model = averaging(Linear())
    assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}
    trained = Linear().to("meta")
    for _ in range(3):
        model.update_parameters(trained)
    assert (int(model.n_averaged), model.n_averaged.device.type) == (3, "cpu")
    _, told = averaging(Linear(), device="cpu")
    assert {parameter.device.type for parameter in told.module.parameters()} == {"cpu"}


def test_the_average_is_the_one_that_it_was_and_saves_as_plain_tensors(tmp_path: Path) -> None:
    module, plain = Linear(), EMAWeightAveraging(decay=0.9)
    plain.setup(SimpleNamespace(), module, "fit")  # type: ignore[arg-type]
    (theirs,) = averaged_models(SimpleNamespace(callbacks=[plain]))  # type: ignore[arg-type]
    _, ours = averaging(module, device="cpu")
    for _ in range(3):
        nn.init.normal_(module.layer.weight)
        for model in (ours, theirs):
            model.update_parameters(module)  # type: ignore[operator]
    torch.save(ours.state_dict(), tmp_path / "average.pt")
    loaded = torch.load(tmp_path / "average.pt", weights_only=True)
    assert loaded.keys() == theirs.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in theirs.state_dict().items())


# NCCL.


def test_what_lies_on_the_cpu_is_not_given_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        dist, "broadcast", lambda tensor, src, group: calls.append((tensor.device.type, group))
    )
    module = Linear()
    module.register_buffer("here", torch.zeros(1))
    module.register_buffer("there", torch.zeros(1, device="meta"))
    trainer: Any = SimpleNamespace(world_size=2, callbacks=[])
    share_buffers(trainer, module, cpu_group="gloo")
    assert calls == [("cpu", "gloo"), ("meta", None)]


def test_the_group_of_a_launchers_ranks_is_taken_down_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_exit: list[Callable[[], Any]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "launched_world", lambda: (0, 1 if dist.is_initialized() else 2, 1))
    monkeypatch.setattr(dist, "init_process_group", with_one_rank(dist.init_process_group))
    assert ranks.decided_by_rank_zero("it", lambda: "decided") == "decided"
    assert dist.is_initialized()
    for leave in at_exit:
        leave()
    assert not dist.is_initialized()


def with_one_rank(init: Callable[..., None]) -> Callable[..., None]:
    return lambda backend, **options: init("gloo", **{**options, "world_size": 1})


# A save that fails.


def save_with_a_fault(
    rank: int, folder: Path, fault: Exception | None, is_of_before: bool, told: Any
) -> None:
    """One of two ranks: rank 0 writes a checkpoint, and that or the write before fails."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def fail(*_: Any) -> None:
        if fault is not None:
            raise fault

    torch.save = fail

    def save_checkpoint(path: Path, weights_only: bool) -> None:
        # What the ranks tell each other of their parts.
        assert gather_from_ranks("part", group) == ["part", "part"]
        if rank == 0:
            strategy.checkpoint_io.save_checkpoint({}, path)
        dist.barrier()  # Lightning's, at the end of every save

    strategy = SimpleNamespace(barrier=dist.barrier, checkpoint_io=AtomicCheckpointIO())
    trainer: Any = SimpleNamespace(
        save_checkpoint=save_checkpoint,
        strategy=strategy,
        is_global_zero=rank == 0,
        precision_plugin=Precision(),
        datamodule=None,
    )
    agreement = Agreement()
    agreement.begin(2)
    group = agreement.group
    files = RunFiles(folder)
    if is_of_before and rank == 0:
        files._thread.begin(partial(AtomicCheckpointIO().write, {}, folder / "before.ckpt"))
    nothing: dict[str, Any] = {
        "copied_to": None,
        "add_state": dict,
        "add_weights": lambda _: None,
        "flush": lambda: None,
        "when_saved": lambda: None,
    }
    try:
        files.write(trainer, target=files.last, group=group, **nothing)
        told.put((rank, None))
    except Exception as error:
        told.put((rank, f"{type(error).__name__}: {error}"))
    dist.destroy_process_group()


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    "fault",
    [
        None,
        UserError("the disk is full"),
        NotPlain("this would not load again"),
        MemoryError("no memory for the file"),
        RuntimeError("an enforced check failed"),
    ],
)
@pytest.mark.parametrize("is_of_before", [False, True])
def test_every_rank_learns_that_rank_zero_could_not_save(
    tmp_path: Path, fault: Exception | None, is_of_before: bool
) -> None:
    """Two processes with gloo. A rank that is not told would wait at a barrier that the other never
    reaches.
    """
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    processes = [
        context.Process(target=save_with_a_fault, args=(rank, tmp_path, fault, is_of_before, told))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    try:
        outcomes = dict(told.get(timeout=30) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert outcomes[0] == outcomes[1]
    if fault is not None:
        assert outcomes[0].startswith("UserError: ")
        assert f"{fault}. The run has stopped; what its folder holds is whole." in outcomes[0]


@pytest.mark.parametrize(("free", "has_room"), [(79, False), (80, True)])
def test_a_copy_of_the_weights_takes_no_memory_that_training_may_need(
    monkeypatch: pytest.MonkeyPatch, free: int, has_room: bool
) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    tensors: Any = [SimpleNamespace(device=gpu, nbytes=30), SimpleNamespace(device=gpu, nbytes=10)]
    tensors += [torch.zeros(100)]
    assert has_room_for(tensors, gpu) == has_room
    assert has_room_for(tensors, torch.device("cpu"))


# A copy without .git, as it is sent to a machine with a GPU.


def test_a_copy_without_git_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert git_state(REPOSITORY) == (None, None)
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert git_state(REPOSITORY) == ("abc", None)


# The tests themselves.


def test_the_callers_python_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of a machine with a GPU may lie in a folder that only this variable names."""
    monkeypatch.setenv("PYTHONPATH", "/packages")
    no_surprises(monkeypatch)
    searched = [*map(str, SEARCHED), "/packages"]
    assert os.environ["PYTHONPATH"] == os.pathsep.join(searched)
