"""The training process: its loop, its state and resume, and the export. The loss is in ``families.objectives``."""
