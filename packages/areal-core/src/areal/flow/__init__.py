"""prompts -> rollout -> buffer -> trainer -> weights -> engine: one folder a stage, `loop.py` draws the circle."""
