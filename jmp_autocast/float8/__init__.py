"""Products of weights in 8 bits: a room of its own, which registers itself with the planner.

`products.py` says which products run in 8 bits and what is emitted for them, and is the whole of
what the planner calls. Before it: `units.py` (what devices have), `last_products.py` (the heads of
a model), `scale.py` (what a copy in 8 bits is, and the keys that it is found by), `dot.py` (the
primitive, its derivatives and its lowering), with `dimensions.py`.
`dequantize.py` holds `QuantizedArray`, a weight that is stored so. The recipe, which is an option
of a policy, is in `policies/float8.py`.
"""

from . import products

__all__ = ["products"]
