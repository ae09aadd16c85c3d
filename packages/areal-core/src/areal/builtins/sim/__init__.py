"""The simulated cluster: the real controller, real journal and real staleness law over workers that only take time."""
