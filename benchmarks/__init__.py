"""Speed, bytes and memory, each beside a peer in the same run: `benchmarks/run NAME --help`."""
