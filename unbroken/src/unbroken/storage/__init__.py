"""Files of a run: written whole or not at all, and read without running anything."""
