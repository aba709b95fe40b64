"""A call of a wrapper: checked, flattened, its options and outputs, and the wrapper itself."""
