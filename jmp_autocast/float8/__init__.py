"""Products of weights in 8 bits, as an extension of the planner.

`products.py` chooses the products that run in 8 bits and plans them; the planner calls no other
file of this folder. `units.py` checks the device for 8-bit units. `last_products.py` finds the
products whose results reach no other product. `scale.py` makes the 8-bit copies of arrays. `dot.py`
has the primitive of a product with its derivatives and lowering, and `dimensions.py` computes
dimension numbers. `carriers.py` has two helper primitives, and `dequantize.py` has
`QuantizedArray`, a weight that is stored in 8 bits. The recipe, an option of a policy, is in
`policies/float8.py`.
"""

from . import products

__all__ = ["products"]
