"""Fashion-MNIST: the same file format as MNIST, so only names and numbers differ.

python -m project.fit --config configs/examples/fashion_mnist.yaml
"""

from project.data import MNISTDataModule


class FashionMNIST(MNISTDataModule):
    """60,000 + 10,000 pictures of clothes, from ``root/FashionMNIST/raw`` or torchvision's
    download.
    """

    folder = "FashionMNIST/raw"
    torchvision_dataset = "FashionMNIST"
    files = dict.fromkeys(MNISTDataModule.files)  # the same names; no checksums to compare with
    sample_folder = None
    mean = [0.2860]
    std = [0.3530]
    class_names = [
        "T-shirt",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Boot",
    ]
