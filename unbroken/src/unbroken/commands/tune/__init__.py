"""Finding a learning rate and a batch size by short real trainings that leave nothing behind."""

from unbroken.commands.tune.command import main as main
