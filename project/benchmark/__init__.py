"""``python -m project.benchmark``: this machine's tables, one file per table."""
