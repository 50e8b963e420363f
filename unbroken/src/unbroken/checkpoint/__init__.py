"""ExactCheckpoint: what is saved and when, what a resume gets back, how a run stops."""
