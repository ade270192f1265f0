"""What this machine and its network are good for, and what to fix: `shoal doctor`, without torch."""
