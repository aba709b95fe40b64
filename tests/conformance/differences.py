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
NO_KERNEL = (
    "PyTorch has no 16-bit kernel for this linear algebra and raises; the dtypes in the data "
    "come from tensors without values. The float32 and float64 cases are compared."
)
NO_FLOAT16 = (
    "PyTorch raises, as -1e9 has no float16 value. The other cases are compared. Here the result "
    "is float32, so that the mask stays finite."
)

NO_RESULT = {
    "binary_cross_entropy": "PyTorch refuses it under autocast on CUDA. Here it runs in float32.",
    "cholesky": "The measured call failed for another reason; `linalg_cholesky` is compared.",
    "linalg_lstsq": "Not measured: PyTorch's shape inference does not cover the op.",
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
        "A mean is the last step of most losses, which PyTorch lists as float32 and JAX programs "
        "write as `jnp.mean` of something; the traced program shows the same sum and division. "
        "PyTorch's own `mean` returns 16 bits."
    ),
    "contraction": (
        "In a traced program this is the same `dot_general` as an `einsum` or a matmul, which both "
        "run in 16 bits. PyTorch lists this spelling as one that promotes; in its CPU list it is "
        "16 bits, too."
    ),
    "elementwise": (
        "PyTorch lists the op among the matrix products, although it only multiplies elements. "
        "Here elementwise products follow their operands: 16 bits would save no time on matrix "
        "units and cost precision."
    ),
    "first": (
        "PyTorch returns the dtype of the first input and rounds the others to it, but promotes in "
        "another op that JAX spells in the same way (`torch.cross`, `index_put`, `scatter_add`), "
        "for which the dtypes agree. Nothing is rounded behind the user's back here."
    ),
    "bias": (
        "PyTorch leaves this private op off its lists, so that a float32 weight makes its result "
        "float32. Here the same holds with and without the activation."
    ),
    "sum": (
        "A traced `addmm` is `w + a @ b`, the update of a weight, in which 16 bits would round the "
        "weight. A parameter of the result's full size is added in float32, which costs one fused "
        "temporary; a bias is added in 16 bits."
    ),
    "vector": (
        "A batch of inner products is what `vmap` makes of `vdot`, which both promote. `vmap` must "
        "not change what a function computes."
    ),
    "cast": (
        "A cast to float32 of a value that is declared as float32 leaves no equation in the traced "
        "program. `full_precision()` marks code that must stay in float32."
    ),
    "near_one": (
        "A gate whose distance to 1 counts is float32, and so is what it multiplies: in 16 bits "
        "`1 - z` of a gate next to 1 is 0. PyTorch's cell is one kernel, which rounds its result."
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
