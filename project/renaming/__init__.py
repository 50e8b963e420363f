"""How a clone gets another package name: which words are the package's name, and which files only MNIST needs."""
