"""Networks and the Lightning modules that train them."""

from project.model.classifier import ImageClassifier, MNISTClassifier
from project.model.networks import MLP, ConvNet

__all__ = ["MLP", "ConvNet", "ImageClassifier", "MNISTClassifier"]
