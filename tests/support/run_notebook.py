"""Runs a notebook from top to bottom, and prints its outputs as JSON, a list for each cell.

python -m tests.support.run_notebook examples/tour.ipynb
"""

import json
import sys

import nbformat
from nbclient import NotebookClient


def main(path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    json.dump([cell.get("outputs", []) for cell in notebook.cells], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
