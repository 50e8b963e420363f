"""Callbacks, one room each."""
