"""A plugin to begin from: an environment and an engine wrapper."""
