"""Yours: what is trained.

Networks, and the Lightning modules that give them a loss, metrics and an optimizer.
"""

from project.model.classifier import ImageClassifier as ImageClassifier  # feature: images
from project.model.classifier import MNISTClassifier as MNISTClassifier  # feature: mnist
from project.model.networks import MLP as MLP  # feature: images
from project.model.networks import ConvNet as ConvNet  # feature: images
from project.model.supervised import SupervisedModule as SupervisedModule  # feature: supervised
