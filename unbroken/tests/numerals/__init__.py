"""The program that the library's tests run: MNIST by configuration, over `unbroken.tasks`."""
