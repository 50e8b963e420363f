"""A run of this program that is killed ends as one that was never killed."""

from unbroken.testing import assert_resumes_exactly

from project.data import MNISTDataModule
from project.model import MLP, MNISTClassifier


def model() -> MNISTClassifier:
    return MNISTClassifier(MLP(hidden=[8]))


def data() -> MNISTDataModule:
    return MNISTDataModule(source="sample", train_samples=640, val_samples=64, batch_size=32)


def test_a_run_can_be_killed() -> None:
    assert_resumes_exactly(model, data, steps=12)
