"""How the facts of a machine are found, on Linux, Windows and elsewhere. Standard library only."""
