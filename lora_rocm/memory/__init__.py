"""Memory of a training step: its prediction, recomputation, offloading, and recovery when memory runs out."""
