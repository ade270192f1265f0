"""Those who serve experts: the server itself, and the process around it."""
