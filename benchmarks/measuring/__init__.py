"""What the benchmarks share: running either side of a comparison, reading its curve, saying what came out."""
