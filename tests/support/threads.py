"""Functions that run at once, each in a thread of its own."""

import threading

import jax


def at_once(jobs):
    """Returns what each job of a dict returns, or raises what one of them raised."""
    found = {}

    def work(name, job):
        # JAX's check takes other threads' traces for leaks.
        with jax.check_tracer_leaks(False):
            try:
                found[name] = job()
            except Exception as error:  # pytest does not see what a thread raises
                found[name] = error

    threads = [threading.Thread(target=work, args=job) for job in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found.values():
        if isinstance(result, Exception):
            raise result
    return found
