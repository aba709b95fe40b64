"""Products of weights in 8 bits: an extension of the planner.

`products.py` chooses the products that run in 8 bits and emits them; the planner calls no other
file. `units.py` has the devices with 8-bit units, `last_products.py` the heads of a model,
`scale.py` the 8-bit copies of arrays and their keys, `dot.py` the primitive, its derivatives and
its lowering, with `dimensions.py`. `dequantize.py` has `QuantizedArray`, a weight that is stored in
8 bits. The recipe, which is an option of a policy, is in `policies/float8.py`.
"""

from . import products

__all__ = ["products"]
