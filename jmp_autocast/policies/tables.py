"""The tables with the default cast policy of every JAX primitive.

Sources: PyTorch 2.13's CUDA autocast lists (``ATen/autocast_mode.h``), the lists of TVM's and
TensorFlow's mixed-precision passes, and PyTorch's CPU list for ``fft`` and linear algebra, which
have no 16-bit kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .cast_policy import CastPolicy, Rule
from .equation_view import EquationView

RULES_VERSION = "0.1"
"""The version of these tables and of the planner. CHANGELOG.md lists its changes.

It increases once after a release, with the first change of a program's dtypes that `nox -s dtypes`
reports.
"""


def dot_rule(eqn: EquationView) -> CastPolicy:
    """Matrix products run in the compute dtype; inner products of vectors promote, also in a batch.

    PyTorch lists ``mm``, ``bmm`` and ``linear`` as lower precision, and ``dot`` and ``vdot`` as
    promote: an inner product has no tensor-core kernel, and is usually a norm or a solver's step.
    PyTorch lowers ``vecdot``, a batch of inner products. Here a batch promotes, so that ``vmap``
    does not change the dtype of an inner product: in float16, a vmapped conjugate gradient ended in
    NaN.
    """
    if eqn.free_dimensions == (0, 0):
        return CastPolicy.PROMOTE
    return CastPolicy.LOWER_PRECISION_FP


def integer_pow_rule(eqn: EquationView) -> CastPolicy:
    """Positive powers promote (the cube in GELU); negative powers run in float32, as in PyTorch."""
    # In float16, `x ** -2` overflows for `x` below 1/256.
    negative = eqn.exponent is not None and eqn.exponent < 0
    return CastPolicy.FP32 if negative else CastPolicy.PROMOTE


def div_rule(eqn: EquationView) -> CastPolicy:
    """Division promotes, but a number over an array runs in float32, as in PyTorch."""
    # `0 / x` promotes, because it is exact in every dtype.
    if eqn.literals[0] not in (None, 0.0) and eqn.literals[1] is None:
        return CastPolicy.FP32
    return CastPolicy.PROMOTE


# Rounding commutes with these primitives: each is linear, and only moves, copies or selects
# elements of one operand. If that operand is an input of the program or a constant, the planner
# treats the result like the operand.
DATA_MOVEMENT = frozenset(
    """
    reshape transpose broadcast_in_dim broadcast_to squeeze rev slice dynamic_slice gather split
    unstack tile copy copy_p stop_gradient name device_put with_memory_space_constraint
    sharding_constraint reshard relayout layout_constraint
    pvary pbroadcast pbroadcast_dynamic reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast
    vary_unreduced_cast_p all_gather all_gather_invariant all_gather_reduced all_to_all
    ppermute ragged_all_to_all
    """.split()
)

_NAMES: dict[CastPolicy, str] = {
    CastPolicy.LOWER_PRECISION_FP: """
    conv_general_dilated ragged_dot_general
    dot_product_attention_fwd dot_product_attention_fwd_wrapper
    """,
    CastPolicy.FP32: """
    exp exp2 expm1 log log1p log2 pow rsqrt one_minus_square polynomial
    acos acosh asin asinh atan atanh cosh sinh tan erf_inv
    lgamma digamma polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta
    bessel_i0e bessel_i1e random_gamma
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur
    svd symmetric_product triangular_solve tridiagonal tridiagonal_solve fft
    """,
    # A window sum is a reduction, too. The mean over a 64 x 64 window of 20.0 was 2.0 in bfloat16,
    # and in float16 its sum, 81,920, was infinite.
    CastPolicy.FP32_SET_OPT_DTYPE: (
        "reduce_sum reduce_prod reduce_window_sum cumsum cumprod cumlogsumexp"
    ),
    CastPolicy.FP32_APPEND_DTYPE: "scatter-add scatter-sub scatter-mul",
    CastPolicy.PROMOTE: """
    add sub mul rem max min add_any atan2 select_n concatenate stack pad clamp
    dynamic_update_slice scatter scatter-max scatter-min
    eq ne lt le gt ge
    neg abs sign floor ceil round is_finite square sqrt cbrt sin cos tanh logistic erf erfc
    reduce_max reduce_min argmax argmin cummax cummin sort top_k approx_top_k
    reduce_window_max reduce_window_min select_and_scatter_add
    """,
    CastPolicy.KEEP: """
    iota iota_2x32_shape bitcast_convert_type and or xor not shift_left shift_right_arithmetic
    shift_right_logical reduce_and reduce_or reduce_xor clz population_count mulhi eq_to lt_to
    le_to from_edtype to_edtype lu_pivots_to_permutation axis_index dim_as_value dimension_size
    platform_index real imag complex conj
    random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap
    rng_bit_generator rng_uniform threefry2x32 threefry4x32 philox2x32 philox4x32
    reduce_precision nextafter reduce reduce_window select_and_scatter select_and_gather_add
    psum psum_invariant pmax pmin pmean preduced reduce_scatter psend precv
    unreduced_psum unreduced_pmax unreduced_pmin unreduced_reduce_scatter
    all_gather_start all_gather_done all_gather_reduced_start all_to_all_start all_to_all_done
    pbroadcast_start pbroadcast_done ppermute_start ppermute_done psum_start psum_done
    psum_invariant_start reduce_scatter_start reduce_scatter_done unreduced_psum_start
    unreduced_reduce_scatter_start
    scaled_dot scaled_matmul scaled_matmul_wrapper cudnn_fusion
    dot_product_attention_bwd dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
    dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
    pure_callback io_callback debug_callback debug_print inspect_sharding
    ffi_call call_exported custom_partitioning pallas_call core_map mpmd_map tpu_custom_call
    mosaic_gpu mosaic_gpu_p buffer_callback
    composite custom_linear_solve linear_call custom_lin call_hi_primitive
    run_state new_ref ref ref_new get swap addupdate freeze free_ref empty_ref accum_grad_in_ref
    jaxpr_call call_hi_primitive_linearized new_box box_get box_set new_log log_extend log_read
    after_all create_token create_linear empty empty2 pin unpin tie stage unreachable dce_sink
    check shape_assertion program_order xla_metadata_value
    bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices
    bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract
    bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense
    csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense spsolve todense
    rnn_fwd rnn_bwd fused_call shard_alike
    multiple_of reciprocal run_scoped bitcast roll remove_memory_space
    global_array_to_host_local_array host_local_array_to_global_array
    """,
}

# Each of these primitives holds one jaxpr, and has the same inputs and outputs as that jaxpr.
CALLS = frozenset(
    """
    jit closed_call core_call call eval_jaxpr compute_on xla_metadata_call
    remat2 remat_opt checkpoint
    """.split()
)

# These primitives have no cast policy: each has a planning function in `interpreters/plan`.
STRUCTURAL = CALLS | frozenset(
    """
    convert_element_type optimization_barrier source_view accumulate
    float8_dot tangent_carrier dequantize row_major pick
    scan while cond shard_map custom_jvp_call custom_vjp_call custom_vmap_call
    """.split()
)

# The parameters of these primitives hold a program that was traced for the operands' dtypes. With
# operands of other dtypes, a primitive fails in the middle of a trace or misreads the bits.
TRACED_FOR_DTYPES = frozenset(
    """
    pallas_call core_map mpmd_map tpu_custom_call mosaic_gpu mosaic_gpu_p call_exported ffi_call
    pure_callback io_callback buffer_callback
    """.split()
)

# The products that tensor cores compute.
CONTRACTIONS = frozenset("dot_general conv_general_dilated ragged_dot_general".split())

MOST_THAT_CANNOT_PAY: Mapping[str, int] = MappingProxyType(dict.fromkeys(CONTRACTIONS, 4))
"""The largest contracted size for which a product gains nothing from a matrix unit.

Rotations are such products. A product over 4 elements does 8 operations for each element of its
float32 result: 2 operations a byte, also in a batch. An H100 does 20 operations a byte without its
matrix units (67 TFLOP/s and 3.35 TB/s, NVIDIA's data sheet), so that such a product is limited by
memory. Matrix units sum at least 8 elements of 16 bits on an H100 (``mma.m16n8k8``, PTX ISA), and
128 on a TPU."""


# PyTorch's CUDA lists leave these operations out: PyTorch computes them in float32 and returns the
# dtype of the operands. Here the consumers of such a result get float32. Only as an output of the
# program, with ``output_dtype="computed"``, is the result in the dtype of the operands.
RETURNS_OPERAND_DTYPE = frozenset(
    """
    exp2 acosh asinh atan atanh lgamma digamma cumlogsumexp scatter-add scatter-sub scatter-mul
    reduce_window_sum
    """.split()
)
FUNCTIONS_RETURNING_OPERAND_DTYPE = frozenset(
    """
    elu celu log_sigmoid mish logaddexp logaddexp2 xlogy xlog1py logit hypot _var _std nansum trace
    """.split()
)

# PyTorch runs these operations in float32. Here powers, and the copied elements of
# ``jax.image.resize``, stay in 16 bits if float32 would give their consumers no more precision.
RETURNS_FLOAT32 = frozenset(("square", "integer_pow"))
FUNCTIONS_RETURNING_FLOAT32 = frozenset(("_resize", "softplus"))


def _build() -> dict[str, Rule]:
    table: dict[str, Rule] = {
        "dot_general": dot_rule,
        "integer_pow": integer_pow_rule,
        "div": div_rule,
        **dict.fromkeys(DATA_MOVEMENT, CastPolicy.PROMOTE),
    }
    for policy, names in _NAMES.items():
        for name in names.split():
            if name in table or name in STRUCTURAL:
                raise AssertionError(f"primitive {name!r} is placed twice")
            table[name] = policy
    return table


DEFAULT_RULES: Mapping[str, Rule] = MappingProxyType(_build())
"""The rule of each primitive that is not structural, by the primitive's name."""
