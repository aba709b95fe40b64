"""The rows whose dtypes differ from PyTorch's, each with its reason."""

_LINALG = (
    "cholesky_solve",
    "linalg_cholesky",
    "linalg_cond",
    "linalg_eigh",
    "linalg_eigvalsh",
    "linalg_qr",
    "linalg_solve",
    "linalg_svd",
    "linalg_svdvals",
    "lu (linalg_lu_factor, unlisted)",
    "triangular_solve",
)

# Both errors were seen with the kernels of PyTorch 2.13 for the CPU: `"geqrf_cpu" not implemented
# for 'BFloat16'` and the like, and "value cannot be converted to type c10::Half without overflow".
NO_KERNEL = "PyTorch has no 16-bit kernel and raises. The other cases are compared."
NO_FLOAT16 = "PyTorch raises, as -1e9 has no float16 value. Here the result is float32."

NO_RESULT = {
    "binary_cross_entropy": "PyTorch raises under autocast on CUDA. Here it runs in float32.",
    "cholesky": "Not measured; `linalg_cholesky` is compared.",
    "linalg_lstsq": "Not measured.",
}
"""Rows without any dtype of PyTorch's to compare with."""


def unrunnable(op: str, case: str, dtype: str) -> str:
    """Returns why PyTorch's real kernels return nothing, "" if they do."""
    if op in _LINALG and case == "all_bf16":
        return NO_KERNEL
    if op == "masked_fill" and case == "all_bf16" and dtype == "float16":
        return NO_FLOAT16
    return ""


REASONS = {
    "mean": (
        "Most losses end in a mean. PyTorch lists losses as float32, and a traced program shows "
        "the same sum and division for both."
    ),
    "contraction": (
        "The traced program shows the same `dot_general` as for a matmul, which runs in 16 bits. "
        "PyTorch's list for CPUs agrees."
    ),
    "elementwise": (
        "PyTorch lists the op among the matrix products, although it multiplies elements. Here "
        "elementwise products follow their operands."
    ),
    "first": (
        "PyTorch returns the dtype of the first input, but promotes in another op with the same "
        "form in JAX (`torch.cross`, `index_put`, `scatter_add`)."
    ),
    "bias": "PyTorch leaves this private op off its lists, so a float32 weight promotes it.",
    "sum": (
        "A traced `addmm` is `w + a @ b`, the update of a weight. A parameter of the result's full "
        "size is added in float32; a sum with a bias is returned in 16 bits."
    ),
    "vector": "`vmap` of `vdot` is a batch of inner products. Both promote.",
    "cast": (
        "A cast of a float32 value to float32 leaves no equation: use `full_precision()` instead."
    ),
    "near_one": (
        "In 16 bits `1 - z` of a gate next to 1 is 0, so the gate is float32 here. PyTorch's cell "
        "is one kernel, which rounds its result."
    ),
}

DIFFERENCES = {
    "prelu": "elementwise",
    "addr": "elementwise",
    "_addmm_activation": "bias",
    "bilinear": "contraction",
    "cross": "first",
    "tensordot": "contraction",
    "index_copy": "first",
    "mean": "mean",
    "mean.dim": "mean",
    "index_add": "first",
    "to(f32) explicit": "cast",
    "addmm": "sum",
    "addbmm": "sum",
    "baddbmm": "sum",
    "linalg_vecdot": "vector",
}
"""From the name of a row to the key of its reason."""

UNMEASURED = {"gru_cell": "near_one"}
"""The same for rows that agree where PyTorch was measured, and differ in the other cases."""
