"""Builtin places where metrics go: a JSONL file, TensorBoard, Weights & Biases."""
