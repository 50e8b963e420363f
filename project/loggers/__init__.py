"""Where metrics go: metrics.csv and W&B."""
