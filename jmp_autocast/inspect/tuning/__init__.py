"""`tune`: the search for the operations that need float32."""
