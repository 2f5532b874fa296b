"""The child processes that import torch, each named after the command that starts it.

The training worker is in ``train``.
"""
