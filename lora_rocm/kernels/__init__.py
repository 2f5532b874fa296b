"""Fused parts of a training step for frozen bases, with less memory traffic and fewer launches than plain modules.

Every part has two backends with one signature: plain PyTorch (``eager``), and Triton where that pays. Results agree to
rounding. ``backend`` chooses. A kernel that fails raises an error; the backend never changes silently.
"""
