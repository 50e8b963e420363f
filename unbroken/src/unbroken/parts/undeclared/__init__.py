"""State that nobody has declared: plain attributes, and modules that are no layers.

The walk of :mod:`unbroken.parts.held` finds it, within the bounds of
:mod:`unbroken.holding.bounds`. ``ExactCheckpoint(..., undeclared=False)`` keeps none of it. Then,
and where it cannot be kept, :class:`unbroken.parts.undeclared.not_kept.NotKept` tells what changes.
"""
