"""vLLM as a rollout engine of AReaL."""
