"""Recording: the sections of the chosen programs, one compressed file for each source."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.metadata
import json
import pathlib
import platform
import re
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from .program import FEW, Program
from .sections import sections
from .sources import SOURCES

ABOUT = "about.json"
SUFFIX = ".jsonl.gz"
PACKAGES = "jaxlib numpy flax equinox dm-haiku optax diffrax".split()
"""What programs of the corpus come from, or are traced with: another version has others."""

QUICK = 6
"""How many programs of each source a quick recording has."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which programs are recorded.

    Args:
        only: A regular expression that ``source: name`` matches somewhere.
        quick: A few of each source, spread over it, in few settings.
        plans: Of each only in which dtypes it computes, and why.
    """

    only: str = ""
    quick: bool = False
    plans: bool = False

    def of_source(self, source: str) -> list[Program]:
        programs = list(SOURCES[source]())
        names = [program.name for program in programs]
        if len(set(names)) < len(names):
            raise ValueError(f"{source} has programs of one name: {sorted(names)}")
        programs = [p for p in programs if re.search(self.only, f"{source}: {p.name}")]
        if self.quick and len(programs) > QUICK:
            places = np.linspace(0, len(programs) - 1, QUICK).astype(int)
            programs = [programs[i] for i in places]
        return programs

    def sections(self, program: Program) -> dict[str, str]:
        settings = tuple(s for s in program.settings if not self.quick or s in FEW)
        return sections(program, settings, self.plans)


def record(folder: pathlib.Path, choice: Choice) -> None:
    """Writes the sections of all chosen programs, and says what each source takes of CPU time."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"python": platform.python_version(), "jax": jax.__version__}
    about |= {name: version for name in PACKAGES if (version := installed(name))}
    (folder / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
    for source in SOURCES:
        start = time.process_time()
        recorded = {p.name: choice.sections(p) for p in choice.of_source(source)}
        if recorded:
            write(folder / f"{source}{SUFFIX}", recorded)
        # One source is recorded as it is where the others are not.
        jax.clear_caches()
        print(summary(source, recorded, time.process_time() - start), flush=True)


def installed(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def summary(source: str, recorded: dict[str, dict[str, str]], seconds: float) -> str:
    texts = [text for found in recorded.values() for text in found.values()]
    errors = sum(text.startswith("raises ") for text in texts)
    size = sum(map(len, texts)) / 1e6
    return (
        f"{source:18} {len(recorded):5} programs {len(texts):6} sections {errors:5} raise "
        f"{size:7.1f} MB {seconds:6.1f} s"
    )


def write(path: pathlib.Path, recorded: dict[str, dict[str, str]]) -> None:
    """Writes one JSON document a line; equal texts give equal bytes."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        for name, found in recorded.items():
            file.write(json.dumps([name, found]).encode() + b"\n")


def read(folder: pathlib.Path, source: str) -> dict[str, dict[str, str]]:
    """Reads a source of a recording; {} if the recording has none of it."""
    path = folder / f"{source}{SUFFIX}"
    if not path.exists():
        return {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return dict(map(json.loads, file))


def recorded_sources(folders: Sequence[pathlib.Path]) -> Iterator[str]:
    """The sources that any of the folders has."""
    names = {path.name for folder in folders for path in folder.glob(f"*{SUFFIX}")}
    yield from sorted(name.removesuffix(SUFFIX) for name in names)
