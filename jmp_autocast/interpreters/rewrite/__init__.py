"""jaxpr and `Plan` to the rewritten program. Decides no dtype."""
