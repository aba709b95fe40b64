"""`explain_compiled`: reads the text of an optimized HLO module.

A plan lists the dtypes that `autocast` requests; a compiled module lists the kernels and dtypes
that the compiler chose.

* `hlo`: text to instructions.
* `runs`: the instructions that run as kernels of their own, and how often.
* `products`, `kernels`, `locations`: a summary of each instruction.
* `report`: tables; `explain_compiled`: the public function.
"""
