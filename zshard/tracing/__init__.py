"""``zshard.trace``: what is recorded of training, how it is summed up, drawn and written."""
