"""Optimizers over shards; those to be used are in ``optim.py``."""
