"""A training loop without a framework, in the manner of PyTorch's MNIST example.

A dataset of single images with transforms, one worker process, a validation after each epoch, and
one test at the end:

python docs/peers/plain_pytorch.py --root data --network MLP --epochs 2
"""

import torch
from measured import Measured, arguments, load_digits, make_network
from torch import nn
from torch.utils.data import DataLoader


def train(network: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    """One epoch."""
    network.train()
    for batch_index, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        if batch_index % 50 == 0:
            print(f"batch {batch_index}: loss {loss.item():.4f}")


def accuracy(network: nn.Module, loader: DataLoader) -> float:
    """The share of images that are labelled right, 0-1."""
    network.eval()
    correct = 0
    count = 0
    with torch.no_grad():
        for images, labels in loader:
            predicted = network(images).argmax(dim=1)
            correct += int((predicted == labels).sum())
            count += len(labels)
    return correct / count


def main() -> None:
    """Train, validate after each epoch, test once."""
    options = arguments()
    torch.manual_seed(options.seed)
    train_set, val_set, test_set = load_digits(options.root, options.samples)
    train_loader = DataLoader(train_set, options.batch_size, shuffle=True, num_workers=1)
    val_loader = DataLoader(val_set, 1000, num_workers=1)
    test_loader = DataLoader(test_set, 1000, num_workers=1)
    network = make_network(options.network)
    optimizer = torch.optim.Adam(network.parameters(), lr=options.lr)

    measured = Measured(options, len(train_set))
    for epoch in range(options.epochs):
        train(network, train_loader, optimizer)
        print(f"epoch {epoch}: validation accuracy {accuracy(network, val_loader):.4f}")
    measured.training_ends()
    torch.save(network.state_dict(), options.folder / "network.pt")
    measured.report(accuracy(network, test_loader))


if __name__ == "__main__":
    main()
