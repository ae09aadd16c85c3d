"""Which prompt comes next."""
