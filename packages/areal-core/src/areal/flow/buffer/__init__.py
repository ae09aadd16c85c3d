"""What is finished and not yet trained: on disk first, in memory second."""
