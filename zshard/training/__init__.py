"""What ``zshard train`` runs: a byte-level GPT, its data, its loop, its files."""
