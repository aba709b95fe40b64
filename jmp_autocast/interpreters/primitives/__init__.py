"""Facts about all primitives, and the package's own primitives."""
