"""Adapters for frameworks. Import one by its name, such as ``jmp_autocast.integrations.nnx``."""
