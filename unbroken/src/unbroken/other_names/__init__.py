"""Lightning's other names as files, for worker processes: see unbroken/lightning_names.py."""
