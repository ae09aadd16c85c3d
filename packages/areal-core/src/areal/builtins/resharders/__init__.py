"""Builtin ways for weights from the trainer to the engines: a folder, shared memory, a process group."""
