"""Small calls over UDP: sealed sessions between two peers, the two sides of a call, and proofs of address."""
