"""The scenarios that measure Shoal, and the frame that they share."""
