"""What keeps a run's promises: command line, run folder, checkpoints, exact resume, stopping, ranks."""
