"""The heavy child processes of the commands, named as the command that starts them. The worker is in ``train``."""
