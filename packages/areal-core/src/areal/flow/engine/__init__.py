"""The fleet: engine replicas that start, serve, die and are replaced."""
