"""Pure tensor operations: no configuration objects, no state, no imports of radix_mla.

Each module is one operation: torch on the CPU, which is also the oracle of the Triton kernel of
the same name in `kernels/triton/` that runs where the tensors are on a GPU.

This package must never define a version attribute: transformers probes a distribution of the
same name with `find_spec("kernels")` and would take ours for it.
"""
