"""A local hyperparameter search: trials of ``fit`` beside each other, the hopeless ones stopped
early.
"""
