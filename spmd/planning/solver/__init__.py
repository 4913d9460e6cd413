"""The cheapest joint state of a cost network: numbers alone, of shardings it knows nothing."""
