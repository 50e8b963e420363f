"""An MNIST classifier in PyTorch Lightning, whose runs are never lost."""

__version__ = "0.1.0"
