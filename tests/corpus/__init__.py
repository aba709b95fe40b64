"""In which dtypes a corpus of programs computes, and why: a contract, and proof of what changed.

    python -m tests.corpus dtypes               # against the committed recording: see `contract`
    python -m tests.corpus record DIR_A         # before a change
    python -m tests.corpus record DIR_B         # after it
    python -m tests.corpus compare DIR_A DIR_B  # exit code 1, and the first differing lines

Programs are traced and never compiled. Of each the text holds (see `sections`) the rows of
`explain` at each level in each compute dtype. Equal code gives equal files with one version of JAX;
two versions trace different primitives.

While working: ``--quick`` records some programs of every source, ``--only PATTERN`` those whose
``source: name`` matches, ``--limit N`` the first N of each source.

`sources` and `tables` alone know where the tests keep their programs. Apart from what those import,
only the public interface of the package is used. `jaxpr_text` is for tests that compare programs.
"""
