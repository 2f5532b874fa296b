"""The machine as plain data: facts, architectures, memory, wheels. Standard library only."""
