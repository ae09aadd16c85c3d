"""Starting a user's own script with the machinery of `areal run`."""
