"""The builtin training backend: any Hugging Face causal language model on one device."""
