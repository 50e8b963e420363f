"""Questions about values that several rooms ask."""
