"""What a `Plan` says besides dtypes: where values come from, how they are read, who is told."""
