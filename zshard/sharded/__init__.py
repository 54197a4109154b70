"""What may be done to the sharded tensors of ``param.py``."""
