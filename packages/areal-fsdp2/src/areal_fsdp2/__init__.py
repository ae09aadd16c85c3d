"""Training on many devices: FSDP2 on a mesh of data, tensor, sequence, pipeline and expert parallelism."""
