"""What the two peers share: options, the digits, the network, and what they report at their end."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, Subset, random_split
from torchvision import datasets, transforms

from project.model import MLP, ConvNet

NETWORKS: dict[str, type[nn.Module]] = {"MLP": MLP, "ConvNet": ConvNet}
# Mean and standard deviation of MNIST's pixels in 0-1, as its examples use them.
MEAN_AND_STD = ((0.1307,), (0.3081,))
VALIDATION_SHARE = 1 / 12


def arguments() -> argparse.Namespace:
    """The options of a peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True, help="folder of MNIST/raw")
    parser.add_argument("--folder", type=Path, required=True, help="where files are written")
    parser.add_argument("--network", choices=list(NETWORKS), default="MLP")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, help="only the first N images, to try it")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def make_network(name: str) -> nn.Module:
    """The template's own network, so that all train the same."""
    return NETWORKS[name]()


def load_digits(root: Path, samples: int | None) -> tuple[Dataset, Dataset, Dataset]:
    """Single images with the usual transforms: 55,000 to train, 5,000 to validate, 10,000 to
    test.
    """
    usual = transforms.Compose([transforms.ToTensor(), transforms.Normalize(*MEAN_AND_STD)])
    known = datasets.MNIST(str(root), train=True, transform=usual)
    test = datasets.MNIST(str(root), train=False, transform=usual)
    count = samples or len(known)
    val_count = round(count * VALIDATION_SHARE)
    some = Subset(known, range(count))
    train, val = random_split(some, [count - val_count, val_count])
    return train, val, Subset(test, range(min(count, len(test))))


class Measured:
    """The seconds of a training, with its validations, and the report that ``compare.py`` reads."""

    def __init__(self, options: argparse.Namespace, train_samples: int) -> None:
        self.options = options
        self.samples = train_samples * options.epochs
        self.began = time.perf_counter()
        self.seconds = 0.0

    def training_ends(self) -> None:
        """The last epoch and its validation are done."""
        self.seconds = time.perf_counter() - self.began

    def report(self, test_accuracy: float) -> None:
        """Write what was measured."""
        facts = {
            "training_s": self.seconds,
            "samples_per_sec": self.samples / self.seconds,
            "test_accuracy": test_accuracy,
            "threads": torch.get_num_threads(),
        }
        (self.options.folder / "measured.json").write_text(json.dumps(facts))
