"""`explain_compiled`: reads the text of an optimized HLO module.

A plan lists the dtypes that `autocast` requests; a compiled module lists the kernels and dtypes
that the compiler chose.

* `hlo`: parses the text into instructions.
* `runs`: the instructions that run as kernels of their own, and how often.
* `products`, `kernels`, `locations`: summaries of one instruction.
* `report`: the result, with its tables; `explain_compiled`: the public function.
"""
