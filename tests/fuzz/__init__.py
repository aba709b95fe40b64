"""A fuzzer: random JAX programs, and the promises of `autocast` checked on each.

A program is source text: `generator` draws operations, asks JAX for the types of their results and
keeps what traces. `properties` checks the promises; `error_model` says how far a value may be from
float32's, and `facts` where it has to be float32. Equal seeds give equal programs with one version
of JAX.

Not drawn, and why: eigenvectors and singular vectors (their signs are free), gamma and Poisson
samples (one takes a second to compile), `pallas_call` and `ffi_call` (no interpreter has their
kernels), collectives over several devices (a program has one), gradients of loops with an unknown
number of steps (JAX has none; their tangents are checked).
"""
