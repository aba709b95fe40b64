"""Analyses of a finished `Plan`: provenance of values, copies, stored inputs, warnings."""
