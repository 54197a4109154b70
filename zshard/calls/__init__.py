"""What a script asks of a wrapped model between its steps."""
