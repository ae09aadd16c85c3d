"""Where workers run: in this process (`inline`) or as Ray actors (`ray`)."""
