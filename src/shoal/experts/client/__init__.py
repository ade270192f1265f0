"""Those who ask experts: one expert at a time, or a batch at many experts of a grid."""
