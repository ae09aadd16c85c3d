"""The command `areal`: one file per command, each light until it runs."""
