"""Publishing: the two-phase transaction by which a version reaches every engine or none."""
