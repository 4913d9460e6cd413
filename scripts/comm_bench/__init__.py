"""Programs and measurements behind `scripts/bench_bytes`: communication of two partitioners."""
