"""Lightning's other names as files, for worker processes: see project/engine/lightning_names.py."""
