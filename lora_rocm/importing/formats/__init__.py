"""File formats of other trainers' configurations: each is read into settings with their lines."""
