"""A local sweep: its search space, its trials as processes, and its table and picture."""
