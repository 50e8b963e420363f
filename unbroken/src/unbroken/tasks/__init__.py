"""Supervised tasks: network, loss, metrics, optimizer and schedule are configuration."""

from unbroken.tasks.classifier import ImageClassifier as ImageClassifier
from unbroken.tasks.supervised import SupervisedModule as SupervisedModule
