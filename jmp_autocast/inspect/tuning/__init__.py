"""Searching for the operations that have to be kept in float32."""
