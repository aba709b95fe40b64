"""The HTML page of `explain`: a template and a style, in one file that needs nothing else."""
