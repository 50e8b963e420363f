"""Where metrics go: metrics.csv, and trackers such as W&B."""
