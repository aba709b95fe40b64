"""The HTML page of a report: a template and a style sheet that become one file."""
