"""The pictures of the site: a module for each, and `draw`, which writes the files."""
