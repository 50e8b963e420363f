"""Signals, what ranks agree on, schedulers."""
