"""The heavy children that try what is fastest and right on this machine for the shapes of a recipe."""
