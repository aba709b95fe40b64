"""Thin adapters for frameworks, each imported by itself: ``jmp_autocast.integrations.nnx``."""
