"""Runs the code of a Markdown page, in the order of the page, and compares what it prints."""

import contextlib
import doctest
import io

from .markdown_pages import blocks

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_page(text, name):
    """Runs the blocks of a page; raises AssertionError where a block prints something else."""
    namespace = {"__name__": "__main__"}
    found = blocks(text)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language != "python":
            continue
        if ">>>" in block.text:
            run_doctest(block, namespace, name)
            continue
        program = compile("\n" * (block.line - 1) + block.text, name, "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, namespace)
        if after is not None and after.language == "text" and after.follows:
            same_text(after, printed.getvalue(), name)


def run_doctest(block, namespace, name):
    parsed = doctest.DocTestParser().get_doctest(block.text, namespace, name, name, block.line)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(parsed, out=report.write, clear_globs=False)
    assert not runner.failures, report.getvalue()


def same_text(block, printed, name):
    assert doctest.OutputChecker().check_output(block.text, printed, FLAGS), (
        f"{name}:{block.line} shows\n{block.text}and the block before it prints\n{printed}"
    )
