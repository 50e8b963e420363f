"""What is trained: the networks, and the Lightning module that trains one of them."""

from project.model.classifier import MNISTClassifier as MNISTClassifier
from project.model.networks import MLP as MLP
from project.model.networks import ConvNet as ConvNet
