"""What a run has reached: its facts, its numbers, what is left of it."""
