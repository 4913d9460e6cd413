"""KServe's open inference protocol, version 2."""
