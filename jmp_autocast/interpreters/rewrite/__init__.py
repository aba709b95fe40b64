"""Emits the rewritten program from a jaxpr and its `Plan`, and decides no dtype."""
