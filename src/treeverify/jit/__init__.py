"""Turns csrc/ into callables; the only package that imports tvm_ffi."""
