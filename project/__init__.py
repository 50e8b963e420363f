"""PyTorch Lightning starter template and finished program: an MNIST classifier that never loses a
run.
"""

__version__ = "0.1.0"
