"""Adapters: what is trained beside a frozen base, and the files that it is read from."""
