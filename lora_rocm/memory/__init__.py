"""Memory of a training step: its count, recomputation, offloading, and recovery when memory runs out.

``planning`` predicts it without a model.
"""
