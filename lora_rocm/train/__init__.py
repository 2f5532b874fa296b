"""The training process: its loop, its state, and the export."""
