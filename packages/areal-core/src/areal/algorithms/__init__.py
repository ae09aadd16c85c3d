"""Learning algorithms, one small file each, and the formulas they share (advantages, ratios, losses)."""
