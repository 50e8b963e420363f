"""What a checkpoint holds beyond Lightning's own: one class for each thing.

Lightning saves weights, optimizers, schedules, the states of callbacks and of the data module, and
the counters of its loops. An exact resume needs more.
:class:`unbroken.checkpoint.kept.KeptParts` has the list of what more a checkpoint of this project
holds. Each part has ``take(trainer)`` and ``give_back(trainer, value)`` one below the other. A part
of your own, for state that your code keeps, is a subclass of :class:`Part` that you give to
``ExactCheckpoint(..., parts=[...])``.
"""

from unbroken.parts.part import Part as Part
