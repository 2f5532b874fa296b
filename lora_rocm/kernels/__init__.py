"""Pieces of a training step with less memory traffic and fewer launches than plain modules, for frozen bases.

Every piece has two forms of one signature: plain PyTorch (``eager``), and Triton where that pays. What is computed is
the same to rounding. ``choice`` says which form runs; a kernel that fails is an error, never a change of form.
"""
