"""Pure tensor operations: no configuration objects, no state, no imports of radix_mla.

This package must never define a version attribute: transformers probes a distribution of the
same name with `find_spec("kernels")` and would take ours for it.
"""
