"""Where experts compute: the processor's cores, or a GPU."""
