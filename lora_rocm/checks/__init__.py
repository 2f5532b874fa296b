"""Checks of hardware and kernels against known answers: self-test, canary, frozen weights, graph capture."""
