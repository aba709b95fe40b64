"""Wrappers and their calls: checks, options, flattened arguments and outputs."""
