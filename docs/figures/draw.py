"""Draws the pictures of the site, once for light and once for dark pages.

python docs/figures/draw.py            # SVG files beside this one, as the site takes them
python docs/figures/draw.py FOLDER     # somewhere else
"""

from __future__ import annotations

import pathlib
import sys
from types import ModuleType

if __name__ == "__main__":
    _DOCS = pathlib.Path(__file__).parents[1]
    sys.path[:0] = [str(_DOCS / "tools"), str(_DOCS), str(_DOCS.parent)]

from figures import coloring, compilers, flow, memory, seconds, training
from figures.style import FOLDER, MODES, save, styled

PICTURES: dict[str, ModuleType] = {
    "flow": flow,
    "coloring": coloring,
    "training": training,
    "memory": memory,
    "compilers": compilers,
    "seconds": seconds,
}


def write_all(folder: pathlib.Path = FOLDER, pictures: dict[str, ModuleType] = PICTURES) -> None:
    """Draws pictures.

    Args:
        folder: Where the files go.
        pictures: From their names to their modules.
    """
    for name, module in pictures.items():
        data = module.data()
        for style in MODES:
            with styled(style):
                save(module.draw(data, style), name, style, folder)


if __name__ == "__main__":
    write_all(*map(pathlib.Path, sys.argv[1:2]))
