"""The builtin inference engine: continuous batching on any Hugging Face causal language model."""
