"""The command line: how a command starts, reads its flags, explains a mistake in one line, and
ends.
"""
