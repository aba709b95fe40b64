"""The traits of all primitives, and this package's own primitives."""
