"""From groups to an update: advantages, rows, minibatches, the backend."""
