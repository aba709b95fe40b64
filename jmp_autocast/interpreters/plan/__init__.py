"""Plans a jaxpr under a `Policy`: chooses a dtype for every value, with a reason."""
