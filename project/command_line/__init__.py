"""The command line: what a typed line means, and what a checkpoint's configuration may make."""
