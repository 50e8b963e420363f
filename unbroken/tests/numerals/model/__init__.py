"""What is trained: the networks, and the Lightning module that trains one of them."""

from numerals.model.classifier import MNISTClassifier as MNISTClassifier
from numerals.model.networks import MLP as MLP
from numerals.model.networks import ConvNet as ConvNet
