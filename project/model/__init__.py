"""Yours: what is trained. Networks, and the Lightning modules that give them a loss, metrics and an optimizer."""

from project.model.classifier import (
    ImageClassifier,
    MNISTClassifier,  # feature: mnist
)
from project.model.networks import MLP, ConvNet
from project.model.supervised import SupervisedModule

__all__ = ["MLP", "ConvNet", "ImageClassifier", "SupervisedModule"]
__all__ += ["MNISTClassifier"]  # feature: mnist
