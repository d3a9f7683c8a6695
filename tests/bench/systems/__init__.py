"""What is measured: each system with the same jobs; a peer's script needs nothing of this project."""
