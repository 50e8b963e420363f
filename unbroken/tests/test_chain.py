"""The chain of digests by which a run proves itself: equal trainings have equal chains, and others
show where they part.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numerals
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from unbroken import ExactCheckpoint
from unbroken.checkpoint import windows
from unbroken.commands import runs
from unbroken.parts.chain import Chain, Link
from unbroken.storage.checkpoint_files import read
from unbroken.tensors.bits import settled, sums_of_bits, tensors_and_plain

from tests.commands import SMALL, complete, summary
from tests.other_tasks import StreamWithState
from tests.plain_module import Regression, rows
from tests.stopped_runs import train
from tests.test_exact_checkpoint import fit

# Of 105 steps: a window ends inside the epoch and one at its end.
LONG = [*SMALL, "--data.train_samples", "6720", "--monitors", "none", "--max_epochs", "1"]


def compared(capsys: pytest.CaptureFixture[str], *names: str) -> list[str]:
    """What the command ``runs`` says of the chains of these runs."""
    capsys.readouterr()
    assert runs.main(numerals.__name__, ["--compare", *names]) == 0
    return capsys.readouterr().out.splitlines()[1 - len(names) :]


def test_equal_runs_have_equal_chains_also_after_a_kill_and_another_seed_has_other_batches(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = train("one", *LONG)
    train("other", *LONG, "--enable_checkpointing", "false")
    train("seed", *LONG, "--seed_everything", "5")
    killed = [*LONG, "--run_name", "killed", "--checkpoint_every", "30"]
    words = [sys.executable, "-m", "tests.interrupted", "98", "SIGKILL", *killed]
    assert complete(words).returncode == -signal.SIGKILL
    train("killed", "--ckpt_path", "auto")

    equal = "all 2 windows are equal: batches, generators, weights and optimizer."
    place = "window 1 (epoch 1, after step 0 to 100): batches, generators, weights, optimizer."
    assert compared(capsys, "one", "other", "killed", "seed") == [
        f"one and other: {equal}",
        f"one and killed: {equal}",
        f"one and seed differ first in {place}",
    ]
    facts = summary(one)
    resumed = summary(one.parent / "killed")
    assert resumed["digest"] == facts["digest"] == summary(one.parent / "other")["digest"]
    assert "digest_resumed_at" not in facts
    assert resumed["digest_resumed_at"] == [90]


class Nudge(Callback):
    """Changes one weight a little after a step."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 70:
            with torch.no_grad():
                pl_module.net[0].weight[0, 0] += 1e-7


def links(keep: ExactCheckpoint) -> list[Link]:
    return keep.engine.kept.chain.links


def what_differs(one: ExactCheckpoint, other: ExactCheckpoint) -> list[str]:
    """Of each link the digests that differ."""
    found = []
    for mine, its in zip(links(one), links(other), strict=True):
        names = [name for name in Link._fields if getattr(mine, name) != getattr(its, name)]
        found.append(" ".join(names))
    return found


@pytest.mark.nightly
def test_a_weight_that_is_changed_shows_in_the_first_link_after_it(workplace: Path) -> None:
    plain = fit("plain", epochs=3)
    assert [(each.epoch, each.step) for each in links(plain)] == [
        (0, 50),
        (1, 100),
        (1, 100),
        (2, 150),
    ]
    changed = fit("changed", Nudge(), epochs=3)
    assert what_differs(plain, changed) == ["", *["weights optimizer"] * 3]


@pytest.mark.nightly
def test_a_large_module_is_looked_at_between_epochs_alone(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def is_large(trainer: Trainer) -> bool:
        asked.append(trainer.global_step)
        return chain_is_large(trainer)

    chain_is_large = windows.is_large
    monkeypatch.setattr(windows, "is_large", is_large)
    monkeypatch.setattr("unbroken.parts.chain.LARGE_BYTES", 0)
    large = fit("large", epochs=3)
    # To add up the sizes of all weights is no work for each step.
    assert asked == [100]
    assert [(each.epoch, each.step) for each in links(large)] == [(0, 50), (1, 100), (2, 150)]
    state = read(workplace / "large" / "last.ckpt")["run"]["state"]
    assert state["ranks"][0]["bits_in_memory"] == {}


class Flips(Regression):
    """A bit of what a checkpoint holds flips on its way into the memory of the training."""

    entry = ""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.entry == "weights":
            flip_a_bit(checkpoint["state_dict"]["net.0.weight"])
        if self.entry == "moments":
            flip_a_bit(checkpoint["optimizer_states"][0]["state"][0]["exp_avg"])


class FlipsWeights(Flips):
    entry = "weights"


class FlipsMoments(Flips):
    entry = "moments"


def flip_a_bit(tensor: Tensor) -> None:
    tensor.view(torch.int32)[0, 0] ^= 1


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (FlipsWeights, ["weights"]),
        (FlipsMoments, ["optimizer"]),
        (Flips, []),
    ],
)
def test_a_bit_that_flips_in_weights_or_moments_in_memory_is_said_at_the_resume(
    workplace: Path, capsys: pytest.CaptureFixture[str], make: Any, what: list[str]
) -> None:
    fit("run", epochs=1)
    capsys.readouterr()
    fit("run", epochs=2, make=make)
    printed = capsys.readouterr().out
    names = {"weights": "the weights", "optimizer": "the state of the optimizer"}
    for name, shown in names.items():
        line = f"{shown} in memory: not what was saved"
        assert (line in printed) == (name in what)


def test_a_bit_that_flips_in_the_weights_of_a_file_is_refused_by_the_sums_of_the_file(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = fit("run", epochs=1)
    weight = read(keep.last_path)["state_dict"]["net.0.weight"].numpy().tobytes()
    content = bytearray(keep.last_path.read_bytes())
    content[content.index(weight) + 5] ^= 1
    keep.last_path.write_bytes(content)
    capsys.readouterr()
    assert keep.resume_from == str(keep.best_path)
    assert f"skipped: {keep.last_path}" in capsys.readouterr().out


class Stream(StreamWithState):
    """Samples that come one after the other, from a source that may have grown at its front."""

    is_grown = False

    def __init__(self) -> None:
        super().__init__()
        samples = [*rows(120, 0)]
        self.rows: Any = [samples[0], *samples[:-1]] if self.is_grown else samples


class Streaming(Regression):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(), 4)


class Dies(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 17:
            raise InterruptedError


@pytest.mark.daily(1)
@pytest.mark.parametrize("is_grown", [False, True])
def test_a_sample_of_a_stream_that_a_resume_repeats_shows_in_the_batches(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, is_grown: bool
) -> None:
    undisturbed = fit("undisturbed", make=Streaming, epochs=1)
    with pytest.raises(InterruptedError):
        fit("killed", Dies(), make=Streaming, epochs=1)
    # The sample that came last before the stop comes once more.
    monkeypatch.setattr(Stream, "is_grown", is_grown)
    resumed = fit("killed", make=Streaming, epochs=1)
    assert resumed.engine.kept.chain.resumed_at == [15]
    before = links(undisturbed)[0]
    after = links(resumed)[0]
    assert before.step == after.step == 30
    assert (after.batches != before.batches) == is_grown
    longer = fit("killed", make=Streaming, epochs=2)
    assert longer.engine.kept.chain.resumed_at == [15, 30]


def test_the_batches_of_every_rank_are_in_the_chain(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beside(folder: str, batches_of_other: int) -> ExactCheckpoint:
        def as_two_ranks(mine: Any, group: Any) -> list[Any]:
            return [mine, (batches_of_other, *mine[1:])]

        monkeypatch.setattr(windows, "gather_from_ranks", as_two_ranks)
        return fit(folder, epochs=1)

    one = beside("one", 1)
    assert what_differs(one, beside("same", 1)) == [""]
    assert what_differs(one, beside("other", 2)) == ["batches"]


def test_a_chain_tells_what_came_before_its_last_link() -> None:
    same = Chain()
    other = Chain()
    for chain, first in ((same, 1), (other, 2)):
        chain.add(0, 100, [(first, 1, 1, 1)])
        chain.add(0, 200, [(5, 5, 5, 5)])
    assert same.links[1].batches != other.links[1].batches
    assert same.links[1].weights == other.links[1].weights
    assert same.end != other.end


def bits(*tensors: Tensor) -> list[int]:
    return settled(sums_of_bits(tensors))


@pytest.mark.parametrize("kind", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(3, 5), (130, 784)])
def test_whatever_changes_in_a_tensor_changes_the_sum_of_its_bits(
    kind: torch.dtype, size: tuple[int, int]
) -> None:
    # The larger one has several chunks in float64, the smaller one no whole words in uint8.
    torch.manual_seed(0)
    tensor = torch.randint(0, 100, size).to(kind)
    swapped = tensor.clone()
    swapped[0], swapped[-1] = tensor[-1], tensor[0]
    others = [tensor.flip(1), swapped, tensor.cumsum(0).to(kind)]
    for place in (0, tensor.numel() // 2, tensor.numel() - 1):
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[place * tensor.itemsize] ^= 1
        others.append(changed)
    found = {tuple(bits(each)) for each in [tensor, *others]}
    assert len(found) == 1 + len(others)


def test_the_sum_of_bits_is_that_of_the_values_however_they_lie_in_memory() -> None:
    tensor = torch.randn(64, 3, 8, 8)
    lies_otherwise = tensor.to(memory_format=torch.channels_last)
    inside = torch.cat([torch.zeros(1), tensor.view(-1)])[1:].view(tensor.shape)
    trained = torch.nn.Parameter(tensor.clone())
    for each in (lies_otherwise, inside, trained):
        assert bits(each) == bits(tensor)
    sparse = torch.eye(4).to_sparse()
    assert bits(sparse) == bits(torch.eye(4).to_sparse()) != bits((2 * torch.eye(4)).to_sparse())


def test_another_device_has_the_sums_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [
        torch.randn(300, 1000),
        torch.arange(5, dtype=torch.uint8),
        torch.randn(64, 64)[:, 1],
    ]
    on_cpu = bits(*tensors)
    # The code of other devices works in CPU memory as well.
    monkeypatch.setattr(Tensor, "is_cpu", False)
    assert bits(*tensors) == on_cpu


def test_what_is_no_tensor_counts_in_a_batch() -> None:
    batch = {"image": torch.ones(2), "name": "a", "pair": (1, [2.0, None]), "set": {"x", "y"}}
    for name, other in (("name", "b"), ("pair", (1, [2.5, None])), ("set", {"x"})):
        assert tensors_and_plain({**batch, name: other})[1] != tensors_and_plain(batch)[1]
    tensors, rest = tensors_and_plain({**batch, "image": torch.ones(2, 1)})
    assert len(tensors) == 1
    assert rest != tensors_and_plain(batch)[1]


def test_the_size_of_a_module_with_a_sparse_buffer_is_known() -> None:
    module = Regression()
    module.register_buffer("links", torch.eye(3).to_sparse())
    trainer: Any = SimpleNamespace(lightning_module=module)
    assert not windows.is_large(trainer)
