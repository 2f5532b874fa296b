"""Plain data about the machine: facts, GPU architectures, memory and torch wheels. Standard library only."""
