"""Calls over TCP: frames in and out, the two sides of a call, connections and who looks after them."""
