"""Fused operations for training with a frozen base, with less memory traffic and fewer launches than plain modules.

Every operation has a plain PyTorch implementation ("eager"), and a Triton implementation where that is faster. Both
have the same signature, and their results agree to rounding. ``backend`` chooses between them. A kernel that fails
raises an error; the implementation never changes silently.
"""
