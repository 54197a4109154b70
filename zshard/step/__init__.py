"""Which collective is issued when, and carried out: what runs below ``Schedule`` in a step."""
