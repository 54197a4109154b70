"""What a unit has in memory: its flat buffers, what lies in them, and what units share."""
