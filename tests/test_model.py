"""Networks, optimizer and schedule by plain values; compiled, recomputed and eager networks interchange."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from project.errors import UserError
from project.model import MLP, ConvNet, MNISTClassifier
from project.model.classifier import MOST_KEPT
from project.model.networks import recompute_activations
from project.model.optimizers import make_optimizer, rate_factor


def test_the_mlp_is_the_course_s() -> None:
    assert sum(p.numel() for p in MLP().parameters()) == 235_146
    assert MLP()(torch.rand(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("network", [MLP(), ConvNet()])
def test_networks_take_an_empty_batch(network: nn.Module) -> None:
    assert network.eval()(torch.rand(0, 1, 28, 28)).shape == (0, 10)


@pytest.mark.parametrize("network", [MLP(dropout=0.5), ConvNet()])
def test_recomputed_activations_give_the_same_gradients_and_keys(network: nn.Module) -> None:
    images = torch.rand(8, 1, 28, 28)
    twin = copy.deepcopy(network)
    recompute_activations(twin)
    assert list(twin.state_dict()) == list(network.state_dict())
    gradients = []
    for one in (network, twin):
        torch.manual_seed(0)
        one(images).sum().backward()
        gradients.append([p.grad for p in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_recomputing_stores_fewer_activations() -> None:
    def stored_bytes(network: nn.Module) -> int:
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(torch.rand(64, 1, 28, 28)).sum()
        return total

    network = ConvNet()
    before = stored_bytes(network)
    recompute_activations(network)
    assert stored_bytes(network) < 0.5 * before


def test_compiled_checkpoints_are_eager_ones() -> None:
    eager = MNISTClassifier(MLP())
    compiled = MNISTClassifier(MLP(), compile=True)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    eager.load_state_dict(compiled.state_dict())


def test_weight_decay_spares_biases_and_norms() -> None:
    optimizer = make_optimizer("AdamW", ConvNet(), 1e-3, {"weight_decay": 0.1}, fused=True)
    decayed, spared = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    assert all(p.ndim < 2 for p in spared["params"])
    assert optimizer.defaults["fused"]


@pytest.mark.parametrize("name", ["SGD", "Adam", "torch.optim.RMSprop"])
def test_optimizers_are_named(name: str) -> None:
    assert type(make_optimizer(name, MLP(), 0.1, {"weight_decay": 0.0}, False)).__name__ == name.split(".")[-1]


def test_an_unknown_optimizer_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean AdamW"):
        make_optimizer("AdmW", MLP(), 0.1, {}, False)


@pytest.mark.parametrize("shape", ["constant", "cosine", "linear", "onecycle"])
def test_schedules_climb_to_the_peak_and_survive_a_longer_run(shape: str) -> None:
    factors = [rate_factor(shape, 0.2, 100, step) for step in range(101)]  # type: ignore[arg-type]
    assert max(factors) == pytest.approx(1.0)
    assert factors.index(max(factors)) == 20
    assert 0 < factors[0] < 0.1
    assert rate_factor(shape, 0.2, 100, 150) == factors[-1] == (1.0 if shape == "constant" else 0.0)  # type: ignore[arg-type]
    assert rate_factor(shape, 0.2, -1, 7) == 1.0  # type: ignore[arg-type]


def test_logits_are_counted_and_let_go_of_between_log_steps_that_are_far_apart() -> None:
    """An epoch's logits of a network with many classes would fill a GPU."""
    torch.manual_seed(0)
    module, network = MNISTClassifier(MLP()), MLP()
    network.load_state_dict(module.network.state_dict())
    right = 0
    for index in range(2 * MOST_KEPT):
        images, labels = torch.rand(4, 1, 28, 28), torch.randint(10, (4,))
        right += int((network(images).argmax(dim=1) == labels).sum())
        module.training_step((images, labels), index)
    assert sum(logits.untyped_storage().nbytes() for _, logits, _ in module.window) == 0
    assert module.take_window_loss() > 0
    assert float(module.train_accuracy.compute()) == right / (4 * 2 * MOST_KEPT)
