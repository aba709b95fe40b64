"""What is known of primitives, and the primitives of our own."""
