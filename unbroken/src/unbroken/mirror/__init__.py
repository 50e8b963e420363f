"""A second place for a run, in a store that outlives the machine."""
