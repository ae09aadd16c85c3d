"""What an update is made of, for every training backend: packed rows, attention within them, logprobs, the rate."""
