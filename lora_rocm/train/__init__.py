"""The training child: adapter, loop, state, export."""
