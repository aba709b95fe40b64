"""jaxpr and `Policy` to `Plan`: a dtype and a reason for every value. No JAX tracing."""
