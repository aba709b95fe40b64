"""HTML pages of reports: one template, one style, one table, in files that need nothing else."""
