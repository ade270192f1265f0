"""What a network does to its links: profiles, fault scripts, and the links that follow them."""
