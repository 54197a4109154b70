"""From a plain model to shards: what ``wrap`` is made of."""
