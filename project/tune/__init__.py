"""Finding a learning rate and a batch size by short real trainings that leave nothing behind."""
