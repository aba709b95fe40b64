"""The rewritten jaxprs and the plans of a corpus of programs, as text: proof that nothing changed.

    python -m tests.corpus record DIR_A         # about 8 minutes, before a change
    python -m tests.corpus record DIR_B         # after it
    python -m tests.corpus compare DIR_A DIR_B  # exit code 1, and the first differing lines

Programs are traced and never compiled. Of each the text holds (see `sections`): the rewritten
program and its gradient at each level in each compute dtype, and the rows of `explain`. Equal code
gives equal files with one version of JAX; two versions print different primitives and parameters.

While working: ``--quick`` records some programs of every source in about a minute, ``--only
PATTERN`` those whose ``source: name`` matches. Compare such a recording with a whole one by
``compare --common``.

``python -m tests.corpus dtypes`` compares with the committed recording (see `contract`), which
holds the sections ``plan ...`` alone.

`sources` and `tables` alone know where the tests keep their programs. Apart from what those import,
only the public interface of the package is used.
"""
