"""Types that plugins implement and messages that stages exchange; no torch, no behaviour."""
