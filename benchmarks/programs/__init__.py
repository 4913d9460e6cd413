"""Programs and measurements behind `benchmarks/run bytes`: communication of two partitioners."""
