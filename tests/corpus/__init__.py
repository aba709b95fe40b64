"""In which dtypes a corpus of programs computes, and why: a contract, and proof of what changed.

    python -m tests.corpus dtypes             # this tree against the committed recording
    python -m tests.corpus dtypes COMMIT      # or against that of a commit
    python -m tests.corpus dtypes --record    # which writes it anew: see `contract`

Programs are traced and never compiled. Of each the text holds (see `sections`) the rows of
`explain` at each level in each compute dtype. Equal code gives equal files with one version of JAX;
two versions trace different primitives.

`sources` and `tables` alone know where the tests keep their programs. Apart from what those import,
only the public interface of the package is used. `jaxpr_text` is for tests that compare programs.
"""
