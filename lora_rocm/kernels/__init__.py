"""Fused parts of a training step for frozen bases, with less memory traffic and fewer launches than plain modules.

Every part has two forms with one signature: plain PyTorch (``eager``), and Triton if that pays. Results agree to
rounding. ``backend`` chooses the form. A kernel that fails raises an error; the form never changes silently.
"""
