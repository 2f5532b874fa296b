"""The training child: loop, state, export."""
