"""What a checkpoint of somebody else may make."""
